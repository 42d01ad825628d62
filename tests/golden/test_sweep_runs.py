"""A sweep of real runs: stopped and started again, its runs end with the bytes of a process of their own, whatever ran before them in theirs."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest
import yaml
from fakes import forks

from pivotrl.rundir import MANIFEST, STAGES, read_json
from pivotrl.sweeping.schedule import RECORD

RECIPE = forks.ROOT / "tests" / "golden" / "tiny_recipe"
SPEC = {
    "name": "tiny",
    "domains": [{"name": "desk"}],
    "arms": [
        {"name": "tiny", "recipe": str(RECIPE), "domains": ["desk"], "seeds": [3, 4], "set": {"select": {"rule": "random", "num_turns": 11}}},
        {
            "name": "as_many",
            "recipe": str(RECIPE),
            "domains": ["desk"],
            "seeds": [4],
            "after": ["tiny"],
            "set": {"select": {"rule": "random", "as_many_as": "{run}/../tiny-${seed}"}, "train": {"num_steps": 1}},
        },
    ],
    "set": {"eval": {"suites": [{"type": "world", "num_samples": 1}], "diagnostics": None}},
}


def _children(process: int) -> list[int]:
    return [int(word) for word in Path(f"/proc/{process}/task/{process}/children").read_text().split()]


def _is_alive(process: int) -> bool:
    """False of one that has ended and that nobody has asked for yet, too: it has no command line."""
    try:
        return bool(Path(f"/proc/{process}/cmdline").read_bytes())
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_stopped_sweep_ends_with_the_bytes_of_runs_alone(tmp_path: Path) -> None:
    (tmp_path / "spec.yaml").write_text(yaml.safe_dump(SPEC))
    sweep = ("sweep", tmp_path / "spec.yaml", "--root", tmp_path / "runs", "--workers", 1)
    stopped = forks.start(sweep)
    while stopped.poll() is None and not (tmp_path / "runs" / "desk" / "tiny-3" / "profile").is_dir():
        time.sleep(0.05)
    workers = _children(stopped.pid)
    stopped.send_signal(signal.SIGTERM)
    printed = stopped.printed()
    assert (stopped.returncode, "the same command resumes" in printed) == (130, True), printed[-2000:]
    assert workers
    deadline_s = time.monotonic() + 20
    while (left := [one for one in workers if _is_alive(one)]) and time.monotonic() < deadline_s:
        time.sleep(0.05)
    assert not left, "a worker outlived the sweep"
    resumed = forks.start(sweep)
    assert resumed.wait() == 0, resumed.printed()[-2000:]
    assert {one["status"] for one in read_json(tmp_path / "runs" / RECORD)["runs"].values()} == {"done"}
    overrides = ("select={rule: random, num_turns: 11}", "eval={suites: [{type: world, num_samples: 1}], diagnostics: null}", "seed=4")
    alone = forks.start(["run", RECIPE, "--run", tmp_path / "alone", *overrides])
    assert alone.wait() == 0, alone.printed()[-2000:]
    after_others = tmp_path / "runs" / "desk" / "tiny-4"
    for stage in STAGES[:-1]:
        assert (after_others / stage / MANIFEST).read_bytes() == (tmp_path / "alone" / stage / MANIFEST).read_bytes(), stage
    drawn = read_json(tmp_path / "runs" / "desk" / "as_many-4" / "select" / MANIFEST)["summary"]
    assert (drawn["num_pivots"], drawn["rule"]["num_turns"]) == (11, 11)
