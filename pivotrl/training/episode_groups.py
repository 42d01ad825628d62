"""From the episodes of one step to what the objective learns from, and the rollout metrics: pure, no clock, no engine.

The counterpart of `groups.py` for whole episodes: a group is a task, a reward is the success of the final state, and the advantage of an episode
is that of each of its turns. Called by training/episodes.py. Suffix: G = episodes of one task.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pivotrl.objective.advantages import AdvantageName, group_advantages, has_zero_variance
from pivotrl.rollouts.episodes import EpisodeEnd, PlayedEpisode, SampledTurn
from pivotrl.rollouts.local import TRUNCATED, counted, loss_weight
from pivotrl.training.groups import Truncated, reward_std
from pivotrl.types import FinishReason, ParseOutcome, TrainSample, Verdict, VerdictKind


@dataclass(frozen=True, slots=True)
class EpisodeRollout:
    """One sampled episode with its verdict."""

    task_id: str
    sample_index: int
    turns: tuple[SampledTurn, ...]
    verdict: Verdict
    """OK with 1 or 0 by the final state; invalid where a turn was cut; infra where the engine failed."""
    is_truncated: bool


@dataclass(frozen=True, slots=True)
class EpisodeGroup:
    """G episodes of one task with the counted ones and their advantages."""

    task_id: str
    rollouts_G: tuple[EpisodeRollout, ...]
    counted: tuple[EpisodeRollout, ...]
    """The episodes that count, in sample order; fewer than two and the group is dropped from the loss."""
    advantages: tuple[float, ...]
    """One per counted episode; empty where the group is dropped."""

    @property
    def is_dropped(self) -> bool:
        return len(self.counted) < 2

    @property
    def rewards(self) -> tuple[float, ...]:
        """Rewards of the counted episodes."""
        return tuple(rollout.verdict.reward for rollout in self.counted)

    @property
    def turns(self) -> Iterator[SampledTurn]:
        """Every sampled turn, whatever became of its episode."""
        return (turn for rollout in self.rollouts_G for turn in rollout.turns)


def judged(played: PlayedEpisode, sample_index: int) -> EpisodeRollout:
    """A played episode with its verdict. What outgrew a limit without a cut turn failed like any other episode that did not reach its goal."""
    match played.end:
        case EpisodeEnd.ENGINE_FAILED:
            verdict = Verdict.infra(f"engine: {played.failure}")
        case EpisodeEnd.TRUNCATED:
            verdict = Verdict.invalid(TRUNCATED)
        case EpisodeEnd.CLOSED:
            verdict = Verdict.ok(1.0, "success") if played.episode.success else Verdict.ok(0.0, "wrong final state")
        case _:
            assert played.end is not None, "an open episode has no verdict"
            verdict = Verdict.ok(0.0, played.end.value)
    return EpisodeRollout(played.episode.task_id, sample_index, tuple(played.turns), verdict, played.end is EpisodeEnd.TRUNCATED)


def make_episode_group(task_id: str, rollouts_G: Sequence[EpisodeRollout], *, method: AdvantageName, truncated: Truncated) -> EpisodeGroup:
    """The group of one task; resamples nothing."""
    kept = tuple(rollout for rollout in rollouts_G if counted(rollout, truncated))
    rewards = [rollout.verdict.reward for rollout in kept]
    return EpisodeGroup(task_id, tuple(rollouts_G), kept, group_advantages(rewards, method) if len(kept) >= 2 else ())


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
        )
        for group in groups
        if not group.is_dropped
        for rollout, advantage in zip(group.counted, group.advantages, strict=True)
        for turn in rollout.turns
    ]


def episode_metrics(groups: Sequence[EpisodeGroup], *, step: int) -> dict[str, float]:
    """The step's `rollout/*` metrics: rewards, groups and verdicts by episode, as `groups.rollout_metrics` has them by action; text by turn."""
    rollouts = [rollout for group in groups for rollout in group.rollouts_G]
    turns = [turn for group in groups for turn in group.turns]
    kept = [group for group in groups if not group.is_dropped]
    flat = [group for group in kept if has_zero_variance(group.rewards)]
    rewards = [reward for group in groups for reward in group.rewards]
    share: Callable[[Callable[[SampledTurn], bool]], float] = lambda test: sum(map(test, turns)) / len(turns)  # noqa: E731
    generated: Callable[[Sequence[EpisodeGroup]], int] = lambda of: sum(len(turn.completion.token_ids) for group in of for turn in group.turns)  # noqa: E731
    return {
        "rollout/reward/mean": math.fsum(rewards) / len(rewards),
        "rollout/reward/std": math.fsum(reward_std(group.rewards) for group in kept) / len(kept),
        "rollout/group_zero_variance/frac": len(flat) / len(kept),
        "rollout/group_dropped/count": len(groups) - len(kept),
        "rollout/episode_turns/mean": len(turns) / len(rollouts),
        "rollout/truncated/frac": share(lambda turn: turn.completion.finish_reason is FinishReason.LENGTH),
        "rollout/malformed/frac": share(lambda turn: turn.action.parse is ParseOutcome.MALFORMED),
        "rollout/absent/frac": share(lambda turn: turn.action.parse is ParseOutcome.ABSENT),
        "rollout/verifier_error/frac": sum(rollout.verdict.kind is VerdictKind.INFRA for rollout in rollouts) / len(rollouts),
        "rollout/response_tokens/mean": generated(groups) / len(turns),
        "rollout/response_tokens/sum": generated(groups),
        "rollout/prompt_tokens/sum": sum(len(turn.prompt_token_ids) for turn in turns),
        "rollout/wasted_tokens/sum": generated(flat),
        "sync/policy_age_steps/max": max(step - turn.completion.policy_version for turn in turns),
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
