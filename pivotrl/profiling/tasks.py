"""From stored pivots to the tasks that a sampler takes: the state comes from the trajectory, the prompt from the profile."""

from __future__ import annotations

from collections.abc import Iterable

from pivotrl.pivots.dataset import pivot_state
from pivotrl.rollouts.local import LocalTask
from pivotrl.trajectories.store import TrajectoryStore
from pivotrl.types import Pivot


def local_tasks(pivots: Iterable[Pivot], trajectories: TrajectoryStore) -> list[LocalTask]:
    """One task per pivot, in order. The prompt is the one that was profiled, never rendered again."""
    return [
        LocalTask(pivot.candidate_id, pivot.prompt_token_ids, pivot_state(trajectories.get(pivot.trajectory_id), pivot), pivot.expert_action)
        for pivot in pivots
    ]
