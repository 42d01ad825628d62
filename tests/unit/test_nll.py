"""Eq. 1: the mean over all expert tokens of the step, whatever the micro-batches; prompts and padding carry none of it."""

from __future__ import annotations

import math

import pytest
from fakes.objective_steps import lay_out, loss_and_gradients, random_step

from pivotrl.objective import oracle
from pivotrl.objective.nll import make_nll_loss


@pytest.mark.parametrize("seed", range(5))
def test_value_and_gradient_over_micro_batches_equal_oracle(seed: int) -> None:
    step = random_step(seed, off_policy=False, weights=(1.0,))
    parts = [step[:1], step[1:]]
    laid = [lay_out(part, step=step, off_policy=False, garbage=math.nan) for part in parts]
    value, gradients = loss_and_gradients(laid, parts, make_nll_loss())
    tokens = sum(len(a.oracle.logprobs_T) for a in step)
    assert value == pytest.approx(oracle.nll_loss([a.oracle.logprobs_T for a in step]), abs=1e-9)
    assert all(g == pytest.approx(-1 / tokens) for row in gradients for g in row)


def test_mean_of_sequence_means_would_differ() -> None:
    step = random_step(0, off_policy=False, weights=(1.0,))
    rows = [a.oracle.logprobs_T for a in step]
    per_sequence = -sum(sum(row) / len(row) for row in rows) / len(rows)
    assert abs(per_sequence - oracle.nll_loss(rows)) > 1e-2


def test_sums_count_expert_tokens() -> None:
    step = random_step(2, off_policy=False, weights=(1.0,))
    laid = lay_out(step, step=step, off_policy=False, garbage=math.nan)
    sums = make_nll_loss()(laid.logprobs_B_T, laid.entropies_B_T, laid.batch).sums
    assert sums["tokens"].item() == sum(len(a.entropies_T) for a in step)
    assert sums["entropy"].item() == pytest.approx(sum(sum(a.entropies_T) for a in step))
