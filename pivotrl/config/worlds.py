"""The recipe's `world` section: a deterministic world that writes trajectories and plays evaluation episodes. Imports pydantic only."""

from __future__ import annotations

from typing import Literal

from pivotrl.config.section import Fraction01, PositiveInt, Section

type WorldName = Literal["order_desk", "terminal", "swe", "search", "bfcl"]


class WorldConfig(Section):
    """A deterministic world that writes the recipe's trajectories (quickstart) instead of files the user has. docs/worlds.md"""

    type: WorldName
    """The world that is demonstrated and evaluated: one of ours per domain of the paper, or BFCL multi-turn (`make bfcl`)."""
    num_train_tasks: PositiveInt
    """Tasks the expert demonstrates."""
    num_test_tasks: PositiveInt
    """Tasks of the evaluation, disjoint from the training tasks."""
    num_pretraining_episodes: PositiveInt
    """Noisy episodes in the pretraining mixture, tasks drawn apart from both other sets."""
    pretraining_worlds: tuple[WorldName, ...] = ()
    """Worlds that the noisy episodes are of, in equal shares; none: of `type` only."""
    num_skill_examples: PositiveInt
    """Out-of-domain skill examples in the pretraining mixture."""
    skills: Literal["quickstart", "broad"] = "quickstart"
    """The eight out-of-domain skills: with the few questions that the quickstart's policy learns fully, or with many more."""
    noise: Fraction01
    """Probability that a pretraining episode's agent holds a wrong belief and stands by it. Single turns slip beside that: in order_desk copied facts
    at half that rate and routine turns at a twentieth, in the other worlds every turn at 0.15 of it."""
