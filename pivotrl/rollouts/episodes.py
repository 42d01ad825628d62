"""Whole episodes under one policy: one call of the engine per turn, for all episodes of a world that are open.

Evaluation and end-to-end RL play a world through `play`, so success is trained as it is measured. Consumes episodes at their first turn, plays
them to an end and states which. The random numbers of a turn are the caller's, by episode and turn, so a result does not depend on what else is open.
End-to-end RL asks an `EpisodePlayer`, which plays a world here or has agents play elsewhere (gym/player.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Protocol

from pivotrl.identity import derive_seed
from pivotrl.rollouts.engine import Engine, EngineError, GenerationRequest
from pivotrl.types import Action, Completion, FinishReason, State
from pivotrl.worlds.protocol import Episode, World, WorldTask

if TYPE_CHECKING:
    from pivotrl.rollouts.render import Renderer


class EpisodeEnd(StrEnum):
    """Why no further turn was sampled."""

    CLOSED = "closed"
    """The world ended it; only then can it be a success."""
    PROMPT_TOO_LONG = "prompt too long"
    TURN_LIMIT = "turn limit"
    TRUNCATED = "truncated"
    """A turn was cut at its cap, under limits that end an episode there. The world was not shown that turn."""
    ENGINE_FAILED = "engine failed"
    ENVIRONMENT_FAILED = "environment failed"
    """Its server did, or took too long; a world in this process does not."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What bounds the sampled turns of an episode."""

    max_prompt_tokens: int
    max_new_tokens: int
    temperature: float
    max_turns: int | None = None
    ends_at_cut: bool = False
    """Whether a turn cut at `max_new_tokens` ends its episode; else the world takes it as it was read."""


@dataclass(frozen=True, slots=True)
class SampledTurn:
    """One assistant turn with the prompt it was sampled from."""

    prompt_token_ids: tuple[int, ...]
    completion: Completion
    action: Action


class EndedEpisode(Protocol):
    """What is left of an episode for scores and for people."""

    @property
    def task_id(self) -> str: ...

    def state(self) -> State:
        """The conversation at its end, as far as it is known here."""
        ...

    def outcome(self) -> Mapping[str, Any]:
        """The environment's own words, JSON-ready."""
        ...


@dataclass(slots=True)
class PlayedEpisode[EpisodeT: EndedEpisode]:
    """An episode with its turns; grows while it is played."""

    episode: EpisodeT
    turns: list[SampledTurn] = field(default_factory=list[SampledTurn])
    end: EpisodeEnd | None = None
    """None while it is open."""
    reward: float = 0.0
    """In [0, 1]; above 0 only where the end is CLOSED."""
    failure: str = ""
    """What the engine or the environment said where it failed."""


class EpisodePlayer[TaskT: WorldTask](Protocol):
    """Plays tasks under whatever weights its engine has."""

    def first_prompt(self, task: TaskT) -> tuple[int, ...] | None:
        """Token ids of a task's first prompt; None where only playing shows it."""
        ...

    def play(self, tasks: Sequence[TaskT], num_samples: int, *, limits: Limits, place: tuple[str | int, ...]) -> Sequence[PlayedEpisode[Any]]:
        """`num_samples` episodes of each task, in the order of the tasks.

        Args:
            place: where in the run this happens, for example ``("train", step)``; seeds are derived from it.
        """
        ...

    def take_cost(self) -> Mapping[str, float]:
        """What befell its episodes since the last call, under registered metric names of timing figures."""
        ...


class WorldPlayer[TaskT: WorldTask]:
    """Plays a world in this process; turn t of sample g of a task is drawn at (place, task, g, t)."""

    def __init__(self, world: World[TaskT], engine: Engine, renderer: Renderer, *, run_seed: int) -> None:
        self._world, self._engine, self._renderer, self._run_seed = world, engine, renderer, run_seed

    def first_prompt(self, task: TaskT) -> tuple[int, ...]:
        """Rendered from a new episode."""
        return self._renderer.render_prompt(self._world.reset(task).state())

    def play(self, tasks: Sequence[TaskT], num_samples: int, *, limits: Limits, place: tuple[str | int, ...]) -> list[PlayedEpisode[Episode]]:
        """See `play`."""
        names = [(task.id, sample) for task in tasks for sample in range(num_samples)]
        seed_of: Callable[[int, int], int] = lambda index, turn: derive_seed(self._run_seed, *place, *names[index], turn)  # noqa: E731
        episodes = [self._world.reset(task) for task in tasks for _ in range(num_samples)]
        return play(self._engine, self._renderer, episodes, limits=limits, seed_of=seed_of)

    def take_cost(self) -> dict[str, float]:
        """Nothing befalls a world."""
        return {}


def play(
    engine: Engine, renderer: Renderer, episodes: Sequence[Episode], *, limits: Limits, seed_of: Callable[[int, int], int]
) -> list[PlayedEpisode[Episode]]:
    """Plays all episodes to an end, in the order given. A failed engine ends those that were open and leaves the others as they are.

    Args:
        seed_of: the seed of (index of the episode, number of the turn from 0).
    """
    played = [PlayedEpisode(episode) for episode in episodes]
    live = list(enumerate(played))
    while live:
        asked: list[tuple[int, PlayedEpisode[Episode], tuple[int, ...]]] = []
        for index, one in live:
            prompt = renderer.render_prompt(one.episode.state())
            if len(prompt) > limits.max_prompt_tokens:
                one.end = EpisodeEnd.PROMPT_TOO_LONG
            else:
                asked.append((index, one, prompt))
        requests = [
            GenerationRequest(prompt, (seed_of(index, len(one.turns)),), limits.temperature, limits.max_new_tokens) for index, one, prompt in asked
        ]
        try:
            completions = engine.generate(requests) if requests else []
        except EngineError as error:
            for _, one, _ in asked:
                one.end, one.failure = EpisodeEnd.ENGINE_FAILED, str(error)
            break
        for (_, one, prompt), (completion,) in zip(asked, completions, strict=True):
            _take_turn(one, prompt, completion, renderer, limits)
        live = [(index, one) for index, one in live if one.end is None]
    return played


def _take_turn(one: PlayedEpisode[Episode], prompt: tuple[int, ...], completion: Completion, renderer: Renderer, limits: Limits) -> None:
    action = renderer.parse(completion.token_ids, one.episode.state().tools)
    one.turns.append(SampledTurn(prompt, completion, action))
    if limits.ends_at_cut and completion.finish_reason is FinishReason.LENGTH:
        one.end = EpisodeEnd.TRUNCATED
        return
    one.episode.act(action)
    if one.episode.is_done:
        one.end, one.reward = EpisodeEnd.CLOSED, float(one.episode.success)
    elif len(one.turns) == limits.max_turns:
        one.end = EpisodeEnd.TURN_LIMIT
