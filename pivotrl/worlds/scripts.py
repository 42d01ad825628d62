"""Scripted agents from two functions: all the ways to write the right next action, and how an agent may be mistaken about its task.

An expert picks one of the ways at random, so equality of text says little about equality of meaning. A noisy agent writes the base
policy's pretraining text: it is the expert of a task that it is mistaken about. Both read the episode's true state, which a policy cannot.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import permutations
from types import MappingProxyType
from typing import Any

from pivotrl.types import Action, ParseOutcome, ToolCall
from pivotrl.worlds.protocol import Agent

# Slips at single turns, made and then seen, as a share of `noise`.
_SLIP_NOISE = 0.15


type Ways = Sequence[Callable[[], Action]]
"""Every way to write one step, none of them written yet."""


def expert[TaskT](ways: Callable[[Any, TaskT], Ways], rng: random.Random) -> Agent:
    """An agent that takes the right next step from any state that can still be saved, written in one of its ways.

    Args:
        ways: every way to write the next step, for an episode and what the agent believes its task to be.
    """
    return lambda episode: rng.choice(ways(episode, episode.task))()


def noisy_agent[TaskT](
    ways: Callable[[Any, TaskT], Ways],
    mistake: Callable[[TaskT, random.Random], TaskT],
    task: TaskT,
    noise: float,
    rng: random.Random,
) -> Agent:
    """An agent that decides wrongly with probability `noise`, then stands by its decision, and slips now and then on the way.

    Args:
        mistake: a task as an agent may mistake it.
    """
    belief = mistake(task, rng) if rng.random() < noise else task

    def act(episode: Any) -> Action:
        believed = mistake(task, rng) if rng.random() < noise * _SLIP_NOISE else belief
        return rng.choice(ways(episode, believed))()

    return act


def say(text: str) -> Action:
    """A message."""
    return Action(text, (), None, ParseOutcome.ABSENT)


def ways_to_call(name: str, required: Mapping[str, Sequence[object]], optional: Mapping[str, object] = MappingProxyType({})) -> Ways:
    """Every way to write one call: each spelling of each argument, each default left out or written, the arguments in each order.

    Args:
        required: spellings of each argument that must be there.
        optional: the default of each argument that may be left out.
    """
    choices: list[dict[str, object]] = [{}]
    for key, spellings in required.items():
        choices = [{**chosen, key: spelling} for chosen in choices for spelling in spellings]
    for key, default in optional.items():
        choices += [{**chosen, key: default} for chosen in choices]
    return [partial(call, name, dict(items)) for chosen in choices for items in permutations(chosen.items())]


def call(name: str, arguments: Mapping[str, object]) -> Action:
    """One call of one tool, its arguments in the order given."""
    return Action("", (ToolCall(name, json.dumps(arguments)),), None, ParseOutcome.PARSED)
