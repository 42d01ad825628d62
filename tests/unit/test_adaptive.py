"""Adaptive K against enumeration and brute force, on a simulated population, and in the profile stage."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from decimal import Decimal
from math import comb
from pathlib import Path

import numpy as np
import pytest
from fakes.profile_run import SETTINGS, run_stage, sometimes_right
from fakes.runs import trajectory, write_ingest
from hypothesis import given, settings
from hypothesis import strategies as st

from pivotrl.config.profiling import AdaptiveConfig, PassRatePriorConfig
from pivotrl.config.schema import Eq5Rule
from pivotrl.pivots.dataset import ProfileStore
from pivotrl.pivots.pass_rates import GRID_R, PassRates, decision_rates
from pivotrl.pivots.select import decision_of
from pivotrl.profiling.adaptive import StoppingRule, _Table, counts_of, stopping_rule
from pivotrl.rollouts.scripted import ScriptedEngine
from pivotrl.rundir import read_json

EQ5 = Eq5Rule(rule="eq5", lambda_diff=Decimal("0.6"))
KEEPS = decision_of(EQ5)


def play(rule: StoppingRule, rewards: tuple[int, ...]) -> int:
    """Samples drawn of a sequence."""
    samples = rule.min_samples
    while not rule.stops(samples, sum(rewards[:samples])):
        samples = min(samples + rule.round_samples, len(rewards))
    return samples


def enumerated(rule: StoppingRule, mass: list[float]) -> tuple[float, float]:
    """Expected samples and differing decisions over all orders of rewards, every order of as many successes equally likely."""
    k = len(mass) - 1
    mean = wrong = 0.0
    for rewards in itertools.product((0, 1), repeat=k):
        chance, samples = mass[sum(rewards)] / comb(k, sum(rewards)), play(rule, rewards)
        mean += chance * samples
        wrong += chance * (KEEPS(samples, sum(rewards[:samples])) != KEEPS(k, sum(rewards)))
    return mean, wrong


masses = st.lists(st.floats(0.01, 1), min_size=6, max_size=9).map(lambda raw: [one / sum(raw) for one in raw])


@settings(max_examples=25)
@given(masses, st.floats(1, 1e4), st.integers(1, 3), st.integers(1, 3))
def test_expectations_are_those_of_all_sequences(mass: list[float], price: float, least: int, size: int) -> None:
    rule = _Table(mass, AdaptiveConfig(risk=0.01, min_samples=least, round_samples=size), len(mass) - 1, KEEPS).rule(price)
    assert (rule.expected_samples, rule.expected_differing) == pytest.approx(enumerated(rule, mass))


def test_no_other_set_of_stops_is_cheaper() -> None:
    """All 512 stopping sets of K = 4."""
    mass, price = [0.3, 0.1, 0.05, 0.15, 0.4], 12.0
    rule = _Table(mass, AdaptiveConfig(risk=0.01, min_samples=1), 4, KEEPS).rule(price)
    states = [(samples, successes) for samples in (1, 2, 3) for successes in range(samples + 1)]
    costs = []
    for chosen in itertools.product((False, True), repeat=len(states)):
        mean, wrong = enumerated(replace(rule, stopped=frozenset(itertools.compress(states, chosen))), mass)
        costs.append(mean + price * wrong)
    assert rule.expected_samples + price * rule.expected_differing == pytest.approx(min(costs))
    assert rule.expected_samples < 4
    assert rule.expected_differing > 0


def test_more_risk_never_costs_more_samples_and_is_kept() -> None:
    rates = PassRates.given(PassRatePriorConfig(always_fails=0.1, always_succeeds=0.5, alpha=0.9, beta=0.9))
    rules = [stopping_rule(rates, AdaptiveConfig(risk=risk), 16, KEEPS) for risk in (0.001, 0.004, 0.01, 0.03)]
    assert all(rule.expected_differing <= risk for rule, risk in zip(rules, (0.001, 0.004, 0.01, 0.03), strict=True))
    saved = [rule.expected_samples for rule in rules]
    assert saved == sorted(saved, reverse=True)
    assert saved[0] < 16


@pytest.mark.parametrize(("name", "fails", "succeeds", "least_saved"), [("solved", 0.10, 0.565, 0.40), ("failed", 0.565, 0.10, 0.20)])
def test_a_population_of_71_percent_uninformative_turns(name: str, fails: float, succeeds: float, least_saved: float) -> None:
    """The bar of benchmarks/adaptive_profile.py in small: the prior comes from a pilot, not from the truth."""
    generator, k = random.Random(name), 16
    rows = []
    for _ in range(4000):
        draw = generator.random()
        rate = 0.0 if draw < fails else 1.0 if draw < fails + succeeds else generator.betavariate(0.9, 0.9)
        rows.append(tuple(int(generator.random() < rate) for _ in range(k)))
    assert sum(sum(row) in (0, k) for row in rows) / len(rows) == pytest.approx(0.71, abs=0.015)
    pilot, rest = rows[:512], rows[512:]
    rule = stopping_rule(PassRates.fitted(Counter((k, sum(row)) for row in pilot)), AdaptiveConfig(risk=0.007), k, KEEPS)
    stops = [play(rule, row) for row in rest]
    differing = sum(KEEPS(n, sum(row[:n])) != KEEPS(k, sum(row)) for n, row in zip(stops, rest, strict=True))
    assert differing / len(rows) <= 0.01
    assert 1 - (sum(stops) + k * len(pilot)) / (k * len(rows)) >= least_saved


def test_given_rates_have_the_beta_binomial_counts() -> None:
    uniform = PassRates.given(PassRatePriorConfig(always_fails=0.2, always_succeeds=0.3, alpha=1, beta=1)).successes(8)
    expected = np.full(9, 0.5 / 9)
    expected[0] += 0.2
    expected[-1] += 0.3
    assert uniform == pytest.approx(expected, abs=2e-3)


def test_fitted_rates_have_the_counts_they_were_fitted_to() -> None:
    truth = PassRates.given(PassRatePriorConfig(always_fails=0.3, always_succeeds=0.3, alpha=2, beta=3))
    counts = {(16, successes): round(1e6 * mass) for successes, mass in enumerate(truth.successes(16))}
    fitted = PassRates.fitted(counts)
    assert sum(fitted.weights) == pytest.approx(1)
    assert fitted.successes(16) == pytest.approx(truth.successes(16), abs=2e-3)
    # Half the samples, which the fit did not see: the distribution is of rates, not of counts.
    assert fitted.successes(8) == pytest.approx(truth.successes(8), abs=3e-3)


def test_decision_rates_are_those_of_the_known_truth() -> None:
    """Rates drawn from a known distribution, decisions at K = 16 compared with the rates themselves."""
    generator = random.Random(7)
    counts, wrong = Counter[tuple[int, int]](), {True: [0, 0], False: [0, 0]}
    worth: Callable[[float], bool] = lambda rate: 0.05 <= rate <= 0.95 and rate < 0.6  # noqa: E731
    for _ in range(20_000):
        rate = generator.choice([0.0, 1.0, generator.betavariate(1.5, 1.5)])
        successes = sum(generator.random() < rate for _ in range(16))
        counts[16, successes] += 1
        is_kept = KEEPS(16, successes)
        wrong[is_kept][0] += is_kept != worth(rate)
        wrong[is_kept][1] += 1
    rates = decision_rates(counts, KEEPS, worth, seed=1)
    assert rates.false_keep.value == pytest.approx(wrong[True][0] / wrong[True][1], abs=0.03)
    assert rates.false_drop.value == pytest.approx(wrong[False][0] / wrong[False][1], abs=0.02)
    assert rates.false_keep.low < rates.false_keep.value < rates.false_keep.high
    assert (rates.false_keep.n, rates.false_drop.n) == (wrong[True][1], wrong[False][1])
    assert GRID_R[0] == 0
    assert GRID_R[-1] == 1


PRIOR = PassRatePriorConfig(always_fails=0.3, always_succeeds=0.3, alpha=1, beta=1)


@pytest.mark.parametrize("prior", [PRIOR, None])
def test_adaptive_samples_are_the_first_of_the_fixed_ones(prior: PassRatePriorConfig | None, tmp_path: Path) -> None:
    fixed = replace(SETTINGS, profile=SETTINGS.profile.model_copy(update={"num_samples": 8}), select=EQ5)
    config = AdaptiveConfig(risk=0.1, min_samples=2, prior=prior, pilot_candidates=6)
    adaptive = replace(fixed, profile=fixed.profile.model_copy(update={"adaptive": config}))
    runs = {}
    for name, how, shard in (("fixed", fixed, None), ("adaptive", adaptive, None), ("sharded", adaptive, "1/2")):
        run = tmp_path / name
        write_ingest(run / "ingest", [trajectory(number, num_turns=4) for number in range(7)], held_out_frac=0.3)
        if shard is not None:
            run_stage(run, "profile", ScriptedEngine.from_function(sometimes_right), shard, how)
        run_stage(run, "profile", ScriptedEngine.from_function(sometimes_right), None, how)
        runs[name] = [one.profile for one in ProfileStore.open(run / "profile").iterate()]
    assert runs["sharded"] == runs["adaptive"]
    rollouts = [(tmp_path / name / "profile" / "rollouts.parquet").read_bytes() for name in ("adaptive", "sharded")]
    assert rollouts[0] == rollouts[1]
    for short, whole in zip(runs["adaptive"], runs["fixed"], strict=True):
        assert short.rewards_K == whole.rewards_K[: short.num_samples]
    rule = StoppingRule.of_dict(read_json(tmp_path / "adaptive" / "profile" / "adaptive.json"))
    num_pilot = 0 if prior else 8
    expected = [play(rule, tuple(map(int, whole.rewards_K))) for whole in runs["fixed"]]
    drawn = [one.num_samples for one in runs["adaptive"]]
    assert sum(a != b for a, b in zip(drawn, expected, strict=True)) <= num_pilot
    assert sum(drawn) < 8 * len(drawn)
    manifest = read_json(tmp_path / "adaptive" / "profile" / "manifest.json")
    assert set(manifest["outputs"]) == {"profiles.parquet", "rollouts.parquet", "adaptive.json"}
    means = [sum(one.rewards_K[:2]) / 2 for one in runs["fixed"]]
    assert manifest["summary"]["mean_reward"]["value"] == pytest.approx(sum(means) / len(means))


def test_graded_and_quarantined_rows_are_not_counted() -> None:
    rows = [([1.0, 0.0], None), ([1.0, 0.5], None), ([1.0], "infra"), ([], None)]
    assert counts_of({"rewards": rewards, "quarantine_reason": reason} for rewards, reason in rows) == {(2, 1): 1}
