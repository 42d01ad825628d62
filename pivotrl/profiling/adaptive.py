"""Adaptive K: after which counts a candidate's sampling may stop, so that select seldom decides otherwise than after all K samples.

The rule with the fewest expected samples among those that, with 95 % confidence, decide at most the recipe's `risk` of the
candidates otherwise: confidence over what a pilot leaves open about the pass rates, and over chance in the candidates still to
come. The math is in docs/profiling.md. Pure but for the one file that keeps the rule for all workers; called by profile.py
and estimate.py. Suffixes: S = successes of all K samples, 0 to K; D = draws of what is believed.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from pivotrl.artifacts import RuleFile, read_artifact
from pivotrl.config.profiling import AdaptiveConfig, PassRatePriorConfig
from pivotrl.errors import UserError
from pivotrl.identity import derive_seed
from pivotrl.pivots.pass_rates import Counts, Floats, PassRates
from pivotrl.pivots.select import Decision
from pivotrl.profiling.stopping import Looks, StoppingProblem, Stops
from pivotrl.rundir import write_json

ADAPTIVE = "adaptive.json"
RISK_CONFIDENCE = 0.95
"""Confidence, one-sided, that no more than `risk` of the candidates are decided otherwise."""
# Before the pilot speaks, the fitted distribution weighs as much as so many candidates, this share of it uniform over 0 to K
# successes: what the pilot did not show is unlikely, not impossible. Chosen on the populations of benchmarks/adaptive_profile.py.
_PRIOR_CANDIDATES = 20.0
_UNIFORM_SHARE = 0.02
_NUM_DRAWS = 2000
# Above the confidence that is promised, because a rule is judged by the pilot that it was chosen by: at 0.95 about 93 % of simulated stages keep
# the risk.
_JUDGED_QUANTILE = 0.975


@dataclass(frozen=True, slots=True)
class StoppingRule:
    """Where to stop, and what that is expected to cost and to change.

    >>> rule = StoppingRule(4, 2, 1, frozenset({(2, 2), (3, 3)}), 3.1, 0.01, 0.02)
    >>> rule.stops(2, 2), rule.stops(2, 1), rule.stops(4, 1)
    (True, False, True)
    """

    num_samples: int
    """K."""
    min_samples: int
    round_samples: int
    stopped: frozenset[tuple[int, int]]
    """(samples, successes) below K after which sampling stops."""
    expected_samples: float
    """Mean number of samples of a candidate that the rule is applied to."""
    expected_differing: float
    """Share of the stage's candidates, the pilot's included, that all K samples would decide otherwise."""
    differing_bound: float
    """What that share does not exceed with `RISK_CONFIDENCE`; at most the risk."""

    def stops(self, samples: int, successes: int) -> bool:
        """Whether a candidate with these counts is done."""
        return samples >= self.num_samples or (samples, successes) in self.stopped

    def as_dict(self) -> dict[str, Any]:
        """JSON-ready form; `of_file` reads it back."""
        return {
            "num_samples": self.num_samples,
            "min_samples": self.min_samples,
            "round_samples": self.round_samples,
            "stopped": sorted(self.stopped),
            **self.figures(),
        }

    def figures(self) -> dict[str, float]:
        """What the rule is expected to cost and to change, JSON-ready."""
        return {
            "expected_samples": self.expected_samples,
            "expected_differing_frac": self.expected_differing,
            "differing_frac_bound": self.differing_bound,
            "confidence": RISK_CONFIDENCE,
        }


@dataclass(frozen=True, slots=True)
class Belief:
    """What is known of the share of candidates with s successes in K samples."""

    mean_S: Floats
    draws_D_S: Floats
    """Distributions that may be the true one, equally likely."""

    @staticmethod
    def given(prior: PassRatePriorConfig, num_samples: int) -> Belief:
        """The recipe's prior, taken for the truth."""
        mean_S = PassRates.given(prior).successes(num_samples)
        return Belief(mean_S, np.broadcast_to(mean_S, (_NUM_DRAWS, num_samples + 1)))

    @staticmethod
    def of_pilot(counts: Counts, num_samples: int, *, seed: int) -> Belief:
        """The posterior of a Dirichlet prior around the distribution that is fitted to the pilot, the pilot's own counts added.

        Args:
            seed: from `identity.derive_seed`.
        """
        fitted_S = PassRates.fitted(counts).successes(num_samples)
        prior_S = (1 - _UNIFORM_SHARE) * fitted_S + _UNIFORM_SHARE / (num_samples + 1)
        alpha_S = _PRIOR_CANDIDATES * prior_S + np.array([counts.get((num_samples, s), 0) for s in range(num_samples + 1)])
        draws_D_S = np.random.Generator(np.random.PCG64(seed)).dirichlet(alpha_S, size=_NUM_DRAWS)
        return Belief(alpha_S / alpha_S.sum(), draws_D_S)


@dataclass(frozen=True, slots=True)
class StageSize:
    """Candidates of a stage whose decisions are at stake."""

    num_pilot: int
    """Those that get all K samples whatever they show."""
    num_others: int


def stopping_rule(belief: Belief, config: AdaptiveConfig, num_samples: int, keeps: Decision, size: StageSize, *, seed: int) -> StoppingRule:
    """The rule with the fewest expected samples whose share of differing decisions is at most the risk, with `RISK_CONFIDENCE`.

    Every distribution of the belief makes its number of differing decisions among the stage's other candidates; the bound is
    a high quantile of these numbers. A rule that stops only where no decision can change always qualifies.

    Args:
        seed: from `identity.derive_seed`; every rule is judged by the same random numbers.
    """
    looks = Looks(num_samples, config.min_samples, config.round_samples)
    chosen: tuple[float, Stops, float] | None = None
    for stops in StoppingProblem(belief.mean_S, looks, keeps).rules():
        samples = float(belief.mean_S @ stops.samples_S)
        if chosen is None or samples < chosen[0]:
            bound = _differing_bound(belief.draws_D_S @ stops.differing_S, size, seed)
            if bound <= config.risk:
                chosen = samples, stops, bound
    assert chosen is not None
    samples, stops, bound = chosen
    expected = float(belief.mean_S @ stops.differing_S) * size.num_others / max(1, size.num_pilot + size.num_others)
    return StoppingRule(num_samples, config.min_samples, config.round_samples, stops.states, samples, expected, bound)


def _differing_bound(differing_D: Floats, size: StageSize, seed: int) -> float:
    generator = np.random.Generator(np.random.PCG64(seed))
    numbers_D = generator.binomial(size.num_others, np.clip(differing_D, 0.0, 1.0))
    return float(np.quantile(numbers_D, _JUDGED_QUANTILE, method="higher")) / max(1, size.num_pilot + size.num_others)


def pilot_size(config: AdaptiveConfig, num_candidates: int) -> int:
    """Candidates that the first pass of a stage asks for: none where the recipe gives the prior, and no more than `max_pilot_frac` of the stage.

    >>> config = AdaptiveConfig(risk=0.01)
    >>> pilot_size(config, 400), pilot_size(config, 100_000)
    (100, 512)
    """
    return 0 if config.prior is not None else min(config.pilot_candidates, max(1, int(config.max_pilot_frac * num_candidates)))


def rule_for(config: AdaptiveConfig, num_samples: int, keeps: Decision, pilot: Counts, size: StageSize, *, seed: int) -> StoppingRule:
    """The rule under the recipe's prior, or under what the pilot's counts leave open.

    Args:
        size: pilot and others as candidates; what the pilot lost (quarantined, graded) is taken to be lost of the others too.
        seed: from `identity.derive_seed`.
    """
    if config.prior is not None:
        return stopping_rule(Belief.given(config.prior, num_samples), config, num_samples, keeps, size, seed=seed)
    belief = Belief.of_pilot(pilot, num_samples, seed=derive_seed(seed, "belief"))
    num_counted = sum(pilot.values())
    at_stake = StageSize(num_counted, round(size.num_others * num_counted / size.num_pilot)) if num_counted else size
    return stopping_rule(belief, config, num_samples, keeps, at_stake, seed=derive_seed(seed, "numbers"))


def write_rule(path: Path, rule: StoppingRule, pilot: Counts) -> None:
    """Writes adaptive.json: the rule, and the counts that it is made of."""
    write_json(path, {**rule.as_dict(), "num_pilot": sum(pilot.values()), "pilot": sorted((*cell, number) for cell, number in pilot.items())})


def read_rule(stage_dir: Path) -> StoppingRule:
    """The rule of a stage whose adaptive.json was written.

    Raises:
        UserError: where somebody has changed the file since and it is no rule any more, naming the key.
    """
    path = stage_dir / ADAPTIVE
    value = read_artifact(path, RuleFile)
    stopped: set[tuple[int, int]] = set()
    for number, state in enumerate(value["stopped"]):
        if len(state) != 2 or not 0 <= state[1] <= state[0] < value["num_samples"]:
            raise UserError(
                f"{path}: stopped.{number} is {state}",
                rule=f"it is [samples, successes], successes at most samples, samples below num_samples ({value['num_samples']})",
                fix="restore the file, or remove its stage's directory to redo it",
            )
        stopped.add((state[0], state[1]))
    return StoppingRule(
        value["num_samples"],
        value["min_samples"],
        value["round_samples"],
        frozenset(stopped),
        value["expected_samples"],
        value["expected_differing_frac"],
        value["differing_frac_bound"],
    )


def counts_of(rows: Iterable[Mapping[str, Any]]) -> Counts:
    """(samples, successes) of the rows of profiles.parquet that are usable and have 0/1 rewards alone."""
    usable = (row["rewards"] for row in rows if row["quarantine_reason"] is None)
    return Counter((len(rewards), int(sum(rewards))) for rewards in usable if rewards and all(reward in (0, 1) for reward in rewards))


def differing_estimate(rule: StoppingRule, keeps: Decision, counts: Counts) -> float:
    """Share of a finished profile's candidates that all K samples would be expected to decide otherwise, from how each of them ended.

    The distribution of pass rates is fitted to the whole profile: stopping by the outcome does not bias it. NaN without candidates.

    Args:
        counts: of the whole profile, (samples, successes) where each candidate ended.
    """
    if not counts:
        return math.nan
    rates, differing, size = PassRates.fitted(counts), 0.0, rule.num_samples
    for samples, successes in counts.keys() & rule.stopped:
        further = rates.further(samples, successes, size - samples)
        otherwise = [keeps(size, successes + more) != keeps(samples, successes) for more in range(size - samples + 1)]
        differing += counts[samples, successes] * float(further[otherwise].sum())
    return differing / sum(counts.values())
