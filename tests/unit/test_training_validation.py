"""Validation: the same candidates whatever their order, hand-computed means over counted samples, clustered intervals, clear refusals."""

from __future__ import annotations

import dataclasses
import random

import pytest
from fakes.bandit import BanditEngine, BanditSampler, bandit_tasks

from pivotrl.errors import InfraLimitError, UserError
from pivotrl.rollouts.local import LocalTask
from pivotrl.training.validation import HeldOutScore, choose_tasks, score_held_out
from pivotrl.types import Completion, Verdict

TASKS = bandit_tasks(6)


def score(tasks: list[LocalTask], *, num_samples: int = 4, truncated: str = "zero", max_infra_frac: float = 0.0, **sampler: object) -> HeldOutScore:
    return score_held_out(
        BanditSampler(BanditEngine(), **sampler),
        tasks,
        num_samples=num_samples,
        truncated=truncated,
        max_infra_frac=max_infra_frac,
        place=("validation",),
        seed=5,
    )


def first_half(task: LocalTask, _completion: Completion) -> Verdict:
    return Verdict.ok(1.0, "first half") if task.candidate_id < "pivot-3" else Verdict.invalid("second half")


def test_same_tasks_in_any_order() -> None:
    chosen = choose_tasks(TASKS, 3)
    assert chosen == choose_tasks(random.Random(1).sample(TASKS, len(TASKS)), 3)
    assert chosen != TASKS[:3]
    assert len(choose_tasks(TASKS, 100)) == 6


def test_interval_is_wide_where_candidates_disagree() -> None:
    """24 samples that agree within their candidate are 6 observations, not 24: the interval must not shrink with more samples."""
    few, many = score(TASKS, num_samples=4, judge=first_half), score(TASKS, num_samples=40, judge=first_half)
    assert few.mean.value == many.mean.value == 0.5
    assert (few.mean.n, many.mean.n) == (24, 240)
    assert (few.mean.low, few.mean.high) == (many.mean.low, many.mean.high)
    assert few.mean.high - few.mean.low > 0.5


def test_infra_is_left_out_and_counted() -> None:
    made = score(TASKS, infra=frozenset({0}), max_infra_frac=0.25, judge=first_half)
    assert (made.mean.value, made.mean.n, made.num_infra, made.num_candidates) == (0.5, 18, 6, 6)
    with pytest.raises(InfraLimitError, match="validation"):
        score(TASKS, infra=frozenset({0}), max_infra_frac=0.2)


def test_nothing_to_score_is_a_user_error() -> None:
    with pytest.raises(UserError, match=r"no held-out candidate.* ingest.held_out_frac"):
        choose_tasks([], 3)
    with pytest.raises(UserError, match=r"none of 1 x 1 .*max_new_tokens"):
        score([_always_cut()], num_samples=1, truncated="exclude")


def _always_cut() -> LocalTask:
    """A task whose one sample happens to be cut."""
    for number in range(100):
        task = dataclasses.replace(TASKS[0], candidate_id=f"task-{number}")
        (group,) = BanditSampler(BanditEngine()).sample([task], num_samples=1, place=("validation",))
        if group[0].is_truncated:
            return task
    raise AssertionError("no sample of a hundred was cut")
