"""Intervals for every number the product prints: Wilson for shares, clustered bootstrap for means, paired differences.

Pure: values in, `Interval` out; the bootstrap draws from a seed the caller derives. Turns of one trajectory share their
prefix and attempts at one task share its difficulty, so means are resampled by cluster, never by row. Suffixes: C = clusters, R = resamples.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
import numpy.typing as npt

CONFIDENCE = 0.95
"""Two-sided confidence of every interval in reports and manifests."""
BOUNDS = (0.5 - CONFIDENCE / 2, 0.5 + CONFIDENCE / 2)
"""The quantiles of resamples that bound such an interval."""

# Monte Carlo error of a 2.5 % quantile is below 0.4 % of the resamples' spread at this size.
NUM_RESAMPLES = 2000
# Entries of the index matrix drawn at once: bounds memory whatever the number of clusters.
_DRAWS_PER_BLOCK = 2_000_000


@dataclass(frozen=True, slots=True)
class Interval:
    """An estimate with its n and two-sided 95 % interval.

    >>> wilson_interval(71, 100).as_dict()["value"]
    0.71
    """

    value: float
    low: float
    high: float
    n: int
    """Number of observations behind the estimate (rows, not clusters)."""

    def as_dict(self) -> dict[str, float | int | None]:
        """JSON-ready form; NaN (n = 0) becomes None."""
        numbers = {"value": self.value, "low": self.low, "high": self.high}
        return {**{name: None if math.isnan(number) else number for name, number in numbers.items()}, "n": self.n}


@dataclass(frozen=True, slots=True)
class PairedDifference:
    """What changed between two policies on the same items."""

    difference: Interval
    """Mean of after - before, resampled by cluster."""
    wins: int
    """Items where after > before."""
    losses: int
    """Items where after < before."""
    sign_test_p: float
    """Two-sided exact sign test over wins and losses, ties left out; McNemar's exact test for 0/1 scores."""


_EMPTY = Interval(math.nan, math.nan, math.nan, 0)


def wilson_interval(successes: int, n: int) -> Interval:
    """Wilson score interval of a share (Wilson 1927), defined at 0/n and n/n where the normal interval has width 0.

    >>> interval = wilson_interval(0, 10)
    >>> interval.low, round(interval.high, 4)
    (0.0, 0.2775)

    Raises:
        ValueError: where not 0 <= successes <= n.
    """
    if not 0 <= successes <= n:
        raise ValueError(f"successes = {successes} of n = {n}; a share needs 0 <= successes <= n")
    if n == 0:
        return _EMPTY
    z = NormalDist().inv_cdf(0.5 + CONFIDENCE / 2)
    share = successes / n
    center = (share + z * z / (2 * n)) / (1 + z * z / n)
    half_width = z * math.sqrt(share * (1 - share) / n + z * z / (4 * n * n)) / (1 + z * z / n)
    low = 0.0 if successes == 0 else center - half_width
    high = 1.0 if successes == n else center + half_width
    return Interval(share, low, high, n)


class ClusteredMean:
    """A mean of grouped observations, fed one at a time: holds two numbers per cluster, whatever the number of rows.

    >>> pass_rate = ClusteredMean()
    >>> for task, reward in (("a", 1.0), ("a", 0.0), ("b", 0.0), ("b", 0.0)):
    ...     pass_rate.add(task, reward)
    >>> pass_rate.interval(seed=0)
    Interval(value=0.25, low=0.0, high=0.5, n=4)
    """

    def __init__(self) -> None:
        self._sums: dict[Hashable, float] = {}
        self._sizes: dict[Hashable, int] = {}

    def add(self, cluster: Hashable, value: float) -> None:
        """Adds one observation of one cluster (the trajectory or task it comes from)."""
        self._sums[cluster] = self._sums.get(cluster, 0.0) + value
        self._sizes[cluster] = self._sizes.get(cluster, 0) + 1

    def interval(self, *, seed: int) -> Interval:
        """Percentile bootstrap of the mean, whole clusters drawn with replacement (Davison and Hinkley 1997, section 3.8).

        A resample's mean is the sum of its values over the number of its values, so large clusters keep their weight.
        One cluster alone gives width 0: it says nothing about the spread between clusters.
        """
        if not self._sizes:
            return _EMPTY
        sums_C = np.array(list(self._sums.values()), dtype=np.float64)
        sizes_C = np.array(list(self._sizes.values()), dtype=np.float64)
        low, high = np.quantile(_resampled_means(sums_C, sizes_C, seed), BOUNDS)
        num_rows = sum(self._sizes.values())
        return Interval(math.fsum(self._sums.values()) / num_rows, float(low), float(high), num_rows)

    def share_interval(self, *, seed: int) -> Interval:
        """`interval` for 0/1 values; where all are equal, which no resample can vary, Wilson's with one observation per cluster."""
        interval = self.interval(seed=seed)
        if not self._sizes or 0 < interval.value < 1:
            return interval
        num_clusters = len(self._sizes)
        wilson = wilson_interval(num_clusters if interval.value else 0, num_clusters)
        return Interval(interval.value, wilson.low, wilson.high, interval.n)


def cluster_bootstrap_interval(values: Sequence[float], clusters: Sequence[Hashable], *, seed: int) -> Interval:
    """`ClusteredMean.interval` of values that are all at hand.

    Args:
        values: one number per observation.
        clusters: the trajectory or task of each observation, same length.
        seed: from `identity.derive_seed`.

    Raises:
        ValueError: where the lengths differ.
    """
    if len(values) != len(clusters):
        raise ValueError(f"{len(values)} values but {len(clusters)} cluster labels; each value needs one")
    mean = ClusteredMean()
    for value, cluster in zip(values, clusters, strict=True):
        mean.add(cluster, value)
    return mean.interval(seed=seed)


def paired_difference(before: Sequence[float], after: Sequence[float], clusters: Sequence[Hashable], *, seed: int) -> PairedDifference:
    """Difference of two policies scored on the same items, item by item: the items' own difficulty cancels.

    Raises:
        ValueError: where the lengths differ.
    """
    if len(before) != len(after):
        raise ValueError(f"{len(before)} scores before but {len(after)} after; a paired difference needs the same items")
    differences = [late - early for early, late in zip(before, after, strict=True)]
    wins, losses = sum(value > 0 for value in differences), sum(value < 0 for value in differences)
    return PairedDifference(cluster_bootstrap_interval(differences, clusters, seed=seed), wins, losses, _sign_test_p(wins, losses))


def _resampled_means(sums_C: npt.NDArray[np.float64], sizes_C: npt.NDArray[np.float64], seed: int) -> npt.NDArray[np.float64]:
    generator = np.random.Generator(np.random.PCG64(seed))
    num_clusters = len(sums_C)
    blocks: list[npt.NDArray[np.float64]] = []
    block_rows = max(1, _DRAWS_PER_BLOCK // num_clusters)
    for start in range(0, NUM_RESAMPLES, block_rows):
        drawn = generator.integers(0, num_clusters, size=(min(block_rows, NUM_RESAMPLES - start), num_clusters))
        blocks.append(sums_C[drawn].sum(axis=1) / sizes_C[drawn].sum(axis=1))
    return np.concatenate(blocks)


def _sign_test_p(wins: int, losses: int) -> float:
    n, extreme = wins + losses, min(wins, losses)
    if n == 0:
        return 1.0
    tail = sum(math.comb(n, k) for k in range(extreme + 1))
    return min(1.0, 2 * tail / 2**n)
