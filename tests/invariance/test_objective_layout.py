"""Loss and gradient do not depend on how a step is laid out: micro-batch split, row order, padding, and what padding holds.

Why it must hold: every per-token term is divided by the step's global denominator (or the action's own length times it) before
any sum, so a step's loss is one sum over tokens and a micro-batch is a subset of its summands.
"""

from __future__ import annotations

import math
import random

import pytest
from fakes.objective_steps import lay_out, loss_and_gradients, random_step, train_config

from pivotrl.objective.grpo import make_grpo_loss


@pytest.mark.parametrize("aggregation", ["action", "token"])
@pytest.mark.parametrize("off_policy", [False, True])
@pytest.mark.parametrize("seed", range(4))
def test_split_order_and_padding(aggregation: str, off_policy: bool, seed: int) -> None:
    loss = make_grpo_loss(train_config(aggregation=aggregation, kl={"beta": 0.2}))
    step = random_step(seed, off_policy=off_policy)
    value, gradients = loss_and_gradients([lay_out(step, step=step, off_policy=off_policy)], [step], loss)
    rng = random.Random(seed)
    for num_parts in (1, 2, len(step)):
        order = rng.sample(range(len(step)), len(step))
        parts = [[step[i] for i in order[p::num_parts]] for p in range(num_parts)]
        laid = [lay_out(part, step=step, off_policy=off_policy, extra_padding=rng.randint(0, 4), garbage=math.nan) for part in parts]
        other_value, other = loss_and_gradients(laid, parts, loss)
        assert other_value == pytest.approx(value, abs=1e-12)
        indices = [i for p in range(num_parts) for i in order[p::num_parts]]
        for i, row in zip(indices, other, strict=True):
            assert row == pytest.approx(gradients[i], abs=1e-12)
        assert all(one.logprobs_B_T.grad is not None and not one.logprobs_B_T.grad.isnan().any() for one in laid)


def test_a_local_mean_would_depend_on_the_split() -> None:
    """The anti-pattern this file guards against: dividing by what the micro-batch holds."""
    step = random_step(1, off_policy=False, weights=(1.0,))
    loss = make_grpo_loss(train_config())
    whole, _ = loss_and_gradients([lay_out(step, step=step, off_policy=False)], [step], loss)
    parts = [step[:1], step[1:]]
    local, _ = loss_and_gradients([lay_out(part, step=part, off_policy=False) for part in parts], parts, loss)
    assert abs(local / 2 - whole) > 1e-2
