"""Continues a training run in a process of its own: the second half of test_trainer_resume's interrupted run.

    trainer_resume_worker:main HF_DIR CHECKPOINTS_DIR OUT_DIR

Writes OUT_DIR/answer.json: the losses of the steps it took.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from test_trainer_resume import run_steps, start_trainer


def main() -> None:
    """Loads the newest checkpoint, takes the remaining steps, exports the policy."""
    hf_dir, checkpoints_dir, out_dir = map(Path, sys.argv[1:])
    torch.set_num_threads(1)
    trainer = start_trainer(hf_dir)
    extra = trainer.load_checkpoint(checkpoints_dir)
    losses = run_steps(trainer, last=6)
    trainer.save_hf(out_dir)
    (out_dir / "answer.json").write_text(json.dumps({"extra": extra, "losses": losses, "steps_done": trainer.steps_done}))
