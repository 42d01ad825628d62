"""The checkpoints of one stage: trainer states to resume from, and the best policy by validation to export.

Layout below the stage: checkpoints/ (the trainer's states, its own format, the newest few kept), best/<step>/ (Hugging Face
form), hf/ (the stage's result). The trainer makes each directory appear whole or not at all, so a kill leaves the old state or
the new one. One writer; called by training/record.py.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pivotrl.megatron.directories import is_complete
from pivotrl.training.protocols import PolicyTrainer

HF = "hf"


@dataclass(frozen=True, slots=True)
class Best:
    """The best validation so far: highest mean; of equal ones the earlier, so that no step counts as progress by a tie.

    >>> Best(step=0, mean=0.5, num_since=0).after(10, 0.5)
    Best(step=0, mean=0.5, num_since=1)
    >>> Best(step=0, mean=0.5, num_since=1).after(20, 0.6)
    Best(step=20, mean=0.6, num_since=0)
    """

    step: int
    mean: float
    num_since: int
    """Validations since then without a new best."""

    def after(self, step: int, mean: float) -> Best:
        """The best once `step` was validated too."""
        return Best(step, mean, 0) if mean > self.mean else Best(self.step, self.mean, self.num_since + 1)


class Checkpoints:
    """The checkpoint directories of one stage."""

    def __init__(self, stage_dir: Path) -> None:
        self._states, self._best, self._hf = stage_dir / "checkpoints", stage_dir / "best", stage_dir / HF
        for directory in (self._states, self._best):
            directory.mkdir(exist_ok=True)
        self._saved_best: Best | None = None

    def load_last(self, trainer: PolicyTrainer) -> Mapping[str, Any] | None:
        """Restores the trainer from the last complete state and returns what was stored beside it; None where there is none."""
        return trainer.load_checkpoint(self._states) if any(map(is_complete, self._states.iterdir())) else None

    def save(self, trainer: PolicyTrainer, extra: Mapping[str, Any], *, best: Best | None) -> None:
        """Writes the state at the trainer's step, then removes every best checkpoint that neither it nor the state before names.

        The state before counts because a kill during this call, or a newest state that cannot be read, resumes from it.
        """
        trainer.save_checkpoint(self._states, extra)
        needed = {_name(named) for named in (best, self._saved_best) if named}
        for other in self._best.iterdir():
            if other.name not in needed:
                shutil.rmtree(other)
        self._saved_best = best

    def save_best(self, trainer: PolicyTrainer, best: Best) -> None:
        """Exports the current weights, those of `best`."""
        trainer.save_hf(self._best / _name(best))

    def export(self, trainer: PolicyTrainer, best: Best | None) -> Path:
        """The stage's result as hf/: the best policy, or the trainer's current one where nothing was validated."""
        trainer.finish_saving()
        if not self._hf.exists():
            if best is None:
                trainer.save_hf(self._hf)
            else:
                (self._best / _name(best)).replace(self._hf)
        shutil.rmtree(self._best)
        return self._hf


def _name(best: Best) -> str:
    return f"{best.step:08d}"
