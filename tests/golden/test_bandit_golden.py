"""Whole training runs against committed numbers: any change of the method's arithmetic or randomness shows, to 1e-5 per metric.

The oracle tests pin formulas; this pins how they are put together: order of pivots, seeds, counting, denominators, Adam, validation.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent))

from bandit_golden import CONFIGS, GOLDEN, metrics_of_run

from pivotrl.rundir import read_json

MAX_RESIDUAL, MEAN_RESIDUAL = 1e-5, 1e-6


@pytest.mark.parametrize("name", CONFIGS)
def test_run_equals_golden(name: str) -> None:
    golden = read_json(GOLDEN)["runs"][name]
    assert golden["config"] == CONFIGS[name].model_dump(mode="json")
    rows = metrics_of_run(CONFIGS[name])
    assert [sorted(row) for row in rows] == [sorted(row) for row in golden["rows"]]
    residuals = [abs(row[key] - old[key]) for row, old in zip(rows, golden["rows"], strict=True) for key in row]
    assert max(residuals) <= MAX_RESIDUAL
    assert sum(residuals) / len(residuals) <= MEAN_RESIDUAL


def test_golden_runs_learn() -> None:
    """A golden file of a run that does nothing would pin nothing."""
    for name, run in read_json(GOLDEN)["runs"].items():
        rewards = [row["rollout/reward/mean"] for row in run["rows"] if "rollout/reward/mean" in row]
        assert rewards[-1] > rewards[0] + 0.3, name


def test_golden_file_says_why() -> None:
    golden = read_json(GOLDEN)
    assert golden["reason"]
    assert {"torch", "python", "machine", "device"} == set(golden["environment"])
