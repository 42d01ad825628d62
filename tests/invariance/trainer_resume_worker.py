"""Continues a training run in a process of its own: the second half of test_trainer_resume's interrupted run.

    python trainer_resume_worker.py HF_DIR CHECKPOINTS_DIR OUT_DIR

Prints the losses of the steps it took as JSON.
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
    sys.stdout.write(json.dumps({"extra": extra, "losses": losses, "steps_done": trainer.steps_done}))


if __name__ == "__main__":
    main()
