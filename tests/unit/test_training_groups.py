"""Groups: which rollouts count under each treatment of truncated samples, infra limits, and metrics by hand-counted numbers."""

from __future__ import annotations

import pytest
from fakes.bandit import bandit_tasks

from pivotrl.errors import InfraLimitError
from pivotrl.training.groups import check_infra, make_group, rollout_metrics, train_samples
from pivotrl.types import Action, Completion, FinishReason, LocalRollout, ParseOutcome, Verdict

TASK, OTHER = bandit_tasks(2)
GOOD, BAD, CUT, DOWN = Verdict.ok(1.0, "same"), Verdict.invalid("wrong"), Verdict.invalid("truncated"), Verdict.infra("judge down")


def rollout(verdict: Verdict, index: int, *, tokens: int = 2, parse: ParseOutcome = ParseOutcome.PARSED, version: int = 3) -> LocalRollout:
    finish = FinishReason.LENGTH if verdict is CUT else FinishReason.STOP
    completion = Completion((7,) * tokens, (-1.0,) * tokens, finish, version)
    return LocalRollout(TASK.candidate_id, index, index, completion, Action("", (), None, parse), verdict)


def group(*verdicts: Verdict, truncated: str = "zero"):
    return make_group(TASK, [rollout(v, i) for i, v in enumerate(verdicts)], method="no_std", truncated=truncated)


def test_infra_leaves_mean_and_group() -> None:
    made = group(GOOD, BAD, DOWN, DOWN)
    assert made.rewards == (1.0, 0.0)
    assert made.advantages == (0.5, -0.5)
    assert len(train_samples([made], "zero")) == 2


@pytest.mark.parametrize(
    ("truncated", "rewards", "advantages", "weights"),
    [
        ("zero", (1.0, 0.0, 0.0, 0.0), (0.75, -0.25, -0.25, -0.25), [1.0, 1.0, 1.0, 1.0]),
        ("mask", (1.0, 0.0, 0.0, 0.0), (0.75, -0.25, -0.25, -0.25), [1.0, 1.0, 0.0, 0.0]),
        ("exclude", (1.0, 0.0), (0.5, -0.5), [1.0, 1.0]),
    ],
)
def test_truncated_modes(truncated: str, rewards: tuple[float, ...], advantages: tuple[float, ...], weights: list[float]) -> None:
    made = group(GOOD, BAD, CUT, CUT, truncated=truncated)
    assert (made.rewards, made.advantages) == (rewards, advantages)
    assert [s.loss_weight for s in train_samples([made], truncated)] == weights


def test_group_with_one_counted_rollout_is_dropped_from_loss_and_denominator() -> None:
    dropped, kept = group(GOOD, DOWN, DOWN), group(GOOD, BAD, BAD)
    assert dropped.is_dropped
    assert len(train_samples([dropped, kept], "zero")) == 3
    metrics = rollout_metrics([dropped, kept], step=3)
    assert metrics["rollout/group_dropped/count"] == 1
    assert metrics["rollout/reward/mean"] == pytest.approx(2 / 4)


def test_samples_carry_the_pivot_and_the_engines_logprobs() -> None:
    (first, _) = train_samples([group(GOOD, BAD)], "zero")
    assert first.group_id == TASK.candidate_id
    assert first.prompt_token_ids == TASK.prompt_token_ids
    assert (first.completion_token_ids, first.behavior_logprobs_T) == ((7, 7), (-1.0, -1.0))


def test_metrics_by_hand() -> None:
    flat = make_group(TASK, [rollout(GOOD, 0, tokens=5), rollout(GOOD, 1, tokens=3)], method="no_std", truncated="zero")
    mixed = make_group(
        OTHER,
        [rollout(BAD, 0, parse=ParseOutcome.MALFORMED, version=1), rollout(GOOD, 1), rollout(CUT, 2), rollout(DOWN, 3, parse=ParseOutcome.ABSENT)],
        method="no_std",
        truncated="zero",
    )
    assert rollout_metrics([flat, mixed], step=3) == pytest.approx(
        {
            "rollout/reward/mean": 3 / 5,
            "rollout/reward/std": (0 + (2 / 9) ** 0.5) / 2,
            "rollout/group_zero_variance/frac": 0.5,
            "rollout/group_dropped/count": 0,
            "rollout/truncated/frac": 1 / 6,
            "rollout/malformed/frac": 1 / 6,
            "rollout/absent/frac": 1 / 6,
            "rollout/verifier_error/frac": 1 / 6,
            "rollout/response_tokens/mean": 16 / 6,
            "rollout/response_tokens/sum": 16,
            "rollout/prompt_tokens/sum": 4,
            "rollout/wasted_tokens/sum": 8,
            "sync/policy_age_steps/max": 2,
        }
    )


def test_infra_limit_is_a_share_and_names_the_reason() -> None:
    groups = [[rollout(GOOD, 0), rollout(DOWN, 1)], [rollout(GOOD, 0), rollout(BAD, 1)]]
    assert check_infra(groups, max_infra_frac=0.25, where="step 0") == 1
    with pytest.raises(InfraLimitError, match=r"1 of 4 verdicts at step 0 .* judge down"):
        check_infra(groups, max_infra_frac=0.24, where="step 0")
