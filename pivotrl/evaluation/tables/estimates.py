"""Estimates over tasks and seeds with their resamples, so that means and differences of estimates keep the right interval; paired tests.

Pure. An arm on a benchmark is one list of task scores per seed. Resampling is hierarchical: seeds are drawn with replacement, clusters of tasks are
drawn with replacement, and a task counts as often as its seed times as often as its cluster was drawn (Owen 2007, the pigeonhole bootstrap, for tasks
that all seeds share; the ordinary two-level bootstrap's cousin for tasks that only one seed has). Suffixes: S = seeds, C = clusters, R = resamples.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product
from typing import Any

import numpy as np
import numpy.typing as npt

from pivotrl.identity import derive_seed
from pivotrl.pivots.statistics import BOUNDS, NUM_RESAMPLES, Interval, paired_difference, wilson_interval

# Sign patterns enumerated exactly; above it they are drawn.
_MAX_EXACT_SIGNS = 12
_NUM_SIGN_DRAWS = 10_000

# Tables, figures and findings ask for the same comparisons; each answer is kept, at most 80 KB.
_REMEMBERED = 1024

type Draws = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class TaskScore:
    """One task under one seed: the mean of its attempts."""

    task: str
    """Unique in the benchmark; arms are paired by it."""
    cluster: str
    """What is resampled together: the task itself, or what several tasks share."""
    family: str
    """Airline, retail, telecom; a skill; or empty."""
    mean: float
    num_attempts: int


@dataclass(frozen=True, slots=True)
class Total:
    """What a file states where it lists no tasks."""

    value: float
    stderr: float | None
    """Standard error as the harness states it, or None."""
    n: int
    """Samples behind it; 0 where the file does not say."""


type Seeds = Mapping[int, Sequence[TaskScore] | Total]
"""An arm on one benchmark by seed."""


@dataclass(frozen=True, slots=True)
class Test:
    """A two-sided test that two arms do not differ."""

    name: str
    p: float
    n: int
    """Units whose sign was flipped, or discordant pairs."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """A number with its resamples; 95 % interval from their quantiles."""

    value: float
    draws_R: Draws | None
    """None where nothing is known about its spread."""
    num_attempts: int
    num_tasks: int
    num_seeds: int
    is_paired: bool = True
    """For a difference: task by task, rather than of two unrelated samples."""
    tests: tuple[Test, ...] = ()
    bounds: tuple[float, float] | None = None
    """An interval that replaces the resamples' (Wilson's, where no resample can vary)."""

    def interval(self) -> Interval:
        """With n = attempts; bounds are NaN where nothing is known about the spread."""
        low, high = self.bounds if self.bounds is not None else (math.nan, math.nan)
        if self.bounds is None and self.draws_R is not None:
            low, high = np.nanquantile(self.draws_R, BOUNDS)
        return Interval(self.value, float(low), float(high), self.num_attempts)


@dataclass(frozen=True, slots=True)
class Resampling:
    """Where the draws of one benchmark come from: equal keys give equal draws, so that what is shared is drawn once."""

    seed: int
    seeds_key: str
    """The runs that are drawn, for example a domain."""
    tasks_key: str
    """The tasks that are drawn, for example a benchmark."""
    num_resamples: int = NUM_RESAMPLES

    def generator(self, *place: str) -> np.random.Generator:
        """A stream of its own for one place below both keys."""
        return np.random.Generator(np.random.PCG64(derive_seed(self.seed, "tables", *place)))


def score(seeds: Seeds, resampling: Resampling) -> Estimate | None:
    """Mean over tasks (each the mean of its attempts) and seeds; None where there is no result.

    Where every score is 0, or every one 1, no resample varies: Wilson's interval then, one observation per cluster of tasks. So too where one
    seed tried every task once with 0 or 1 and no two tasks share a cluster, as the eval stage does.
    """
    rows = [(seed, one) for seed, tasks in seeds.items() if not isinstance(tasks, Total) for one in tasks]
    if not rows:
        return _total(seeds, resampling)
    clusters = {one.cluster for _, one in rows}
    value = math.fsum(one.mean for _, one in rows) / len(rows)
    draws_R = _hierarchical_means(tuple((seed, one.cluster, one.mean) for seed, one in rows), resampling)
    is_share = len(clusters) == len(rows) and all(one.mean in (0.0, 1.0) and one.num_attempts == 1 for _, one in rows)
    bounds = None
    if value in (0.0, 1.0) or (is_share and len(seeds) == 1):
        wilson = wilson_interval(round(value * len(clusters)), len(clusters))
        bounds = (wilson.low, wilson.high)
    return Estimate(value, draws_R, sum(one.num_attempts for _, one in rows), len({one.task for _, one in rows}), len(seeds), bounds=bounds)


def change(before: Seeds, after: Seeds, resampling: Resampling) -> Estimate | None:
    """after - before: task by task within each seed where both have the same seeds; else against the mean of `before` over its seeds.

    Where they share no task, or a file lists none, the two are compared as unrelated samples. None where either is missing.
    """
    pairs = paired_rows(before, after)
    if not pairs:
        return _unpaired(before, after, resampling)
    rows = tuple((seed, late.cluster, late.mean - early) for seed, early, late in pairs)
    value = math.fsum(row[2] for row in rows) / len(rows)
    tests = _tests(pairs, before, after, resampling)
    num_attempts = sum(late.num_attempts for _, _, late in pairs)
    tasks = {late.task for _, _, late in pairs}
    return Estimate(value, _hierarchical_means(rows, resampling), num_attempts, len(tasks), len({seed for seed, _, _ in pairs}), tests=tests)


def on_shared_seeds(before: Seeds, after: Seeds) -> tuple[Seeds, Seeds]:
    """Both arms on the seeds that both have."""
    return {seed: before[seed] for seed in before if seed in after}, {seed: after[seed] for seed in after if seed in before}


def mean_of(parts: Sequence[Estimate | None]) -> Estimate | None:
    """The unweighted mean of several estimates, their resamples joined draw by draw; None where a part is missing.

    Tests are not joined: a mean has its interval. Where no part can vary (every score 0, or every one 1), its bounds are the mean of theirs.
    """
    known = [part for part in parts if part is not None]
    if not known or len(known) != len(parts):
        return None
    draws = [part.draws_R for part in known if part.draws_R is not None]
    joined = np.mean(draws, axis=0) if len(draws) == len(known) else None
    replaced = [part.bounds for part in known if part.bounds is not None and (len(known) == 1 or part.value in (0.0, 1.0))]
    bounds = None
    if len(replaced) == len(known):
        bounds = (math.fsum(low for low, _ in replaced) / len(known), math.fsum(high for _, high in replaced) / len(known))
    return Estimate(
        math.fsum(part.value for part in known) / len(known),
        joined,
        sum(part.num_attempts for part in known),
        sum(part.num_tasks for part in known),
        min(part.num_seeds for part in known),
        is_paired=all(part.is_paired for part in known),
        bounds=bounds,
    )


def sign_flip_p(differences: Sequence[float], *, generator: np.random.Generator) -> float:
    """Two-sided paired permutation test of a mean of differences: each sign is as likely as the other where the arms do not differ.

    Exact for up to 12 differences, else from 10,000 drawn patterns with the observed one counted in, so that p is never 0.

    >>> sign_flip_p([1.0, 1.0, 1.0], generator=np.random.default_rng(0))
    0.25
    """
    nonzero = np.array([value for value in differences if value != 0], dtype=np.float64)
    if not len(nonzero):
        return 1.0
    # Sums of equal terms in another order may differ in the last bit.
    observed = abs(nonzero.sum()) * (1 - 1e-12)
    if len(nonzero) <= _MAX_EXACT_SIGNS:
        signs = np.array(list(product((1.0, -1.0), repeat=len(nonzero))))
        return float(np.mean(np.abs(signs @ nonzero) >= observed))
    signs = generator.choice(np.array([-1.0, 1.0]), size=(_NUM_SIGN_DRAWS, len(nonzero)))
    return float((1 + np.sum(np.abs(signs @ nonzero) >= observed)) / (1 + _NUM_SIGN_DRAWS))


@lru_cache(maxsize=_REMEMBERED)
def flipped_p(differences: tuple[float, ...], resampling: Resampling, *place: str) -> float:
    """`sign_flip_p` with the signs of one place."""
    return sign_flip_p(differences, generator=resampling.generator(*place))


@lru_cache(maxsize=_REMEMBERED)
def _hierarchical_means(rows: tuple[tuple[int, str, float], ...], resampling: Resampling) -> Draws:
    """Resampled means of (seed, cluster, value) rows; NaN where a resample drew no row. Not to be changed by the caller."""
    seeds, clusters = sorted({seed for seed, _, _ in rows}), sorted({cluster for _, cluster, _ in rows})
    place_s, place_c = {seed: i for i, seed in enumerate(seeds)}, {cluster: i for i, cluster in enumerate(clusters)}
    sums_S_C, sizes_S_C = np.zeros((len(seeds), len(clusters))), np.zeros((len(seeds), len(clusters)))
    for seed, cluster, value in rows:
        sums_S_C[place_s[seed], place_c[cluster]] += value
        sizes_S_C[place_s[seed], place_c[cluster]] += 1
    drawn_R_S, drawn_R_C = drawn_seeds(resampling, len(seeds)), drawn_tasks(resampling, len(clusters))
    sums_R, sizes_R = ((drawn_R_S * (drawn_R_C @ of_S_C.T)).sum(axis=1) for of_S_C in (sums_S_C, sizes_S_C))
    with np.errstate(invalid="ignore"):
        means_R = sums_R / sizes_R
    means_R.flags.writeable = False
    return means_R


def drawn_seeds(resampling: Resampling, size: int) -> Draws:
    """How often each of `size` seeds was drawn in `size` draws with replacement, [R, S]."""
    return _drawn(resampling.seed, ("seeds", resampling.seeds_key), size, resampling.num_resamples).astype(np.float64)


def drawn_tasks(resampling: Resampling, size: int) -> Draws:
    """How often each of `size` clusters of tasks was drawn in `size` draws with replacement, [R, C]."""
    return _drawn(resampling.seed, ("tasks", resampling.tasks_key), size, resampling.num_resamples).astype(np.float64)


# Arms and domains share the draws of a benchmark: kept small and drawn once.
@lru_cache(maxsize=64)
def _drawn(seed: int, place: tuple[str, str], size: int, num_resamples: int) -> npt.NDArray[Any]:
    generator = np.random.Generator(np.random.PCG64(derive_seed(seed, "tables", *place)))
    drawn = generator.multinomial(size, np.full(size, 1 / size), size=num_resamples)
    # A byte each, but for a cluster drawn more than 255 times.
    return drawn.astype(np.min_scalar_type(drawn.max()))


def paired_rows(before: Seeds, after: Seeds) -> list[tuple[int, float, TaskScore]]:
    """(seed, mean before, task after) of the tasks both have."""
    if any(isinstance(tasks, Total) for tasks in (*before.values(), *after.values())):
        return []
    by_seed = {seed: {one.task: one.mean for one in tasks} for seed, tasks in before.items() if not isinstance(tasks, Total)}
    if set(before) != set(after):
        means: dict[str, list[float]] = {}
        for tasks in by_seed.values():
            for task, mean in tasks.items():
                means.setdefault(task, []).append(mean)
        over_seeds = {task: math.fsum(values) / len(values) for task, values in means.items()}
        by_seed = dict.fromkeys(after, over_seeds)
    return [
        (seed, by_seed[seed][one.task], one)
        for seed, tasks in after.items()
        if not isinstance(tasks, Total)
        for one in tasks
        if one.task in by_seed[seed]
    ]


def _tests(pairs: Sequence[tuple[int, float, TaskScore]], before: Seeds, after: Seeds, resampling: Resampling) -> tuple[Test, ...]:
    """McNemar's where one checkpoint of each arm tried every task once, else a permutation over clusters, and over seeds where there are several."""
    by_cluster: dict[str, list[float]] = {}
    by_seed: dict[int, list[float]] = {}
    for seed, early, late in pairs:
        by_cluster.setdefault(late.cluster, []).append(late.mean - early)
        by_seed.setdefault(seed, []).append(late.mean - early)
    is_binary = all(early in (0.0, 1.0) and late.mean in (0.0, 1.0) for _, early, late in pairs)
    if is_binary and len(before) == len(after) == 1 and len(by_cluster) == len(pairs):
        exact = paired_difference([early for _, early, _ in pairs], [late.mean for _, _, late in pairs], [late.task for _, _, late in pairs], seed=0)
        return (Test("McNemar, exact", exact.sign_test_p, exact.wins + exact.losses),)
    sums = tuple(math.fsum(values) for values in by_cluster.values())
    found = [Test("permutation over tasks", flipped_p(sums, resampling, "signs", resampling.tasks_key), len(sums))]
    if len(by_seed) > 1 and set(before) == set(after):
        means = tuple(math.fsum(values) / len(values) for values in by_seed.values())
        found.append(Test("permutation over seeds", flipped_p(means, resampling, "signs", resampling.seeds_key), len(means)))
    return tuple(found)


def _total(seeds: Seeds, resampling: Resampling) -> Estimate | None:
    """The mean of stated totals over seeds: seeds are drawn, and each total varies normally by its standard error."""
    totals = [total for total in seeds.values() if isinstance(total, Total)]
    if not totals:
        return None
    errors = [_stderr(total) for total in totals]
    draws_R = None
    if all(error is not None for error in errors):
        noise_R_S = resampling.generator("totals", resampling.seeds_key, resampling.tasks_key).standard_normal(
            (resampling.num_resamples, len(totals))
        )
        values_R_S = np.array([total.value for total in totals]) + noise_R_S * np.array(errors, dtype=np.float64)
        drawn_R_S = drawn_seeds(resampling, len(totals))
        draws_R = (drawn_R_S * values_R_S).sum(axis=1) / len(totals)
    n = sum(total.n for total in totals)
    return Estimate(math.fsum(total.value for total in totals) / len(totals), draws_R, n, max(total.n for total in totals), len(totals))


def _stderr(total: Total) -> float | None:
    """As stated, else that of a share of n samples."""
    if total.stderr is not None:
        return total.stderr
    return math.sqrt(total.value * (1 - total.value) / total.n) if total.n and 0 <= total.value <= 1 else None


def _unpaired(before: Seeds, after: Seeds, resampling: Resampling) -> Estimate | None:
    """Difference of two unrelated samples, each drawn by itself."""
    apart = lambda side: replace(resampling, seeds_key=f"{resampling.seeds_key} {side}", tasks_key=f"{resampling.tasks_key} {side}")  # noqa: E731
    first, second = score(before, apart("before")), score(after, apart("after"))
    if first is None or second is None:
        return None
    draws_R = None if first.draws_R is None or second.draws_R is None else second.draws_R - first.draws_R
    return Estimate(second.value - first.value, draws_R, second.num_attempts, second.num_tasks, second.num_seeds, is_paired=False)
