"""Recipe section `train.episodes`: end-to-end RL on whole episodes of the recipe's world or environment instead of pivots."""

from __future__ import annotations

from pivotrl.config.section import PositiveInt, Section


class EpisodesConfig(Section):
    """Whole episodes instead of pivots: end-to-end RL (docs/concepts.md). `profile`, `select` and `train.pivots_per_step` are not read."""

    tasks_per_step: PositiveInt
    """Training tasks (rows of an environment) of one step; `train.group_size` episodes of each."""
    max_turns: PositiveInt | None = None
    """An episode still open after this many sampled turns ends, a failure (None: the world's own limit; an environment's agents have theirs)."""
