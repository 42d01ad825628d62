"""SIGKILL at any moment of ingest, then the same command: the same files, byte for byte, as an undisturbed run."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import orjson
import pytest
from fakes.ingest_run import MOMENTS, run

from pivotrl.trajectories import ingest
from pivotrl.trajectories.store import CandidateStore

TESTS = Path(__file__).resolve().parents[1]


def row(number: int) -> bytes:
    text = " ".join(f"word{number * 31 + i}" for i in range(40))
    messages = [{"role": "user", "content": text}, {"role": "assistant", "content": f"It is {number}."}, {"role": "user", "content": "thanks"}]
    return orjson.dumps({"messages": [*messages, {"role": "assistant", "content": f"Bye {number}."}], "id": f"task-{number % 9}"})


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Several work units of 4 KiB, with duplicates across units, so that a resumed run must remember what it has seen."""
    folder = tmp_path_factory.mktemp("data")
    for number in range(6):
        rows = [row(number * 4 + i) for i in range(6)]
        (folder / f"{number}.jsonl").write_bytes(b"\n".join([*rows, b"{broken"]))
    return folder


@pytest.fixture(autouse=True)
def small_units(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ingest, "_PART_BYTES", 4096)


@pytest.fixture(scope="module")
def undisturbed(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("undisturbed")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ingest, "_PART_BYTES", 4096)
        audit = run(data, out)
    entry = audit["formats"]["openai_chat"]
    # 36 rows of which 10 repeat one of the file before, and one broken line a file.
    assert entry["trajectories"] == {"present": 42, "kept": 26, "dropped": 10, "quarantined": 6}
    return out


def contents(directory: Path) -> dict[str, bytes]:
    return {
        path.relative_to(directory).as_posix(): path.read_bytes() for path in directory.rglob("*") if path.is_file() and path.name != "timing.json"
    }


def test_an_undisturbed_run_leaves_only_its_products(undisturbed: Path) -> None:
    names = {"trajectories.parquet", "candidates.parquet", "audit.json", "manifest.json", "_SUCCESS", "_RESUME_KEY"}
    assert set(contents(undisturbed / "ingest")) == names
    assert not [path for path in (undisturbed / "ingest").iterdir() if path.is_dir()]
    assert len(CandidateStore.open(undisturbed / "ingest")) == 52


@pytest.mark.parametrize("moment", MOMENTS)
def test_killed_and_resumed_equals_undisturbed(moment: str, data: Path, undisturbed: Path, tmp_path: Path) -> None:
    killed = subprocess.run([sys.executable, "-m", "fakes.ingest_run", str(data), str(tmp_path), moment], cwd=TESTS, capture_output=True, check=False)
    assert killed.returncode == -signal.SIGKILL, killed.stderr.decode()
    assert not (tmp_path / "ingest" / "_SUCCESS").exists()
    run(data, tmp_path)
    assert contents(tmp_path / "ingest") == contents(undisturbed / "ingest")


def test_killed_twice(data: Path, undisturbed: Path, tmp_path: Path) -> None:
    for moment in ("add:20", "finish:2", "merge:1"):
        subprocess.run([sys.executable, "-m", "fakes.ingest_run", str(data), str(tmp_path), moment], cwd=TESTS, capture_output=True, check=False)
    run(data, tmp_path)
    assert contents(tmp_path / "ingest") == contents(undisturbed / "ingest")
