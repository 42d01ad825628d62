"""The learning rate of a step, against values worked out by hand."""

from __future__ import annotations

import math

import pytest

from pivotrl.config.schema import OptimizerConfig
from pivotrl.megatron.schedule import learning_rate


def test_warm_up_is_linear_and_reaches_the_peak_in_its_last_step() -> None:
    config = OptimizerConfig(lr=8.0, warmup_steps=4)
    assert [learning_rate(step, config, num_steps=6) for step in range(6)] == [2.0, 4.0, 6.0, 8.0, 8.0, 8.0]


def test_cosine_is_the_peak_at_first_and_a_tenth_at_last() -> None:
    config = OptimizerConfig(lr=1.0, decay="cosine")
    rates = [learning_rate(step, config, num_steps=5) for step in range(5)]
    assert rates == pytest.approx([1.0, 0.1 + 0.9 * (1 + math.sqrt(0.5)) / 2, 0.55, 0.1 + 0.9 * (1 - math.sqrt(0.5)) / 2, 0.1])


def test_cosine_starts_where_warm_up_ends() -> None:
    config = OptimizerConfig(lr=1.0, warmup_steps=3, decay="cosine")
    rates = [learning_rate(step, config, num_steps=7) for step in range(7)]
    assert rates == pytest.approx([1 / 3, 2 / 3, 1.0, *(0.1 + 0.45 * (1 + math.cos(math.pi * k / 4)) for k in range(1, 5))])


@pytest.mark.parametrize("warmup_steps", [0, 1, 2])
def test_a_run_of_one_step_has_a_rate(warmup_steps: int) -> None:
    assert learning_rate(0, OptimizerConfig(lr=1.0, warmup_steps=warmup_steps, decay="cosine"), num_steps=1) == (0.5 if warmup_steps == 2 else 1.0)
