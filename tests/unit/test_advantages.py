"""Group advantages: oracle equality, the table over all k of G, the paper's and the incumbent's published figures."""

from __future__ import annotations

import math
import statistics
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pivotrl.config.schema import TrainConfig
from pivotrl.objective import oracle
from pivotrl.objective.advantages import AdvantageName, group_advantages, has_zero_variance

METHODS: tuple[AdvantageName, ...] = get_args(AdvantageName.__value__)
SOUND: tuple[AdvantageName, ...] = ("mean_std", "leave_one_out", "no_std")
rewards = st.lists(st.floats(0, 1).map(lambda x: round(x, 3)), min_size=2, max_size=16)


def group(k: int, size: int) -> list[float]:
    return [1.0] * k + [0.0] * (size - k)


def test_names_are_those_of_the_schema() -> None:
    assert get_args(TrainConfig.model_fields["advantage"].annotation) == METHODS


@pytest.mark.parametrize("method", METHODS)
@given(rewards_G=rewards)
def test_equals_oracle(method: AdvantageName, rewards_G: list[float]) -> None:
    assert group_advantages(rewards_G, method) == pytest.approx(oracle.advantages(rewards_G, method), rel=1e-6, abs=1e-6)


@pytest.mark.parametrize("method", SOUND)
@pytest.mark.parametrize("size", range(2, 17))
def test_monotone_symmetric_and_centred_over_all_k(method: AdvantageName, size: int) -> None:
    """A success among more successes gets less, a failure among more successes gets more blame; k and G - k mirror; sums are 0."""
    success = {k: group_advantages(group(k, size), method)[0] for k in range(1, size)}
    failure = {k: group_advantages(group(k, size), method)[-1] for k in range(1, size)}
    for k in range(1, size):
        assert success[k] > 0 > failure[k]
        assert success[k] == pytest.approx(-failure[size - k], rel=1e-12)
        assert math.fsum(group_advantages(group(k, size), method)) == pytest.approx(0, abs=1e-12)
        if k > 1:
            assert success[k] < success[k - 1]
            assert failure[k] < failure[k - 1]


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("value", [0.0, 0.1, 1 / 3, 1.0])
@pytest.mark.parametrize("size", [2, 3, 7, 16])
def test_zero_variance_gives_exact_zeros(method: AdvantageName, value: float, size: int) -> None:
    """Proposition 3.1, exactly: 1/3 summed three times is not exactly three thirds, and still no advantage may differ from 0."""
    assert group_advantages([value] * size, method) == (0.0,) * size


def test_zero_variance_is_exact_equality() -> None:
    assert has_zero_variance([0.3, 0.3])
    assert not has_zero_variance([0.3, math.nextafter(0.3, 1)])


@pytest.mark.parametrize(
    ("method", "lone", "pair"),
    [("mean_std", 3.873, 2.646), ("leave_one_out_std", 1.0, 3.615), ("leave_one_out", 1.0, 14 / 15), ("no_std", 15 / 16, 14 / 16)],
)
def test_published_figures_for_one_and_two_successes_among_sixteen(method: AdvantageName, lone: float, pair: float) -> None:
    assert group_advantages(group(1, 16), method)[0] == pytest.approx(lone, abs=1e-3)
    assert group_advantages(group(2, 16), method)[0] == pytest.approx(pair, abs=1e-3)


def test_incumbent_is_not_monotone_and_not_centred() -> None:
    """What the compatibility option reproduces, so that nobody takes it for the paper's formula."""
    by_k = [group_advantages(group(k, 16), "leave_one_out_std")[0] for k in (1, 2, 3)]
    assert by_k == pytest.approx([1.0, 3.615, 2.463], abs=1e-3)
    assert math.fsum(group_advantages(group(1, 16), "leave_one_out_std")) == pytest.approx(1 - 15 * 0.2582, abs=1e-3)


def test_incumbent_with_one_other_is_undivided() -> None:
    assert group_advantages([1.0, 0.0], "leave_one_out_std") == (1.0, -1.0)


@pytest.mark.parametrize("size", [3, 8, 16])
def test_sample_std_would_differ(size: int) -> None:
    """The wrong std (divisor G - 1) is told apart at the tolerance of the oracle test."""
    rewards_G = group(1, size)
    wrong = (1 - statistics.mean(rewards_G)) / statistics.stdev(rewards_G)
    assert abs(group_advantages(rewards_G, "mean_std")[0] - wrong) > 1e-2


@pytest.mark.parametrize("rewards_G", [[], [1.0]])
def test_group_too_small(rewards_G: list[float]) -> None:
    with pytest.raises(ValueError, match="at least 2"):
        group_advantages(rewards_G, "mean_std")
