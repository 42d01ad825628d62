"""SIGKILL at any moment of profile or select, then the same command: the same files, byte for byte, as an undisturbed run."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from fakes.profile_run import run_stage, sometimes_right
from fakes.runs import trajectory, write_ingest

from pivotrl import rundir
from pivotrl.rollouts.scripted import ScriptedEngine

TESTS = Path(__file__).resolve().parents[1]


def start(run: Path, stage: str, moment: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-m", "fakes.profile_run", str(run), stage, moment], cwd=TESTS, stderr=subprocess.PIPE)


def finish(run: Path, stage: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rundir, "source_commit", lambda: "fixed")
        run_stage(run, stage, ScriptedEngine.from_function(sometimes_right))


def contents(directory: Path) -> dict[str, bytes]:
    """Every file but the clock's."""
    return {str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob("*") if path.is_file() and path.name != "timing.json"}


def ingested(run: Path) -> Path:
    write_ingest(run / "ingest", [trajectory(number, num_turns=4) for number in range(5)], held_out_frac=0.3)
    return run


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = ingested(tmp_path_factory.mktemp("undisturbed"))
    finish(run, "profile")
    finish(run, "select")
    return run


def test_an_undisturbed_run_leaves_only_its_products(undisturbed: Path) -> None:
    assert set(contents(undisturbed / "profile")) == {"profiles.parquet", "rollouts.parquet", "manifest.json", "_SUCCESS", "_RESUME_KEY"}
    assert set(contents(undisturbed / "select")) == {
        "pivots.parquet",
        "held_out.parquet",
        "decisions.parquet",
        "selection.json",
        "manifest.json",
        "_SUCCESS",
        "_RESUME_KEY",
    }


@pytest.mark.parametrize(
    "moment",
    [
        "call:4",
        "write:000001.jsonl",
        "placed:rollouts.parquet",
        "placed:profiles.parquet",
        "units",
        "write:_SUCCESS",
    ],
)
def test_profile_killed_at_a_named_moment(moment: str, tmp_path: Path, undisturbed: Path) -> None:
    run = ingested(tmp_path)
    killed = start(run, "profile", moment)
    _, errors = killed.communicate(timeout=300)
    assert killed.returncode == -signal.SIGKILL, errors.decode()
    assert not (run / "profile" / "_SUCCESS").exists()
    finish(run, "profile")
    assert contents(run / "profile") == contents(undisturbed / "profile")


def test_profile_killed_from_outside_while_it_samples(tmp_path: Path, undisturbed: Path) -> None:
    run = ingested(tmp_path)
    process = start(run, "profile", "slow")
    while not (run / "profile" / "units" / "000001.jsonl").exists():
        assert process.poll() is None
        time.sleep(0.01)
    process.kill()
    process.communicate(timeout=300)
    finish(run, "profile")
    assert contents(run / "profile") == contents(undisturbed / "profile")


@pytest.mark.parametrize("moment", ["placed:held_out.parquet", "write:_SUCCESS"])
def test_select_killed_at_a_named_moment(moment: str, tmp_path: Path, undisturbed: Path) -> None:
    (tmp_path / "profile").symlink_to(undisturbed / "profile")
    killed = start(tmp_path, "select", moment)
    _, errors = killed.communicate(timeout=300)
    assert killed.returncode == -signal.SIGKILL, errors.decode()
    finish(tmp_path, "select")
    assert contents(tmp_path / "select") == contents(undisturbed / "select")
