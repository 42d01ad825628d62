"""Intervals against scipy, and the property that makes clustering matter: copies of a row add no information."""

from __future__ import annotations

import doctest
import math
import random

import numpy as np
import pytest
from scipy import stats

from pivotrl.pivots import statistics
from pivotrl.pivots.statistics import NUM_RESAMPLES, ClusteredMean, Interval, cluster_bootstrap_interval, paired_difference, wilson_interval


@pytest.mark.parametrize(("successes", "n"), [(0, 1), (1, 1), (0, 10), (10, 10), (71, 100), (1, 3), (355, 500), (99_999, 100_000)])
def test_wilson_equals_scipy(successes: int, n: int) -> None:
    ours = wilson_interval(successes, n)
    theirs = stats.binomtest(successes, n).proportion_ci(confidence_level=0.95, method="wilson")
    assert ours.low == pytest.approx(theirs.low, abs=1e-12)
    assert ours.high == pytest.approx(theirs.high, abs=1e-12)
    assert (ours.value, ours.n) == (successes / n, n)


def test_wilson_is_not_the_normal_interval() -> None:
    """The textbook normal interval has width 0 at 0/n; a report that used it would call ten failures certain."""
    assert wilson_interval(0, 10).high > 0.2
    assert wilson_interval(0, 10).low == 0.0
    assert wilson_interval(10, 10).high == 1.0


def test_wilson_of_nothing_is_nan_and_null_in_json() -> None:
    empty = wilson_interval(0, 0)
    assert math.isnan(empty.value)
    assert empty.as_dict() == {"value": None, "low": None, "high": None, "n": 0}


@pytest.mark.parametrize(("successes", "n"), [(-1, 3), (4, 3)])
def test_wilson_refuses_impossible_counts(successes: int, n: int) -> None:
    with pytest.raises(ValueError, match="0 <= successes <= n"):
        wilson_interval(successes, n)


def test_bootstrap_of_singletons_equals_scipy_bootstrap() -> None:
    """With one value per cluster it is the ordinary percentile bootstrap; two Monte Carlo runs agree within a few percent of the width."""
    rng = random.Random(5)
    values = [rng.gauss(0.4, 0.3) for _ in range(200)]
    ours = cluster_bootstrap_interval(values, range(200), seed=3)
    theirs = stats.bootstrap((np.array(values),), np.mean, n_resamples=10_000, method="percentile", rng=np.random.default_rng(1)).confidence_interval
    width = theirs.high - theirs.low
    assert ours.value == pytest.approx(float(np.mean(values)), abs=1e-12)
    assert abs(ours.low - theirs.low) < 0.08 * width
    assert abs(ours.high - theirs.high) < 0.08 * width


def test_copies_within_a_cluster_do_not_narrow_the_interval() -> None:
    """The wrong formula (resampling rows) would shrink the interval by 4 when every row is copied 16 times."""
    rng = random.Random(7)
    values = [float(rng.random() < 0.5) for _ in range(60)]
    once = cluster_bootstrap_interval(values, range(60), seed=11)
    copied = cluster_bootstrap_interval([v for v in values for _ in range(16)], [c for c in range(60) for _ in range(16)], seed=11)
    by_row = cluster_bootstrap_interval([v for v in values for _ in range(16)], range(960), seed=11)
    assert (copied.low, copied.high) == pytest.approx((once.low, once.high), abs=1e-12)
    assert by_row.high - by_row.low < 0.4 * (once.high - once.low)
    assert copied.n == 960


def test_bootstrap_weights_clusters_by_size_and_brute_force_agrees() -> None:
    """Two clusters can be drawn in four ways; the extremes of the resample distribution are known exactly."""
    interval = cluster_bootstrap_interval([1.0, 0.0, 0.0, 0.0], ["a", "b", "b", "b"], seed=0)
    assert interval == Interval(0.25, 0.0, 1.0, 4)


def test_bootstrap_is_a_function_of_its_seed() -> None:
    values, clusters = [0.1 * (i % 7) for i in range(50)], [i // 5 for i in range(50)]
    assert cluster_bootstrap_interval(values, clusters, seed=1) == cluster_bootstrap_interval(values, clusters, seed=1)
    assert cluster_bootstrap_interval(values, clusters, seed=1) != cluster_bootstrap_interval(values, clusters, seed=2)


def test_bootstrap_coverage_is_near_nominal() -> None:
    """Of 100 data sets with a known mean, 95 % intervals by cluster cover it about 95 % of the time; by row they do not."""
    rng = random.Random(13)
    covered_by_cluster = covered_by_row = 0
    for trial in range(100):
        values, clusters = [], []
        for cluster in range(40):
            center = rng.gauss(0.0, 1.0)
            for _ in range(5):
                values.append(center + rng.gauss(0.0, 0.1))
                clusters.append(cluster)
        by_cluster = cluster_bootstrap_interval(values, clusters, seed=trial)
        by_row = cluster_bootstrap_interval(values, range(200), seed=trial)
        covered_by_cluster += by_cluster.low <= 0.0 <= by_cluster.high
        covered_by_row += by_row.low <= 0.0 <= by_row.high
    assert covered_by_cluster >= 86
    assert covered_by_row <= 75
    assert NUM_RESAMPLES >= 1000


def test_bootstrap_refuses_unlabelled_values() -> None:
    with pytest.raises(ValueError, match="2 values but 1 cluster labels"):
        cluster_bootstrap_interval([1.0, 0.0], ["a"], seed=0)


def test_paired_difference_cancels_item_difficulty() -> None:
    rng = random.Random(3)
    difficulty = [rng.random() for _ in range(300)]
    before = [d + rng.gauss(0, 0.01) for d in difficulty]
    after = [d + 0.02 + rng.gauss(0, 0.01) for d in difficulty]
    paired = paired_difference(before, after, range(300), seed=4)
    assert paired.difference.low > 0.015
    assert paired.difference.high < 0.025
    unpaired_width = cluster_bootstrap_interval(after, range(300), seed=4).high - cluster_bootstrap_interval(after, range(300), seed=4).low
    assert paired.difference.high - paired.difference.low < 0.2 * unpaired_width


@pytest.mark.parametrize(("wins", "losses"), [(0, 0), (1, 0), (5, 1), (8, 8), (3, 30), (600, 700)])
def test_sign_test_equals_scipy(wins: int, losses: int) -> None:
    before = [0.0] * wins + [1.0] * losses + [1.0, 0.0]
    after = [1.0] * wins + [0.0] * losses + [1.0, 0.0]
    paired = paired_difference(before, after, range(len(before)), seed=0)
    expected = stats.binomtest(wins, wins + losses).pvalue if wins + losses else 1.0
    assert (paired.wins, paired.losses) == (wins, losses)
    assert paired.sign_test_p == pytest.approx(expected, abs=1e-12)


def share(events_by_cluster: dict[str, list[int]]) -> Interval:
    mean = ClusteredMean()
    for cluster, events in events_by_cluster.items():
        for event in events:
            mean.add(cluster, event)
    return mean.share_interval(seed=0)


def test_share_without_an_event_is_as_sure_as_its_clusters_not_its_rows() -> None:
    """0 of 80 samples of 5 states: five independent looks, so Wilson at n = 5, while n stays the number of rows."""
    none = share({name: [0] * 16 for name in "abcde"})
    assert (none.value, none.low, none.n) == (0.0, 0.0, 80)
    assert none.high == wilson_interval(0, 5).high
    every = share({name: [1] * 16 for name in "abcde"})
    assert (every.value, every.high, every.low) == (1.0, 1.0, wilson_interval(5, 5).low)
    mixed = share({"a": [1, 0], "b": [0, 0], "c": [1, 1]})
    assert 0.0 <= mixed.low < mixed.value == 0.5 < mixed.high <= 1.0


def test_examples_in_the_docstrings_run() -> None:
    assert doctest.testmod(statistics).failed == 0
