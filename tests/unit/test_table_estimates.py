"""Estimates over tasks and seeds against enumeration, scipy and hand-worked cases; nothing depends on the order of seeds or tasks."""

from __future__ import annotations

import math
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from pivotrl.evaluation.tables.curves import _mean_under
from pivotrl.evaluation.tables.estimates import Estimate, Resampling, TaskScore, Total, change, mean_of, score, sign_flip_p

DRAWS = Resampling(5, "domain", "benchmark")


def tasks(**means: float) -> list[TaskScore]:
    return [TaskScore(name, name, "", mean, 1) for name, mean in means.items()]


def known(estimate: Estimate | None) -> Estimate:
    assert estimate is not None
    return estimate


def test_resamples_draw_seeds_and_tasks() -> None:
    """Two seeds, three tasks: 4 x 27 equally likely draws, enumerated. Drawing tasks alone, or seeds alone, has another spread."""
    values = {0: {"a": 1.0, "b": 0.0, "c": 0.5}, 1: {"a": 1.0, "b": 1.0, "c": 0.25}}
    estimate = known(score({seed: tasks(**means) for seed, means in values.items()}, DRAWS))
    exact = [
        np.mean([values[seed][task] for seed in seeds for task in drawn]) for seeds in product(values, repeat=2) for drawn in product("abc", repeat=3)
    ]
    assert estimate.value == pytest.approx(3.75 / 6)
    assert estimate.draws_R is not None
    assert estimate.draws_R.mean() == pytest.approx(np.mean(exact), abs=4 * float(np.std(exact)) / math.sqrt(2000))
    assert estimate.draws_R.std() == pytest.approx(np.std(exact), rel=0.08)
    only_tasks = [np.mean([values[seed][task] for seed in (0, 1) for task in drawn]) for drawn in product("abc", repeat=3)]
    assert estimate.draws_R.std() > 1.1 * np.std(only_tasks)
    interval = estimate.interval()
    assert (interval.low, interval.high) == tuple(np.quantile(estimate.draws_R, [0.025, 0.975]))


def test_tasks_of_one_cluster_are_drawn_together() -> None:
    """Four tasks of two clusters with means 0 and 1: the mean is 0, 1/2 or 1 with probabilities 1/4, 1/2, 1/4."""
    rows = [TaskScore(f"{cluster}{i}", cluster, "", mean, 1) for cluster, mean in (("a", 0.0), ("b", 1.0)) for i in range(2)]
    draws = known(score({0: rows}, DRAWS)).draws_R
    assert draws is not None
    shares = [np.mean(draws == value) for value in (0.0, 0.5, 1.0)]
    assert shares == pytest.approx([0.25, 0.5, 0.25], abs=0.04)


def test_counts_are_of_attempts_tasks_and_seeds() -> None:
    rows = [TaskScore("a", "a", "", 0.5, 4), TaskScore("b", "b", "", 1.0, 2)]
    estimate = known(score({0: rows, 1: rows}, DRAWS))
    assert (estimate.value, estimate.num_attempts, estimate.num_tasks, estimate.num_seeds) == (0.75, 12, 2, 2)
    assert estimate.interval().n == 12


def test_where_all_succeed_the_interval_is_wilsons_over_clusters() -> None:
    interval = known(score({0: tasks(a=1.0, b=1.0, c=1.0)}, DRAWS)).interval()
    expected = stats.binomtest(3, 3).proportion_ci(method="wilson")
    assert (interval.low, interval.high) == pytest.approx((expected.low, expected.high))


def test_single_binary_attempts_of_one_seed_have_wilsons_interval() -> None:
    """1 of 32: the bootstrap would end at 3 of 32. A second attempt or a second seed makes it the bootstrap again."""
    rows = tasks(**{f"t{i}": float(i == 0) for i in range(32)})
    expected = stats.binomtest(1, 32).proportion_ci(method="wilson")
    interval = known(score({0: rows}, DRAWS)).interval()
    assert (interval.low, interval.high) == pytest.approx((expected.low, expected.high))
    assert known(score({0: rows, 1: rows}, DRAWS)).interval().low == 0.0


def test_a_change_pairs_tasks_within_seeds() -> None:
    """b is only before, d only after: neither counts. The tasks' own difficulty cancels, so the interval is narrower than the unpaired one."""
    before = {0: tasks(a=0.0, b=1.0, c=0.5), 1: tasks(a=0.25, c=1.0)}
    after = {0: tasks(a=0.25, c=0.75, d=0.0), 1: tasks(a=0.5, c=1.0)}
    found = known(change(before, after, DRAWS))
    assert found.value == pytest.approx((0.25 + 0.25 + 0.25 + 0.0) / 4)
    assert (found.num_attempts, found.num_tasks, found.num_seeds, found.is_paired) == (4, 2, 2, True)
    unpaired = known(change({0: tasks(x=0.0, y=1.0)}, {0: tasks(a=0.25, c=0.75)}, DRAWS))
    assert not unpaired.is_paired
    assert not unpaired.tests
    width = lambda one: one.interval().high - one.interval().low  # noqa: E731
    assert width(found) < width(unpaired)


def test_one_base_is_compared_with_every_seed() -> None:
    found = known(change({0: tasks(a=0.0, b=1.0)}, {1: tasks(a=1.0, b=1.0), 2: tasks(a=0.0, b=1.0)}, DRAWS))
    assert (found.value, found.num_seeds) == (0.25, 2)
    assert [test.name for test in found.tests] == ["permutation over tasks"]


def test_single_binary_attempts_are_tested_by_mcnemar() -> None:
    before = {0: tasks(**{f"t{i}": float(i < 4) for i in range(20)})}
    after = {0: tasks(**{f"t{i}": float(2 <= i < 14) for i in range(20)})}
    (test,) = known(change(before, after, DRAWS)).tests
    assert (test.name, test.n) == ("McNemar, exact", 12)
    assert test.p == pytest.approx(stats.binomtest(2, 12).pvalue)


def test_seeds_are_tested_as_well_where_there_are_several() -> None:
    """Three seeds that all gain: 2 of 8 sign patterns are as extreme, however many tasks agree."""
    before = {seed: tasks(**{f"t{i}": 0.0 for i in range(30)}) for seed in range(3)}
    after = {seed: tasks(**{f"t{i}": 1.0 for i in range(30)}) for seed in range(3)}
    over_tasks, over_seeds = known(change(before, after, DRAWS)).tests
    assert (over_tasks.name, over_tasks.n) == ("permutation over tasks", 30)
    assert over_tasks.p < 1e-3
    assert (over_seeds.name, over_seeds.p, over_seeds.n) == ("permutation over seeds", 0.25, 3)


@pytest.mark.parametrize("differences", [[0.5, -0.25, 0.75, 0.1], [1.0, 1.0, -1.0], [0.3] * 8])
def test_sign_flips_agree_with_scipy(differences: list[float]) -> None:
    expected = stats.permutation_test((np.array(differences),), np.sum, permutation_type="samples", n_resamples=10**6, alternative="two-sided")
    assert sign_flip_p(differences, generator=np.random.default_rng(0)) == pytest.approx(expected.pvalue)


def test_drawn_sign_flips_approach_the_exact_share() -> None:
    differences = [0.1 * (i % 5) - 0.1 for i in range(16)]
    nonzero = np.array([value for value in differences if value])
    signs = np.array(list(product((1, -1), repeat=len(nonzero))))
    exact = np.mean(np.abs(signs @ nonzero) >= abs(nonzero.sum()) - 1e-9)
    assert sign_flip_p(differences, generator=np.random.default_rng(0)) == pytest.approx(exact, abs=0.02)


def test_totals_vary_by_their_stated_error() -> None:
    """One total of 0.5 +- 0.02 has the normal interval; two seeds without an error but with n take a share's; with neither there is none."""
    stated = known(score({0: Total(0.5, 0.02, 900)}, DRAWS)).interval()
    assert (stated.low, stated.high) == pytest.approx((0.5 - 1.96 * 0.02, 0.5 + 1.96 * 0.02), abs=0.004)
    counted = known(score({0: Total(0.5, None, 100)}, DRAWS)).interval()
    assert (counted.low, counted.high) == pytest.approx((0.5 - 1.96 * 0.05, 0.5 + 1.96 * 0.05), abs=0.01)
    bare = known(score({0: Total(0.5, None, 0)}, DRAWS)).interval()
    assert math.isnan(bare.low)
    difference = known(change({0: Total(0.5, 0.03, 100)}, {0: Total(0.6, 0.04, 100)}, DRAWS))
    assert difference.draws_R is not None
    assert difference.value == pytest.approx(0.1)
    assert difference.draws_R.std() == pytest.approx(0.05, rel=0.06)


def test_a_mean_of_parts_that_cannot_vary_keeps_wilsons_bounds() -> None:
    """Three of three and five of five: the mean of the two lower bounds, not a width of zero. Beside a part that varies the resamples decide."""
    three, five = score({0: tasks(a=1.0, b=1.0, c=1.0)}, DRAWS), score({0: tasks(a=1.0, b=1.0, c=1.0, d=1.0, e=1.0)}, DRAWS)
    lows = [stats.binomtest(n, n).proportion_ci(method="wilson").low for n in (3, 5)]
    interval = known(mean_of([three, five])).interval()
    assert (interval.value, interval.low, interval.high) == pytest.approx((1.0, sum(lows) / 2, 1.0))
    assert known(mean_of([three])).interval().low == pytest.approx(lows[0])
    varying = score({0: tasks(a=1.0, b=0.0), 1: tasks(a=1.0, b=1.0)}, DRAWS)
    assert known(mean_of([three, varying])).bounds is None


def test_a_mean_of_estimates_needs_every_part() -> None:
    one = score({0: tasks(a=1.0, b=0.0)}, DRAWS)
    other = score({0: tasks(a=0.0, b=0.0, c=1.0, d=1.0)}, Resampling(5, "other", "other"))
    joined = known(mean_of([one, other]))
    assert one is not None
    assert other is not None
    assert one.draws_R is not None
    assert other.draws_R is not None
    assert joined.draws_R is not None
    np.testing.assert_allclose(joined.draws_R, (one.draws_R + other.draws_R) / 2)
    assert (joined.value, joined.num_attempts) == (0.5, 6)
    assert mean_of([one, None]) is None
    assert mean_of([]) is None


_MEANS = st.dictionaries(st.sampled_from("abcdefgh"), st.sampled_from([0.0, 0.25, 0.5, 1.0]), min_size=1)


@settings(max_examples=40)
@given(before=st.dictionaries(st.integers(0, 3), _MEANS, min_size=1), after=st.dictionaries(st.integers(0, 3), _MEANS, min_size=1), data=st.data())
def test_the_order_of_seeds_and_tasks_changes_nothing(before: dict[int, dict[str, float]], after: dict[int, dict[str, float]], data) -> None:
    def shuffled(seeds: dict[int, dict[str, float]]) -> dict[int, list[TaskScore]]:
        order = data.draw(st.permutations(list(seeds)))
        return {seed: data.draw(st.permutations(tasks(**seeds[seed]))) for seed in order}

    straight = [{seed: tasks(**means) for seed, means in side.items()} for side in (before, after)]
    first, second = score(straight[0], DRAWS), score(shuffled(before), DRAWS)
    assert known(first).interval() == pytest.approx(known(second).interval())
    forward, again = change(straight[0], straight[1], DRAWS), change(shuffled(before), shuffled(after), DRAWS)
    assert known(forward).value == pytest.approx(known(again).value)
    assert [test.p for test in known(forward).tests] == pytest.approx([test.p for test in known(again).tests])
    if known(forward).is_paired and set(before) == set(after):
        backward = change(straight[1], straight[0], DRAWS)
        assert known(backward).value == pytest.approx(-known(forward).value)


def test_a_mean_of_curves_is_added_in_the_order_of_seeds() -> None:
    """To the last bit on every machine: one that lies between two printed digits shows the same one everywhere."""
    generator = np.random.default_rng(3)
    weights, values = generator.random((40, 5)), generator.random((5, 12))
    expected = [[0.0] * 12 for _ in weights]
    for number, row in enumerate(weights.tolist()):
        for weight, curve in zip(row, values.tolist(), strict=True):
            expected[number] = [total + weight * value for total, value in zip(expected[number], curve, strict=True)]
    assert _mean_under(weights, values).tolist() == expected


def test_a_comparison_that_is_asked_for_again_is_the_same() -> None:
    before, after = ({seed: tasks(a=level, b=0.0, c=level * seed) for seed in (0, 1)} for level in (0.25, 0.75))
    first, again = known(change(before, after, DRAWS)), known(change(before, after, DRAWS))
    elsewhere = known(change(before, after, Resampling(5, "domain", "another")))
    assert first.tests == again.tests
    first_R, again_R, elsewhere_R = (np.asarray(one.draws_R) for one in (first, again, elsewhere))
    assert np.array_equal(first_R, again_R)
    assert not np.array_equal(first_R, elsewhere_R)
    with pytest.raises(ValueError, match="read-only"):
        first_R[0] = 1.0
