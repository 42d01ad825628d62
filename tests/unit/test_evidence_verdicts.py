"""The rules of docs/evidence_protocol.md on numbers with known answers; joined changes, curves and quarters against brute force."""

from __future__ import annotations

import math
import random
from itertools import product
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from pivotrl.config.tables import TablesConfig
from pivotrl.evaluation.evidence.joined import Joined, joined_change, quarter_differences
from pivotrl.evaluation.evidence.verdicts import Verdict, forgets_less, holm, improves, is_ordered, keeps_signal, needs_fewer_turns
from pivotrl.evaluation.tables.curve_items import resampled_curves
from pivotrl.evaluation.tables.estimates import Resampling, TaskScore
from pivotrl.evaluation.tables.scores import main_tables
from pivotrl.evaluation.tables.sources import OWN, Results, Scores
from pivotrl.pivots.statistics import Interval

SHOWN, CONTRADICTED, NOT_DECIDED = Verdict.SHOWN, Verdict.CONTRADICTED, Verdict.NOT_DECIDED


def between(low: float, high: float, value: float | None = None) -> Interval:
    return Interval((low + high) / 2 if value is None else value, low, high, 100)


@pytest.mark.parametrize(
    ("interval", "verdict"),
    [
        (between(0.1, 5), SHOWN),
        (between(0.0, 5), NOT_DECIDED),
        (between(-3, 0.1), NOT_DECIDED),
        (between(-3, 0.0), NOT_DECIDED),
        (between(-3, -0.1), CONTRADICTED),
        (None, NOT_DECIDED),
    ],
)
def test_h1_looks_at_the_side_of_zero(interval: Interval | None, verdict: Verdict) -> None:
    assert improves(interval) is verdict


@pytest.mark.parametrize(
    ("sft", "pivotrl", "verdict"),
    [
        (between(-9, -1), between(-1, 1), SHOWN),
        (between(-9, -1), between(-1.1, 0.5), NOT_DECIDED),
        (between(-9, -1), between(-0.5, 1.1), NOT_DECIDED),
        (between(-9, 0), between(-0.5, 0.5), NOT_DECIDED),
        (between(0.1, 2), between(-0.5, 0.5), CONTRADICTED),
        (between(-9, -1), between(-5, -1.1), CONTRADICTED),
        (between(-9, -1), between(1.1, 3), CONTRADICTED),
        (None, between(-5, -2), NOT_DECIDED),
        (between(-9, -1), None, NOT_DECIDED),
    ],
)
def test_h2_needs_both_arms(sft: Interval | None, pivotrl: Interval | None, verdict: Verdict) -> None:
    assert forgets_less(sft, pivotrl) is verdict


@pytest.mark.parametrize(
    ("ratio", "verdict"),
    [
        (between(0.1, 0.9, 0.25), SHOWN),
        (between(0.2, 0.9, 0.26), NOT_DECIDED),
        (between(0.25, 0.9, 0.5), NOT_DECIDED),
        (between(0.26, 0.9, 0.5), CONTRADICTED),
        (None, NOT_DECIDED),
    ],
)
def test_h3_is_shown_by_the_point_and_contradicted_by_the_interval(ratio: Interval | None, verdict: Verdict) -> None:
    assert needs_fewer_turns(ratio) is verdict


@pytest.mark.parametrize(
    ("differences", "verdict"),
    [
        ((between(1, 2), between(1, 2)), SHOWN),
        ((between(1, 2), between(-1, 2)), NOT_DECIDED),
        ((between(1, 2), between(-3, -1)), CONTRADICTED),
        ((between(1, 2), None), NOT_DECIDED),
    ],
)
def test_h4_needs_both_steps(differences: tuple[Interval | None, ...], verdict: Verdict) -> None:
    assert is_ordered(differences) is verdict


@pytest.mark.parametrize(
    ("quarters", "verdict"),
    [
        ([0.1, 0.1, 0.1, 0.01], SHOWN),
        ([0.1, 0.1, 0.1, 0.0], NOT_DECIDED),
        ([0.1, -0.01, 0.1, 0.1], CONTRADICTED),
        ([0.1, 0.1], NOT_DECIDED),
        (None, NOT_DECIDED),
    ],
)
def test_h5_looks_at_every_quarter(quarters: list[float] | None, verdict: Verdict) -> None:
    assert keeps_signal(quarters) is verdict


def test_holm_by_hand() -> None:
    """0.005 x 4, 0.01 x 3, 0.03 x 2, and 0.04 x 1, which may not be below the one before; Bonferroni would give 0.16 for the last."""
    assert holm({"a": 0.01, "b": 0.04, "c": 0.03, "d": 0.005}) == pytest.approx({"a": 0.03, "b": 0.06, "c": 0.06, "d": 0.02})
    assert holm({"a": 0.6, "b": 0.7}) == {"a": 1.0, "b": 1.0}
    assert holm({}) == {}


def test_holm_rejects_as_its_procedure_does() -> None:
    """Stepping through the sorted p values until the first that is not below alpha / (m - i) rejects the same ones, for every alpha."""
    draw = random.Random(3)
    for _ in range(50):
        p_values = {str(i): draw.random() ** 3 for i in range(4)}
        alpha, rejected = draw.random() / 4, set[str]()
        for index, name in enumerate(sorted(p_values, key=p_values.__getitem__)):
            if p_values[name] > alpha / (4 - index):
                break
            rejected.add(name)
        assert {name for name, p in holm(p_values).items() if p <= alpha} == rejected


def _results(scores: dict[str, dict[str, dict[int, dict[str, float]]]]) -> Results:
    """Scores by arm, domain, seed and task, two attempts each, 4,000 resamples."""
    domains = sorted({domain for of in scores.values() for domain in of})
    spec = {
        "name": "x",
        "num_resamples": 4000,
        "pairs": "shared",
        "domains": [{"name": name, "title": name} for name in domains],
        "results": [{"type": "run", "arm": arm, "domains": domains, "seeds": [0], "path": arm} for arm in scores],
        "main": dict.fromkeys(("base", "sft", "pivotrl"), "before") | {"pivotrl": "after"},
    }
    found: dict[tuple[str, str, str | None], Scores] = {
        (arm, domain, OWN): Scores({seed: [TaskScore(t, t, "", m, 2) for t, m in tasks.items()] for seed, tasks in seeds.items()}, (f"{arm}.json",))
        for arm, of in scores.items()
        for domain, seeds in of.items()
    }
    return Results(TablesConfig.model_validate(spec), Path(), found, {})


def _made(rate: float, name: str, domains: tuple[str, ...] = ("one", "two"), seeds: int = 3, tasks: int = 5) -> dict:
    draw = random.Random(name)
    return {
        d: {s: {f"{d}{t}": (int(draw.random() < rate) + int(draw.random() < rate)) / 2 for t in range(tasks)} for s in range(seeds)} for d in domains
    }


def _known(joined: Joined | None) -> Joined:
    assert joined is not None
    return joined


def test_a_joined_change_has_the_interval_of_a_brute_force_bootstrap() -> None:
    """Seeds and tasks drawn one by one, domain by domain, and the two domains' means averaged."""
    before, after = _made(0.4, "early"), _made(0.7, "late")
    found = _known(joined_change(_results({"before": before, "after": after}), "before", "after", [("one", OWN), ("two", OWN)]))
    draw, means = random.Random(11), []
    for _ in range(4000):
        parts = []
        for domain, of in before.items():
            seeds = [draw.choice(list(of)) for _ in of]
            tasks = [draw.choice(list(of[0])) for _ in of[0]]
            parts.append(np.mean([after[domain][s][t] - of[s][t] for s in seeds for t in tasks]))
        means.append(np.mean(parts))
    interval = found.estimate.interval()
    expected = np.mean([[after[d][s][t] - m for s, tasks in of.items() for t, m in tasks.items()] for d, of in before.items()])
    assert interval.value == pytest.approx(expected)
    assert (interval.low, interval.high) == pytest.approx(tuple(np.quantile(means, [0.025, 0.975])), abs=0.03)
    assert (found.estimate.num_attempts, found.estimate.num_tasks, found.estimate.num_seeds) == (60, 10, 3)


def test_its_permutations_agree_with_scipys() -> None:
    """Ten clusters of equal weight over two domains, three seeds: exact in both."""
    before, after = _made(0.4, "early"), _made(0.7, "late")
    over_tasks, over_seeds = _known(
        joined_change(_results({"before": before, "after": after}), "before", "after", [("one", OWN), ("two", OWN)])
    ).estimate.tests
    by_task = np.array([sum(after[d][s][t] - before[d][s][t] for s in of) for d, of in before.items() for t in of[0]])
    by_seed = np.array([np.mean([after[d][s][t] - m for d, of in before.items() for t, m in of[s].items()]) for s in range(3)])
    for test, differences in ((over_tasks, by_task), (over_seeds, by_seed)):
        expected = stats.permutation_test((differences,), np.sum, permutation_type="samples", n_resamples=10**6, alternative="two-sided")
        assert test.p == pytest.approx(expected.pvalue), test.name
        assert test.n == len(differences)


def test_domains_weigh_the_same_and_seeds_are_shared() -> None:
    """Domain one: +1 on two tasks; two: 0 on four. Seed 9 of one arm has no partner and does not count."""
    before = {"one": {0: {"a": 0.0, "b": 0.0}}, "two": {0: dict.fromkeys("cdef", 0.5)}}
    after = {"one": {0: {"a": 1.0, "b": 1.0}, 9: {"a": 0.0, "b": 0.0}}, "two": {0: dict.fromkeys("cdef", 0.5)}}
    results = _results({"before": before, "after": after})
    assert _known(joined_change(results, "before", "after", [("one", OWN), ("two", OWN)])).estimate.value == 0.5
    assert joined_change(results, "before", "absent", [("one", OWN)]) is None


def test_the_joined_change_is_table_ones() -> None:
    results = _results({"before": _made(0.4, "early"), "after": _made(0.7, "late")})
    assert results.config.main is not None
    row = main_tables(results, results.config.main)[0].rows[-1]
    interval = _known(joined_change(results, "before", "after", [("one", OWN), ("two", OWN)])).estimate.interval()
    cell = row.cells[2]
    assert (cell.value, cell.low, cell.high) == pytest.approx((100 * interval.value, 100 * interval.low, 100 * interval.high))


def _points(curve: list[dict[str, float]]) -> list[list[dict[str, object]]]:
    return [[{"item": f"{task}#0", "cluster": task, "score": score} for task, score in point.items()] for point in curve]


def test_curves_draw_tasks_and_seeds_together_for_both_arms() -> None:
    """Two seeds of two tasks: 4 x 4 equally likely draws, enumerated; the difference of two arms is paired, so narrower than of separate draws."""
    first = [[{"a": 0.0, "b": 0.0}, {"a": 1.0, "b": 0.0}], [{"a": 0.0, "b": 1.0}, {"a": 1.0, "b": 1.0}]]
    second = [[{"a": 0.0, "b": 0.0}, {"a": 1.0, "b": 0.5}], [{"a": 0.0, "b": 1.0}, {"a": 1.0, "b": 1.0}]]
    (one, weights), (other, _) = resampled_curves([[_points(c) for c in first], [_points(c) for c in second]], Resampling(2, "s", "t", 20_000))
    draws = list(product(product((0, 1), repeat=2), product("ab", repeat=2)))
    end = np.array([np.mean([first[s][1][t] for s in seeds for t in tasks]) for seeds, tasks in draws])
    gap = np.array([np.mean([second[s][1][t] - first[s][1][t] for s in seeds for t in tasks]) for seeds, tasks in draws])
    assert one[:, 1].mean() == pytest.approx(end.mean(), abs=0.01)
    assert one[:, 1].std() == pytest.approx(end.std(), abs=0.01)
    assert (other - one)[:, 1].std() == pytest.approx(gap.std(), abs=0.01)
    assert weights.sum(axis=1) == pytest.approx(1)


def test_quarters_by_hand() -> None:
    """Eight steps, two per quarter; seed 7 has no partner; steps that one run lacks are left out of both."""
    steps = [float(step) for step in range(8)]
    pivots = {1: dict.fromkeys(steps, 0.5), 2: dict.fromkeys(steps, 0.3), 7: dict.fromkeys(steps, 9.0)}
    random_turns = {1: {step: 0.1 * (step // 2) for step in steps}, 2: dict.fromkeys(steps, 0.1)}
    found = quarter_differences(pivots, random_turns, Resampling(0, "std", "x", 1000))
    assert found is not None
    assert [one.value for one in found] == pytest.approx([0.35, 0.3, 0.25, 0.2])
    assert [(found[0].low, found[0].high), found[0].n] == [(pytest.approx(0.2), pytest.approx(0.5)), 4]
    assert quarter_differences(pivots, {5: {0.0: 0.1}}, Resampling(0, "std", "x")) is None
    assert quarter_differences({1: {0.0: 1.0, 1.0: 1.0}}, {1: {0.0: 1.0, 1.0: 1.0}}, Resampling(0, "std", "x")) is None
    assert not math.isnan(found[0].low)
