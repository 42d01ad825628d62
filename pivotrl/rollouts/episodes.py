"""Whole episodes of a world under one policy: one call of the engine per turn, for all episodes that are open.

Evaluation and end-to-end RL play through `play`, so success is trained as it is measured. Consumes episodes at their first turn, plays them to
an end and states which; says nothing about rewards. The random numbers of a turn are the caller's, by episode and turn, so a result does
not depend on what else is open.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING

from pivotrl.rollouts.engine import Engine, EngineError, GenerationRequest
from pivotrl.types import Action, Completion, FinishReason
from pivotrl.worlds.protocol import Episode

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


@dataclass(slots=True)
class PlayedEpisode:
    """An episode with its turns; grows while it is played."""

    episode: Episode
    turns: list[SampledTurn] = field(default_factory=list[SampledTurn])
    end: EpisodeEnd | None = None
    """None while it is open."""
    failure: str = ""
    """What the engine said where it failed."""


def play(
    engine: Engine, renderer: Renderer, episodes: Sequence[Episode], *, limits: Limits, seed_of: Callable[[int, int], int]
) -> list[PlayedEpisode]:
    """Plays all episodes to an end, in the order given. A failed engine ends those that were open and leaves the others as they are.

    Args:
        seed_of: the seed of (index of the episode, number of the turn from 0).
    """
    played = [PlayedEpisode(episode) for episode in episodes]
    live = list(enumerate(played))
    while live:
        asked: list[tuple[int, PlayedEpisode, tuple[int, ...]]] = []
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


def _take_turn(one: PlayedEpisode, prompt: tuple[int, ...], completion: Completion, renderer: Renderer, limits: Limits) -> None:
    action = renderer.parse(completion.token_ids, one.episode.state().tools)
    one.turns.append(SampledTurn(prompt, completion, action))
    if limits.ends_at_cut and completion.finish_reason is FinishReason.LENGTH:
        one.end = EpisodeEnd.TRUNCATED
        return
    one.episode.act(action)
    if one.episode.is_done:
        one.end = EpisodeEnd.CLOSED
    elif len(one.turns) == limits.max_turns:
        one.end = EpisodeEnd.TURN_LIMIT
