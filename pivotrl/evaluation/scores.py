"""From item scores to rows of scores.json: means with intervals, facets, paired differences. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pivotrl.evaluation.gains import Attempt, split_gain
from pivotrl.evaluation.suites import ItemScore
from pivotrl.identity import derive_seed
from pivotrl.pivots.statistics import ClusteredMean, Interval, paired_difference, wilson_interval


def suite_row(suite: str, checkpoint: str, items: Sequence[ItemScore], *, run_seed: int) -> dict[str, Any]:
    """One suite on one checkpoint: name, checkpoint, score, low, high, n, seeds, and `detail` with a score per facet."""
    facets = sorted({item.facet for item in items} - {""})
    detail = {facet: _interval_row(interval([item for item in items if item.facet == facet], run_seed=run_seed)) for facet in facets}
    row = {"name": suite, "checkpoint": checkpoint, **_interval_row(interval(items, run_seed=run_seed))}
    return {**row, "seeds": [run_seed], "num_turns": sum(item.num_turns for item in items), "detail": detail}


def interval(items: Sequence[ItemScore], *, run_seed: int) -> Interval:
    """Mean score: Wilson where every item is its own cluster and scores are 0 or 1, else a bootstrap over clusters.

    Where several items share a cluster and all scores are 0 or all 1, no resample varies: Wilson's over clusters then, never a width of zero.
    """
    values = [item.score for item in items]
    is_share = set(values) <= {0.0, 1.0}
    if is_share and len({item.cluster for item in items}) == len(items):
        return wilson_interval(round(sum(values)), len(values))
    mean = ClusteredMean()
    for item in items:
        mean.add(item.cluster, item.score)
    seed = derive_seed(run_seed, "eval", "interval")
    return mean.share_interval(seed=seed) if is_share else mean.interval(seed=seed)


def difference_row(suite: str, before: Sequence[ItemScore], after: Sequence[ItemScore], *, run_seed: int) -> dict[str, Any]:
    """after - before over the items both have, paired item by item and resampled by cluster; with wins, losses and the exact sign test."""
    earlier = {item.item: item for item in before}
    pairs = [(earlier[item.item], item) for item in after if item.item in earlier]
    found = paired_difference(
        [first.score for first, _ in pairs],
        [second.score for _, second in pairs],
        [second.cluster for _, second in pairs],
        seed=derive_seed(run_seed, "eval", "difference", suite),
    )
    numbers = found.difference.as_dict()
    row = {"name": suite, "difference": numbers["value"], "low": numbers["low"], "high": numbers["high"], "n": numbers["n"]}
    return {**row, "wins": found.wins, "losses": found.losses, "sign_test_p": found.sign_test_p}


def gain_row(suite: str, before: Sequence[ItemScore], after: Sequence[ItemScore], *, run_seed: int) -> dict[str, Any] | None:
    """`gains.split_gain` of a suite of single actions, JSON-ready; None where the checkpoints share no candidate."""
    earlier, later = ([Attempt(item.subject, item.cluster, item.score, item.is_well_formed) for item in items] for items in (before, after))
    gain = split_gain(earlier, later, seed=derive_seed(run_seed, "eval", "gain", suite))
    return None if gain is None else gain.as_dict()


def _interval_row(found: Interval) -> dict[str, Any]:
    numbers = found.as_dict()
    return {"score": numbers["value"], "low": numbers["low"], "high": numbers["high"], "n": numbers["n"]}
