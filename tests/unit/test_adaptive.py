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
from pivotrl.errors import UserError
from pivotrl.pivots.dataset import ProfileStore
from pivotrl.pivots.pass_rates import GRID_R, PassRates, decision_rates
from pivotrl.pivots.select import decision_of
from pivotrl.profiling.adaptive import (
    Belief,
    StageSize,
    StoppingRule,
    counts_of,
    differing_estimate,
    read_rule,
    rule_for,
    stopping_rule,
    write_rule,
)
from pivotrl.profiling.stopping import Looks, StoppingProblem
from pivotrl.rollouts.scripted import ScriptedEngine
from pivotrl.rundir import read_json, write_json

EQ5 = Eq5Rule(rule="eq5", lambda_diff=Decimal("0.6"))
KEEPS = decision_of(EQ5)


def play(rule: StoppingRule, rewards: tuple[int, ...]) -> int:
    """Samples drawn of a sequence."""
    samples = rule.min_samples
    while not rule.stops(samples, sum(rewards[:samples])):
        samples = min(samples + rule.round_samples, len(rewards))
    return samples


def enumerated(states: frozenset[tuple[int, int]], looks: Looks, mass: list[float]) -> tuple[float, float]:
    """Expected samples and differing decisions over all orders of rewards, every order of as many successes equally likely."""
    k, mean, wrong = looks.num_samples, 0.0, 0.0
    rule = StoppingRule(k, looks.min_samples, looks.round_samples, states, 0.0, 0.0, 0.0)
    for rewards in itertools.product((0, 1), repeat=k):
        chance, samples = mass[sum(rewards)] / comb(k, sum(rewards)), play(rule, rewards)
        mean += chance * samples
        wrong += chance * (KEEPS(samples, sum(rewards[:samples])) != KEEPS(k, sum(rewards)))
    return mean, wrong


masses = st.lists(st.floats(0.01, 1), min_size=6, max_size=9).map(lambda raw: [one / sum(raw) for one in raw])


@settings(max_examples=25)
@given(masses, st.floats(0, 1), st.integers(1, 3), st.integers(1, 3))
def test_expectations_are_those_of_all_sequences(mass: list[float], where: float, least: int, size: int) -> None:
    looks = Looks(len(mass) - 1, least, size)
    rules = list(StoppingProblem(np.array(mass), looks, KEEPS).rules())
    stops = rules[round(where * (len(rules) - 1))]
    expected = enumerated(stops.states, looks, mass)
    assert (mass @ stops.samples_S, mass @ stops.differing_S) == pytest.approx(expected)
    assert all(samples in looks for samples, _ in stops.states)


@pytest.mark.parametrize("price", [5.0, 12.0, 40.0])
def test_no_other_set_of_stops_is_cheaper(price: float) -> None:
    """All 512 stopping sets of K = 4."""
    mass, looks = [0.3, 0.1, 0.05, 0.15, 0.4], Looks(4, 1, 1)
    costs = [(float(mass @ one.samples_S), float(mass @ one.differing_S)) for one in StoppingProblem(np.array(mass), looks, KEEPS).rules()]
    states = [(samples, successes) for samples in (1, 2, 3) for successes in range(samples + 1)]
    others = [
        enumerated(frozenset(itertools.compress(states, chosen)), looks, mass) for chosen in itertools.product((False, True), repeat=len(states))
    ]
    assert min(mean + price * wrong for mean, wrong in costs) == pytest.approx(min(mean + price * wrong for mean, wrong in others))
    assert costs[-1][1] == 0
    assert costs[-1][0] < 4


def test_more_risk_never_costs_more_samples_and_is_kept() -> None:
    belief = Belief.given(PassRatePriorConfig(always_fails=0.1, always_succeeds=0.5, alpha=0.9, beta=0.9), 16)
    risks = (0.001, 0.004, 0.01, 0.03)
    rules = [stopping_rule(belief, AdaptiveConfig(risk=risk), 16, KEEPS, StageSize(0, 5000), seed=3) for risk in risks]
    assert all(rule.expected_differing < rule.differing_bound <= risk for rule, risk in zip(rules, risks, strict=True))
    saved = [rule.expected_samples for rule in rules]
    assert saved == sorted(saved, reverse=True)
    assert saved[0] < 16


def test_the_bound_of_a_known_distribution_is_that_of_the_binomial_one() -> None:
    """300 candidates beside a pilot of 100: the least number that 97.5 % of the binomial distribution's mass does not exceed, over all 400."""
    belief = Belief.given(PassRatePriorConfig(always_fails=0.1, always_succeeds=0.5, alpha=0.9, beta=0.9), 16)
    rule = stopping_rule(belief, AdaptiveConfig(risk=0.02), 16, KEEPS, StageSize(100, 300), seed=3)
    chance = rule.expected_differing * 400 / 300
    mass = [comb(300, number) * chance**number * (1 - chance) ** (300 - number) for number in range(301)]
    exact = next(number for number in range(301) if sum(mass[: number + 1]) >= 0.975)
    assert 3 <= exact <= 8
    assert rule.differing_bound * 400 == pytest.approx(exact, abs=1)


def test_a_pilot_says_the_more_the_larger_it_is() -> None:
    """The posterior against the moments of the Dirichlet distribution; with the same shares a small pilot allows less."""
    shares, config, size = {0: 20, 5: 2, 9: 2, 12: 2, 15: 4, 16: 70}, AdaptiveConfig(risk=0.01), StageSize(100, 10_000)
    for factor in (1, 30):
        counts = {(16, s): number * factor for s, number in shares.items()}
        belief = Belief.of_pilot(counts, 16, seed=5)
        assert belief.mean_S.sum() == pytest.approx(1)
        # The least that a uniform share of 2 % of 20 candidates leaves for what was never seen.
        assert belief.mean_S.min() >= 20 * 0.02 / 17 / (100 * factor + 20)
        assert belief.draws_D_S.mean(axis=0) == pytest.approx(belief.mean_S, abs=0.004)
        spread = np.sqrt(belief.mean_S[16] * (1 - belief.mean_S[16]) / (100 * factor + 20 + 1))
        assert belief.draws_D_S[:, 16].std() == pytest.approx(spread, rel=0.05)
    counts = {(16, s): number for s, number in shares.items()}
    mean_S = Belief.of_pilot(counts, 16, seed=5).mean_S
    certain = stopping_rule(Belief(mean_S, np.broadcast_to(mean_S, (2000, 17))), config, 16, KEEPS, size, seed=5)
    careful = rule_for(AdaptiveConfig(risk=certain.differing_bound), 16, KEEPS, counts, size, seed=5)
    assert careful.expected_samples > certain.expected_samples
    assert careful.expected_differing < certain.expected_differing


def population(fails: float, succeeds: float, size: int, seed: int) -> list[tuple[int, ...]]:
    """16 rewards of each candidate, 71 % of them equal."""
    generator = random.Random(seed)
    rows = []
    for _ in range(size):
        draw = generator.random()
        rate = 0.0 if draw < fails else 1.0 if draw < fails + succeeds else generator.betavariate(0.9, 0.9)
        rows.append(tuple(int(generator.random() < rate) for _ in range(16)))
    return rows


@pytest.mark.parametrize(("fails", "succeeds", "least_saved"), [(0.10, 0.565, 0.40), (0.565, 0.10, 0.20)])
def test_the_risk_is_kept_by_populations_of_71_percent_uninformative_turns(fails: float, succeeds: float, least_saved: float) -> None:
    """The bar of benchmarks/adaptive_profile.py in small: 1 % otherwise for 95 % of stages, the rule made of a pilot, the pilot counted."""
    shares, saved = [], []
    for seed in range(8):
        rows = population(fails, succeeds, 2000, seed)
        pilot, rest = rows[:500], rows[500:]
        rule = rule_for(AdaptiveConfig(risk=0.01), 16, KEEPS, Counter((16, sum(row)) for row in pilot), StageSize(500, 1500), seed=seed)
        stops = [play(rule, row) for row in rest]
        shares.append(sum(KEEPS(n, sum(row[:n])) != KEEPS(16, sum(row)) for n, row in zip(stops, rest, strict=True)) / len(rows))
        saved.append(1 - (sum(stops) + 16 * len(pilot)) / (16 * len(rows)))
    assert sum(share <= 0.01 for share in shares) >= 7
    assert sum(shares) / len(shares) >= 0.002
    assert sum(saved) / len(saved) >= least_saved


def test_the_share_is_estimated_from_where_the_candidates_ended() -> None:
    rows = population(0.10, 0.565, 8000, 1)
    belief = Belief.given(PassRatePriorConfig(always_fails=0.1, always_succeeds=0.5, alpha=0.9, beta=0.9), 16)
    rule = stopping_rule(belief, AdaptiveConfig(risk=0.05), 16, KEEPS, StageSize(0, 8000), seed=3)
    ends = [(play(rule, row), row) for row in rows]
    differing = sum(KEEPS(n, sum(row[:n])) != KEEPS(16, sum(row)) for n, row in ends) / len(rows)
    assert differing > 0.02
    assert differing_estimate(rule, KEEPS, Counter((n, sum(row[:n])) for n, row in ends)) == pytest.approx(differing, abs=0.006)


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
            # As if the worker had been killed after the pilot: another one writes the same rule.
            (run / "profile" / "adaptive.json").unlink()
        run_stage(run, "profile", ScriptedEngine.from_function(sometimes_right), None, how)
        runs[name] = [one.profile for one in ProfileStore.open(run / "profile").iterate()]
    assert runs["sharded"] == runs["adaptive"]
    rollouts = [(tmp_path / name / "profile" / "rollouts.parquet").read_bytes() for name in ("adaptive", "sharded")]
    assert rollouts[0] == rollouts[1]
    rule_files = [(tmp_path / name / "profile" / "adaptive.json").read_bytes() for name in ("adaptive", "sharded")]
    assert rule_files[0] == rule_files[1]
    for short, whole in zip(runs["adaptive"], runs["fixed"], strict=True):
        assert short.rewards_K == whole.rewards_K[: short.num_samples]
    rule = read_rule(tmp_path / "adaptive" / "profile")
    num_pilot = 0 if prior else 8
    expected = [play(rule, tuple(map(int, whole.rewards_K))) for whole in runs["fixed"]]
    drawn = [one.num_samples for one in runs["adaptive"]]
    assert sum(a != b for a, b in zip(drawn, expected, strict=True)) <= num_pilot
    assert sum(drawn) < 8 * len(drawn)
    manifest = read_json(tmp_path / "adaptive" / "profile" / "manifest.json")
    assert set(manifest["outputs"]) == {"profiles.parquet", "rollouts.parquet", "adaptive.json"}
    figures = manifest["summary"]["adaptive"]
    assert (figures["risk"], figures["confidence"]) == (0.1, 0.95)
    assert figures["expected_differing_frac"] <= figures["differing_frac_bound"] <= 0.1
    ended = Counter((one.num_samples, one.successes) for one in runs["adaptive"])
    assert figures["estimated_differing_frac"] == pytest.approx(differing_estimate(rule, KEEPS, ended))
    means = [sum(one.rewards_K[:2]) / 2 for one in runs["fixed"]]
    assert manifest["summary"]["mean_reward"]["value"] == pytest.approx(sum(means) / len(means))


def test_graded_and_quarantined_rows_are_not_counted() -> None:
    rows = [([1.0, 0.0], None), ([1.0, 0.5], None), ([1.0], "infra"), ([], None)]
    assert counts_of({"rewards": rewards, "quarantine_reason": reason} for rewards, reason in rows) == {(2, 1): 1}


@pytest.mark.parametrize(
    ("key", "value", "named"),
    [
        ("num_samples", "16", "num_samples is '16'"),
        ("stopped", [[2, "2"]], "stopped.0.1 is '2'"),
        ("stopped", [[2, 2], [3]], r"stopped.1 is \[3\]"),
        ("stopped", [[2, 3]], r"stopped.0 is \[2, 3\]"),
        ("stopped", [[4, 1]], r"stopped.0 is \[4, 1\]"),
        ("differing_frac_bound", None, "differing_frac_bound is 'None'"),
        ("expected_samples", ..., "expected_samples is missing"),
    ],
)
def test_a_rule_of_another_shape_is_refused_by_file_and_key(key: str, value: object, named: str, tmp_path: Path) -> None:
    rule = StoppingRule(4, 2, 1, frozenset({(2, 2), (3, 0)}), 3.5, 0.01, 0.02)
    path = tmp_path / "adaptive.json"
    write_rule(path, rule, {(4, 4): 3})
    assert read_rule(tmp_path) == rule
    content = {**read_json(path), key: value}
    write_json(path, {name: one for name, one in content.items() if one is not ...})
    with pytest.raises(UserError, match=f"adaptive.json: {named}"):
        read_rule(tmp_path)
