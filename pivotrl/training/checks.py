"""What is measured of a policy between steps: held-out reward, which chooses and stops, and success over the steps, which does not."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from pivotrl.training.curve import SuccessCurve
from pivotrl.training.protocols import PolicyTrainer
from pivotrl.training.record import RunRecord
from pivotrl.training.validation import Validation

if TYPE_CHECKING:
    from pivotrl.training.loop import LoopPlan


@dataclass(frozen=True, slots=True)
class Checks:
    """Both are optional; SFT has neither."""

    validation: Validation | None = None
    curve: SuccessCurve | None = None

    def book(self, trainer: PolicyTrainer, plan: LoopPlan, record: RunRecord) -> dict[str, float]:
        """Takes what is due of the current policy, books it, and returns it under registered metric names."""
        step, scores = trainer.steps_done, dict[str, float]()
        if self.validation is not None and plan.is_due(step, every=self.validation.every_steps):
            scores |= record.validated(trainer, self.validation.score(), patience=self.validation.patience)
        if self.curve is not None and plan.is_due(step, every=self.curve.every_steps):
            scores |= record.measured(step, self.curve.point())
        return scores
