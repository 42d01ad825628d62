"""What a world is: tasks, and episodes that answer actions with real consequences, so that multi-turn success can be measured.

Everything here is deterministic given the task and the actions. A world knows no tokens, no templates and no verifier: it is
shown `Action`s that the recipe's own parser made and shows `State`s that the recipe's own renderer turns into prompts.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Protocol

from pivotrl.types import Action, Domain, State, Tool


class TaskSplit(StrEnum):
    """Disjoint sets of tasks: a task id is in exactly one."""

    PRETRAINING = "pretraining"
    TRAIN = "train"
    TEST = "test"


class WorldTask(Protocol):
    """One task: everything the world decided before the episode."""

    @property
    def id(self) -> str:
        """Unique over all splits of the world; the unit of the splits."""
        ...

    @property
    def family(self) -> str:
        """Which kind of task it is, for scores by kind; a world has a handful."""
        ...


class Episode(Protocol):
    """One conversation about one task. Lifecycle: `World.reset`, then `state` and `act` in turn until `is_done`."""

    @property
    def task_id(self) -> str: ...

    @property
    def is_done(self) -> bool:
        """True once the conversation was closed or the turn limit was reached; `act` must not be called after that."""
        ...

    @property
    def success(self) -> bool:
        """True where the episode is done and the final state of the world is the task's goal."""
        ...

    @property
    def num_turns(self) -> int:
        """Assistant turns taken so far."""
        ...

    def state(self) -> State:
        """What the agent sees before its next turn."""
        ...

    def act(self, action: Action) -> None:
        """Takes one assistant turn. Never raises for any action: a wrong one changes the world wrongly or is answered with an error."""
        ...

    def outcome(self) -> Mapping[str, Any]:
        """The final state in JSON-ready form, for samples that people read."""
        ...


class World[TaskT: WorldTask](Protocol):
    """A family of tasks over one set of tools."""

    @property
    def name(self) -> str: ...

    @property
    def domain(self) -> Domain: ...

    @property
    def action_format(self) -> str:
        """Name of the format in which the world's actions are written (`actions.registry`)."""
        ...

    @property
    def tools(self) -> tuple[Tool, ...]:
        """The tools of every task; empty where actions are text in a form that needs no tool list (Terminus-2)."""
        ...

    def tasks(self, split: TaskSplit, *, num_tasks: int, seed: int) -> tuple[TaskT, ...]:
        """Distinct tasks of one split, the same for the same seed.

        Raises:
            UserError: where the split holds fewer tasks than asked for.
        """
        ...

    def reset(self, task: TaskT) -> Episode:
        """A new episode at its first assistant turn."""
        ...


type Agent = Callable[[Any], Action]
"""From an episode of one world to the next action in it."""


@dataclass(frozen=True, slots=True)
class ScriptedWorld:
    """A world with the scripts that write its trajectories; looked up by name in `registry.scripted_world`."""

    world: World[Any]
    expert: Callable[[random.Random], Agent]
    """An agent that succeeds on every task, in diverse styles."""
    noisy_agent: Callable[[Any, float, random.Random], Agent]
    """(task, noise, rng): an agent whose deciding belief about the task is wrong with probability `noise`."""
    frames: tuple[str, ...] = ()
    """Fixed pieces of every action, one token each in the world's tokenizer."""
