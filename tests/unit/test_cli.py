"""The command line on bad input: one line that names the thing, the rule and the fix, exit code 2, never a traceback."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path

import pytest

QUICKSTART = str(Path(__file__).resolve().parents[2] / "recipes" / "quickstart")
CHAT = {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello\u2028there"}]}


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (["run", "nowhere"], ["nowhere holds no recipe.yaml"]),
        (["run", QUICKSTART, "profile.num_samples=1"], ["profile.num_samples is 1", "greater than or equal to 2"]),
        (["run", QUICKSTART, "select.lambda_diff=0"], ["select.lambda_diff is 0", "greater than 0"]),
        (["run", QUICKSTART, "select.lambda_diff=1.5"], ["select.lambda_diff is 1.5", "less than or equal to 1"]),
        (["run", QUICKSTART, "selct.rule=all"], ["unknown key selct", "did you mean 'select'"]),
        (["train", QUICKSTART, "--run", "absent"], ["has no _SUCCESS", "run `pivotrl"]),
        (["select", QUICKSTART, "--run", "absent"], ["absent/profile has no _SUCCESS"]),
        (["ingest", "nowhere", "--out", "out"], ["nowhere does not exist"]),
        (["ingest", "empty", "--out", "out"], ["nothing was kept"]),
        (["ingest", "empty", "--out", "out", "--format", "tua2"], ["format 'tua2' is unknown", "did you mean 'tau2'"]),
        (["ingest", "broken", "--out", "out"], ["nothing was kept"]),
        (["ingest", "broken", "--out", "taken"], ["taken"]),
        (["report", "empty"], ["empty holds no stage of a run"]),
        (["config", "shape"], ["a recipe is a YAML mapping"]),
        (["config", "empty"], ["holds no recipe.yaml"]),
    ],
)
def test_user_errors_are_one_line(
    words: list[str], parts: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cli: Callable[..., tuple[int, str, str]]
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("empty", "broken", "shape"):
        (tmp_path / name).mkdir()
    (tmp_path / "broken" / "data.json").write_bytes(b"\x00\x01\x02")
    (tmp_path / "shape" / "recipe.yaml").write_text("- a\n")
    (tmp_path / "taken").write_text("a file")
    code, _, err = cli(*words)
    lines = [line for line in err.splitlines() if line.startswith("pivotrl: error: ")]
    assert code == 2
    assert len(lines) == 1
    assert "Traceback" not in err
    for part in parts:
        assert part in lines[0]


def test_broken_files_are_set_apart_and_the_rest_is_kept(tmp_path: Path, cli: Callable[..., tuple[int, str, str]]) -> None:
    data = tmp_path / "data"
    data.mkdir()
    good = json.dumps(CHAT, ensure_ascii=False).encode()
    (data / "good.jsonl").write_bytes(good + b"\n{broken\n" + good.replace(b"hello", b"hullo") + b"\n")
    (data / "binary.json").write_bytes(b"\x00\xff" * 50)
    (data / "pointer.jsonl").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 1\n")
    (data / "cut.jsonl.gz").write_bytes(gzip.compress(good * 100)[:60])
    code, out, _ = cli("ingest", str(data), "--out", str(tmp_path / "out"))
    assert code == 0
    assert "openai_chat" in out
    audit = json.loads((tmp_path / "out" / "audit.json").read_text())
    trajectories = [entry["trajectories"] for entry in audit["formats"].values()]
    assert sum(entry["kept"] for entry in trajectories) == 2
    assert all(entry["present"] == entry["kept"] + entry["dropped"] + entry["quarantined"] for entry in trajectories)
    assert sum(entry["quarantined"] for entry in trajectories) == 4
    assert (tmp_path / "out" / "_SUCCESS").exists()


def test_config_prints_every_value_with_its_origin(cli: Callable[..., tuple[int, str, str]]) -> None:
    code, out, _ = cli("config", QUICKSTART, "train.group_size=5")
    line = next(line for line in out.splitlines() if "train.group_size" in line)
    assert code == 0
    assert line.split() == ["train.group_size", "5", "command", "line"]
    assert any("train.optimizer.beta2" in line and "default" in line for line in out.splitlines())
