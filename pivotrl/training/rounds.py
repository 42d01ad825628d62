"""How the steps of a training run divide into rounds of rollouts. Imports no torch, so that a login node can check a recipe."""

from __future__ import annotations

from pivotrl.config.training import TrainConfig
from pivotrl.errors import UserError


def check_rounds(config: TrainConfig) -> None:
    """Refuses a run whose last batch of rollouts would miss some of its updates.

    Raises:
        UserError: where train.num_steps is not a multiple of train.updates_per_rollout.
    """
    if config.num_steps % config.updates_per_rollout:
        raise UserError(
            f"train.num_steps is {config.num_steps} and train.updates_per_rollout is {config.updates_per_rollout}",
            rule="every batch of rollouts gets all its updates, so the first must be a multiple of the second",
            fix=f"set train.num_steps to {config.num_steps - config.num_steps % config.updates_per_rollout or config.updates_per_rollout}",
        )
