"""From the sampled groups of one step to what the objective learns from, and the rollout metrics: pure, no clock, no engine.

Infra verdicts and, where the recipe excludes them, truncated samples leave their group before any statistic; masked ones stay
in mean and std with loss weight 0. Called by training/sources.py and training/validation.py. Suffix: G = rollouts of one group.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from pivotrl.errors import InfraLimitError
from pivotrl.objective.advantages import AdvantageName, group_advantages, has_zero_variance
from pivotrl.rollouts.local import Judged, LocalTask, counted, loss_weight
from pivotrl.types import Action, Completion, FinishReason, LocalRollout, ParseOutcome, TrainSample, VerdictKind

type Truncated = Literal["zero", "exclude", "mask"]


class Sampled(Protocol):
    """One assistant turn that was sampled."""

    @property
    def completion(self) -> Completion: ...
    @property
    def action(self) -> Action: ...


@dataclass(frozen=True, slots=True)
class RolloutGroup[RolloutT: Judged](ABC):
    """G rollouts to compare, of one pivot or of one task, with the counted ones and their advantages."""

    rollouts_G: tuple[RolloutT, ...]
    counted: tuple[RolloutT, ...]
    """The rollouts that count, in sample order; fewer than two and the group is dropped from the loss."""
    advantages: tuple[float, ...]
    """One per counted rollout; empty where the group is dropped."""

    @property
    @abstractmethod
    def turns(self) -> Sequence[Sampled]:
        """Every sampled turn, whatever became of its rollout."""

    @property
    def is_dropped(self) -> bool:
        return len(self.counted) < 2

    @property
    def rewards(self) -> tuple[float, ...]:
        """Rewards of the counted rollouts."""
        return tuple(rollout.verdict.reward for rollout in self.counted)

    @property
    def num_generated_tokens(self) -> int:
        return sum(len(turn.completion.token_ids) for turn in self.turns)


@dataclass(frozen=True, slots=True)
class Group(RolloutGroup[LocalRollout]):
    """G rollouts of one pivot."""

    task: LocalTask

    @property
    def turns(self) -> tuple[LocalRollout, ...]:
        return self.rollouts_G


def make_group(task: LocalTask, rollouts_G: Sequence[LocalRollout], *, method: AdvantageName, truncated: Truncated) -> Group:
    """The group of one pivot; resamples nothing."""
    return Group(*compared(rollouts_G, method=method, truncated=truncated), task)


def compared[RolloutT: Judged](
    rollouts_G: Sequence[RolloutT], *, method: AdvantageName, truncated: Truncated
) -> tuple[tuple[RolloutT, ...], tuple[RolloutT, ...], tuple[float, ...]]:
    """All rollouts of a group, the counted ones, and the advantages of those (none where fewer than two count)."""
    kept = counted_rollouts(rollouts_G, truncated)
    rewards = [rollout.verdict.reward for rollout in kept]
    return tuple(rollouts_G), kept, group_advantages(rewards, method) if len(kept) >= 2 else ()


def counted_rollouts[RolloutT: Judged](rollouts_G: Sequence[RolloutT], truncated: Truncated) -> tuple[RolloutT, ...]:
    """The rollouts that enter statistics."""
    return tuple(rollout for rollout in rollouts_G if counted(rollout, truncated))


def check_infra(groups: Sequence[Sequence[Judged]], *, max_infra_frac: float, where: str) -> int:
    """Number of infra verdicts.

    Raises:
        InfraLimitError: where they are more than `max_infra_frac` of all, or all there are, naming the commonest reason.
    """
    reasons = [r.verdict.reason for group in groups for r in group if r.verdict.kind is VerdictKind.INFRA]
    total = sum(map(len, groups))
    if len(reasons) > max_infra_frac * total or (reasons and len(reasons) == total):
        commonest = max(sorted(set(reasons)), key=reasons.count)
        raise InfraLimitError(
            f"{len(reasons)} of {total} verdicts at {where} were the infrastructure's fault, more than the allowed share {max_infra_frac}; "
            f"most often: {commonest}; the same command resumes once that is repaired"
        )
    return len(reasons)


def train_samples(groups: Sequence[Group], truncated: Truncated) -> list[TrainSample]:
    """The samples of all groups that are not dropped, group by group."""
    return [
        TrainSample(
            group_id=group.task.candidate_id,
            prompt_token_ids=group.task.prompt_token_ids,
            completion_token_ids=rollout.completion.token_ids,
            advantage=advantage,
            behavior_logprobs_T=rollout.completion.logprobs,
            loss_weight=loss_weight(rollout, truncated),
            routed_experts=rollout.completion.routed_experts,
        )
        for group in groups
        if not group.is_dropped
        for rollout, advantage in zip(group.counted, group.advantages, strict=True)
    ]


def rollout_metrics(groups: Sequence[Group], *, step: int) -> dict[str, float]:
    """The step's `rollout/*` metrics and the age of its policy; a group's prompt counts once."""
    return {**group_metrics(groups, step=step), "rollout/prompt_tokens/sum": sum(len(group.task.prompt_token_ids) for group in groups)}


def group_metrics(groups: Sequence[RolloutGroup[Any]], *, step: int) -> dict[str, float]:
    """What groups of pivots and of tasks report alike.

    Rewards are over counted rollouts; std and zero-variance share over groups that are not dropped; every other share is over
    all rollouts or all their turns, so that shares of several runs compare whatever the recipe does with truncated ones.
    """
    rollouts = [rollout for group in groups for rollout in group.rollouts_G]
    turns = [turn for group in groups for turn in group.turns]
    kept = [group for group in groups if not group.is_dropped]
    rewards = [reward for group in groups for reward in group.rewards]
    share: Callable[[Callable[[Sampled], bool]], float] = lambda test: sum(map(test, turns)) / len(turns)  # noqa: E731
    flat = [group for group in kept if has_zero_variance(group.rewards)]
    generated_tokens = sum(group.num_generated_tokens for group in groups)
    return {
        "rollout/reward/mean": math.fsum(rewards) / len(rewards),
        "rollout/reward/std": math.fsum(reward_std(group.rewards) for group in kept) / len(kept),
        "rollout/group_zero_variance/frac": len(flat) / len(kept),
        "rollout/group_dropped/count": len(groups) - len(kept),
        "rollout/truncated/frac": share(lambda turn: turn.completion.finish_reason is FinishReason.LENGTH),
        "rollout/malformed/frac": share(lambda turn: turn.action.parse is ParseOutcome.MALFORMED),
        "rollout/absent/frac": share(lambda turn: turn.action.parse is ParseOutcome.ABSENT),
        "rollout/verifier_error/frac": sum(rollout.verdict.kind is VerdictKind.INFRA for rollout in rollouts) / len(rollouts),
        "rollout/response_tokens/mean": generated_tokens / len(turns),
        "rollout/response_tokens/sum": generated_tokens,
        "rollout/wasted_tokens/sum": sum(group.num_generated_tokens for group in flat),
        "sync/policy_age_steps/max": max(step - turn.completion.policy_version for turn in turns),
    }


def rollout_row(rollout: LocalRollout, *, step: int, text: str) -> Mapping[str, Any]:
    """One row of rollouts.jsonl."""
    return {
        "step": step,
        "pivot_id": rollout.candidate_id,
        "sample_index": rollout.sample_index,
        "text": text,
        "reward": rollout.verdict.reward,
        "verdict": rollout.verdict.kind.value,
        "reason": rollout.verdict.reason,
        "finish_reason": rollout.completion.finish_reason.value,
        "num_tokens": len(rollout.completion.token_ids),
    }


def reward_std(rewards_G: Sequence[float]) -> float:
    """Population std of one group's rewards; exactly 0 where they are equal."""
    if has_zero_variance(rewards_G):
        return 0.0
    mean = math.fsum(rewards_G) / len(rewards_G)
    return math.sqrt(math.fsum((reward - mean) ** 2 for reward in rewards_G) / len(rewards_G))
