"""Every stage killed with SIGKILL and started again ends with the bytes of an undisturbed run (time figures aside).

One undisturbed run of the quickstart at a tiny size is compared with one in which each stage is killed several times: at
moments drawn over its undisturbed duration, the later ones counted from when its directory first holds data, so that the
kill lands in the work and not only in what comes before it.
"""

from __future__ import annotations

import random
import signal
import subprocess
import time
from pathlib import Path

import pytest
from fakes import forks
from fakes.stage_files import contents

RECIPE = forks.ROOT / "tests" / "golden" / "tiny_recipe"
STAGES = ("ingest", "sft", "profile", "select", "train", "eval")
KILLS_PER_STAGE = 2


def _finish(stage: str, run: Path) -> float:
    started_s = time.monotonic()
    process = forks.start([stage, RECIPE, "--run", run])
    assert process.wait() == 0, f"{stage}: {process.printed()[-3000:]}"
    return time.monotonic() - started_s


def _kill_after(stage: str, run: Path, delay_s: float, *, from_first_data: bool) -> bool:
    """Starts the stage and kills it; False where it was faster than the killer."""
    process = forks.start([stage, RECIPE, "--run", run])
    if from_first_data:
        while process.poll() is None and not any((run / stage).glob("[!_.]*")):
            time.sleep(0.01)
    try:
        process.wait(timeout=delay_s)
    except subprocess.TimeoutExpired:
        process.kill()
    return process.wait() == -signal.SIGKILL


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, float]]:
    run = tmp_path_factory.mktemp("undisturbed") / "run"
    return run, {stage: _finish(stage, run) for stage in STAGES}


@pytest.mark.slow
@pytest.mark.timeout(2700)
def test_a_killed_run_ends_with_the_same_bytes(undisturbed: tuple[Path, dict[str, float]], tmp_path: Path) -> None:
    reference, seconds = undisturbed
    run, rng = tmp_path / "run", random.Random(7)
    num_killed = 0
    for stage in STAGES:
        for kill in range(KILLS_PER_STAGE):
            from_first_data = kill > 0
            span_s = 0.5 * seconds[stage] if from_first_data else seconds[stage]
            num_killed += _kill_after(stage, run, rng.uniform(0.0, span_s), from_first_data=from_first_data)
        _finish(stage, run)
    assert num_killed >= len(STAGES), f"only {num_killed} kills landed before the stage had ended"
    expected, actual = contents(reference), contents(run)
    assert sorted(actual) == sorted(expected)
    different = [name for name in expected if actual[name] != expected[name]]
    assert different == [], "files differ after a kill"
