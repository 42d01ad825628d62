"""Changes between two arms over several domains or benchmarks with their tests, and differences of reward std by quarter of the steps.

Pure: `Results` in. Means over domains join the domains' resamples; a permutation flips a cluster of tasks in all parts that hold it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from pivotrl.evaluation.evidence.verdicts import NUM_QUARTERS
from pivotrl.evaluation.tables.estimates import Estimate, Resampling, Test, change, drawn_seeds, flipped_p, mean_of, on_shared_seeds, paired_rows
from pivotrl.evaluation.tables.scores import draws_of
from pivotrl.evaluation.tables.sources import Results
from pivotrl.pivots.statistics import BOUNDS, Interval

type Part = tuple[str, str | None]
"""(domain, benchmark); benchmark None is the domain's own."""


@dataclass(frozen=True, slots=True)
class Joined:
    """The mean of the parts' changes, with tests of that mean."""

    estimate: Estimate
    sources: tuple[str, ...]


def joined_change(results: Results, before: str, after: str, parts: Sequence[Part]) -> Joined | None:
    """after - before, every part the same weight, paired by task within the seeds that both have; None where a part is missing."""
    found: list[Estimate | None] = []
    by_cluster: dict[tuple[str, str], float] = {}
    by_seed: list[Mapping[int, float]] = []
    sources: list[str] = []
    for domain, benchmark in parts:
        sides = results.of(before, domain, benchmark), results.of(after, domain, benchmark)
        early, late = on_shared_seeds(sides[0].seeds, sides[1].seeds)
        resampling = draws_of(results, domain, benchmark)
        found.append(change(early, late, resampling))
        rows = [(seed, task.cluster, task.mean - first) for seed, first, task in paired_rows(early, late)]
        weight = 1 / (len(parts) * max(len(rows), 1))
        seeds: dict[int, list[float]] = {}
        for seed, cluster, value in rows:
            place = (resampling.tasks_key, cluster)
            by_cluster[place] = by_cluster.get(place, 0.0) + weight * value
            seeds.setdefault(seed, []).append(value)
        by_seed.append({seed: math.fsum(values) / len(values) for seed, values in seeds.items()})
        sources += [file for side in sides for file in side.files]
    mean = mean_of(found)
    if mean is None:
        return None
    place = Resampling(results.config.seed, before, after)
    return Joined(replace(mean, tests=_tests(by_cluster, by_seed, place)), tuple(dict.fromkeys(sources)))


def _tests(by_cluster: Mapping[tuple[str, str], float], by_seed: Sequence[Mapping[int, float]], place: Resampling) -> tuple[Test, ...]:
    sums = tuple(by_cluster[key] for key in sorted(by_cluster))
    tests = [Test("permutation over tasks", flipped_p(sums, place, "signs", place.seeds_key, place.tasks_key), len(sums))]
    seeds = sorted(by_seed[0])
    if len(seeds) > 1 and all(set(part) == set(seeds) for part in by_seed):
        means = tuple(math.fsum(part[seed] for part in by_seed) / len(by_seed) for seed in seeds)
        tests.append(Test("permutation over seeds", flipped_p(means, place, "seed signs", place.seeds_key, place.tasks_key), len(means)))
    return tuple(tests)


def quarter_differences(
    pivots: Mapping[int, Mapping[float, float]], random: Mapping[int, Mapping[float, float]], resampling: Resampling
) -> list[Interval] | None:
    """Mean over each quarter of the steps of reward std, pivots minus random turns, on the seeds and steps that both have.

    Intervals draw seeds. None where the arms share no seed or fewer steps than quarters.

    Args:
        pivots: std by step, by seed.
        random: the same of the other arm.
    """
    seeds = sorted(pivots.keys() & random.keys())
    steps = sorted(set.intersection(*(set(pivots[seed]) & set(random[seed]) for seed in seeds))) if seeds else []
    if len(steps) < NUM_QUARTERS:
        return None
    difference_S_T = np.array([[pivots[seed][step] - random[seed][step] for step in steps] for seed in seeds])
    drawn_R_S = drawn_seeds(resampling, len(seeds)) / len(seeds)
    found: list[Interval] = []
    for part in np.array_split(np.arange(len(steps)), NUM_QUARTERS):
        means_S = difference_S_T[:, part].mean(axis=1)
        low, high = np.quantile(drawn_R_S @ means_S, BOUNDS)
        found.append(Interval(float(means_S.mean()), float(low), float(high), len(seeds) * len(part)))
    return found
