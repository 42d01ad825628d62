"""From the episodes of one step to what the objective learns from, and the rollout metrics: pure, no clock, no engine.

The counterpart of `groups.py` for whole episodes: a group is a task, a reward is the success of the final state, and the advantage of an episode
is that of each of its turns. Called by training/episodes.py. Suffix: G = episodes of one task.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pivotrl.objective.advantages import AdvantageName
from pivotrl.rollouts.episodes import EndedEpisode, EpisodeEnd, PlayedEpisode, SampledTurn
from pivotrl.rollouts.local import TRUNCATED, loss_weight
from pivotrl.training.groups import RolloutGroup, Truncated, compared, group_metrics
from pivotrl.types import TrainSample, Verdict


@dataclass(frozen=True, slots=True)
class EpisodeRollout:
    """One sampled episode with its verdict."""

    task_id: str
    sample_index: int
    turns: tuple[SampledTurn, ...]
    verdict: Verdict
    """OK with the episode's reward, 1 or 0 by a world's final state; invalid where a turn was cut; infra where engine or environment failed."""
    is_truncated: bool


@dataclass(frozen=True, slots=True)
class EpisodeGroup(RolloutGroup[EpisodeRollout]):
    """G episodes of one task."""

    task_id: str

    @property
    def turns(self) -> list[SampledTurn]:
        return [turn for rollout in self.rollouts_G for turn in rollout.turns]


def judged(played: PlayedEpisode[EndedEpisode], sample_index: int) -> EpisodeRollout:
    """A played episode with its verdict. What outgrew a limit without a cut turn failed like any other episode that did not reach its goal."""
    match played.end:
        case EpisodeEnd.ENGINE_FAILED:
            verdict = Verdict.infra(f"engine: {played.failure}")
        case EpisodeEnd.ENVIRONMENT_FAILED:
            verdict = Verdict.infra(f"environment: {played.failure}")
        case EpisodeEnd.TRUNCATED:
            verdict = Verdict.invalid(TRUNCATED)
        case EpisodeEnd.CLOSED:
            reason = "success" if played.reward == 1.0 else "wrong final state" if played.reward == 0.0 else "partial success"
            verdict = Verdict.ok(played.reward, reason)
        case _:
            assert played.end is not None, "an open episode has no verdict"
            verdict = Verdict.ok(0.0, played.end.value)
    return EpisodeRollout(played.episode.task_id, sample_index, tuple(played.turns), verdict, played.end is EpisodeEnd.TRUNCATED)


def make_episode_group(task_id: str, rollouts_G: Sequence[EpisodeRollout], *, method: AdvantageName, truncated: Truncated) -> EpisodeGroup:
    """The group of one task; resamples nothing."""
    return EpisodeGroup(*compared(rollouts_G, method=method, truncated=truncated), task_id)


def turn_samples(groups: Sequence[EpisodeGroup], truncated: Truncated) -> list[TrainSample]:
    """Every turn of every counted episode of the groups that are not dropped, with its episode's advantage and weight."""
    return [
        TrainSample(
            group_id=group.task_id,
            prompt_token_ids=turn.prompt_token_ids,
            completion_token_ids=turn.completion.token_ids,
            advantage=advantage,
            behavior_logprobs_T=turn.completion.logprobs,
            loss_weight=loss_weight(rollout, truncated),
            routed_experts=turn.completion.routed_experts,
        )
        for group in groups
        if not group.is_dropped
        for rollout, advantage in zip(group.counted, group.advantages, strict=True)
        for turn in rollout.turns
    ]


def episode_metrics(groups: Sequence[EpisodeGroup], *, step: int) -> dict[str, float]:
    """The step's `rollout/*` metrics: rewards, groups and verdicts by episode, text by turn."""
    turns = [turn for group in groups for turn in group.turns]
    return {
        **group_metrics(groups, step=step),
        "rollout/episode_turns/mean": len(turns) / sum(len(group.rollouts_G) for group in groups),
        "rollout/prompt_tokens/sum": sum(len(turn.prompt_token_ids) for turn in turns),
    }


def turn_rows(rollout: EpisodeRollout, *, step: int, decode: Callable[[Sequence[int]], str]) -> list[Mapping[str, Any]]:
    """Rows of rollouts.jsonl: one per turn, each with its episode's reward and verdict."""
    return [
        {
            "step": step,
            "task_id": rollout.task_id,
            "sample_index": rollout.sample_index,
            "turn": number,
            "text": decode(turn.completion.token_ids),
            "reward": rollout.verdict.reward,
            "verdict": rollout.verdict.kind.value,
            "reason": rollout.verdict.reason,
            "finish_reason": turn.completion.finish_reason.value,
            "num_tokens": len(turn.completion.token_ids),
        }
        for number, turn in enumerate(rollout.turns)
    ]
