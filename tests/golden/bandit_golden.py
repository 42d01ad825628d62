"""The golden bandit runs, and the command that writes them anew: `python tests/golden/bandit_golden.py --reason "..."`.

A golden file says what the numbers were, under which settings and versions, and why they were last accepted.
"""

from __future__ import annotations

import argparse
import platform
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from fakes.bandit_run import bandit_train_config, run_bandit

from pivotrl.config.schema import TrainConfig
from pivotrl.rundir import read_jsonl, write_json

GOLDEN = Path(__file__).with_name("bandit.json")
_VALIDATION = {"every_steps": 4, "num_pivots": 3, "num_samples": 8}
CONFIGS: dict[str, TrainConfig] = {
    "paper": bandit_train_config(num_steps=12, pivots_per_step=4, group_size=8, checkpoint_every=12, validation=_VALIDATION),
    "kl_token_two_updates": bandit_train_config(
        num_steps=12,
        pivots_per_step=4,
        group_size=8,
        checkpoint_every=12,
        updates_per_rollout=2,
        advantage="leave_one_out",
        aggregation="token",
        kl={"beta": 0.05, "estimator": "k3"},
    ),
}


def metrics_of_run(config: TrainConfig) -> list[dict[str, Any]]:
    """The metrics of one run from scratch, row by row."""
    with tempfile.TemporaryDirectory() as folder:
        run_bandit(Path(folder), config)
        return list(read_jsonl(Path(folder) / "train" / "metrics.jsonl"))


def main() -> None:
    """Writes the golden file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--reason", required=True, help="Why the numbers changed and why the new ones are right.")
    reason = parser.parse_args().reason
    runs = {name: {"config": config.model_dump(mode="json"), "rows": metrics_of_run(config)} for name, config in CONFIGS.items()}
    environment = {"torch": torch.__version__.split("+")[0], "python": platform.python_version(), "machine": platform.machine(), "device": "cpu"}
    write_json(GOLDEN, {"reason": reason, "environment": environment, "runs": runs})


if __name__ == "__main__":
    main()
