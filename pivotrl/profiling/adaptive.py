"""Adaptive K: after which counts a candidate's sampling may stop, so that select seldom decides otherwise than after all K samples.

Optimal stopping by backward induction over (samples, successes), the price of a wrong decision chosen so that the expected
share of candidates decided otherwise is the recipe's risk. The math is in docs/profiling.md. Pure but for the one file that
keeps the rule for all workers; called by profile.py.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pivotrl.config.profiling import AdaptiveConfig, ProfileConfig
from pivotrl.config.schema import SelectConfig
from pivotrl.pivots.pass_rates import GRID_R, Counts, PassRates
from pivotrl.pivots.select import Decision, decision_of
from pivotrl.rundir import read_json, write_json

ADAPTIVE = "adaptive.json"
# Share of the prior that is uniform over 0..K successes: what the pilot did not show is unlikely, not impossible.
_UNIFORM_SHARE = 1e-3
_PRICES = (1.0, 1e9)
_NUM_BISECTIONS = 60


@dataclass(frozen=True, slots=True)
class StoppingRule:
    """Where to stop, and what that is expected to cost and save under the prior.

    >>> rule = StoppingRule(4, 2, 1, frozenset({(2, 2), (3, 3)}), 3.1, 0.01)
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
    """Mean number of samples of a candidate."""
    expected_differing: float
    """Share of candidates that all K samples would decide otherwise."""

    def stops(self, samples: int, successes: int) -> bool:
        """Whether a candidate with these counts is done."""
        return samples >= self.num_samples or (samples, successes) in self.stopped

    def as_dict(self) -> dict[str, Any]:
        """JSON-ready form; `of_dict` reads it back."""
        return {
            "num_samples": self.num_samples,
            "min_samples": self.min_samples,
            "round_samples": self.round_samples,
            "stopped": sorted(self.stopped),
            "expected_samples": self.expected_samples,
            "expected_differing_frac": self.expected_differing,
        }

    @staticmethod
    def of_dict(value: Mapping[str, Any]) -> StoppingRule:
        """The rule that `as_dict` wrote."""
        return StoppingRule(
            num_samples=value["num_samples"],
            min_samples=value["min_samples"],
            round_samples=value["round_samples"],
            stopped=frozenset((samples, successes) for samples, successes in value["stopped"]),
            expected_samples=value["expected_samples"],
            expected_differing=value["expected_differing_frac"],
        )


def write_rule(stage_dir: Path, config: ProfileConfig, select: SelectConfig, pilot: Iterable[Mapping[str, Any]]) -> None:
    """Writes adaptive.json: the rule under the recipe's prior, or under the one fitted to the pilot's rows of profiles.parquet."""
    assert config.adaptive is not None
    prior, counts = config.adaptive.prior, counts_of(pilot)
    rates = PassRates.given(prior) if prior else PassRates.fitted(counts)
    rule = stopping_rule(rates, config.adaptive, config.num_samples, decision_of(select))
    write_json(
        stage_dir / ADAPTIVE,
        {**rule.as_dict(), "num_pilot": sum(counts.values()), "pass_rates": list(zip(GRID_R.tolist(), rates.weights, strict=True))},
    )


def read_rule(stage_dir: Path) -> StoppingRule:
    """The rule of a stage whose adaptive.json was written."""
    return StoppingRule.of_dict(read_json(stage_dir / ADAPTIVE))


def counts_of(rows: Iterable[Mapping[str, Any]]) -> Counts:
    """(samples, successes) of the rows of profiles.parquet that are usable and have 0/1 rewards alone."""
    usable = (row["rewards"] for row in rows if row["quarantine_reason"] is None)
    return Counter((len(rewards), int(sum(rewards))) for rewards in usable if rewards and all(reward in (0, 1) for reward in rewards))


def stopping_rule(rates: PassRates, config: AdaptiveConfig, num_samples: int, keeps: Decision) -> StoppingRule:
    """The rule with the fewest expected samples among those whose expected share of differing decisions is at most the risk."""
    table = _Table(_smoothed(rates, num_samples), config, num_samples, keeps)
    low, high = _PRICES
    for _ in range(_NUM_BISECTIONS):
        middle = (low * high) ** 0.5
        if table.rule(middle).expected_differing <= config.risk:
            high = middle
        else:
            low = middle
    return table.rule(high)


def _smoothed(rates: PassRates, num_samples: int) -> list[float]:
    return [(1 - _UNIFORM_SHARE) * float(mass) + _UNIFORM_SHARE / (num_samples + 1) for mass in rates.successes(num_samples)]


class _Table:
    """The chances that do not depend on the price. Lists are indexed [samples][successes]."""

    def __init__(self, successes_of_all: list[float], config: AdaptiveConfig, num_samples: int, keeps: Decision) -> None:
        self._config, self._num_samples = config, num_samples
        # Chance of one given order of n samples: that of either continuation.
        orders, order = [0.0] * (num_samples + 1), 1
        for successes in range(num_samples + 1):
            orders[successes] = successes_of_all[successes] / order
            order = order * (num_samples - successes) // (successes + 1)
        kept = [1.0 if keeps(num_samples, successes) else 0.0 for successes in range(num_samples + 1)]
        self._next: list[list[float]] = [[] for _ in range(num_samples)]
        self._wrong: list[list[float]] = [[] for _ in range(num_samples)]
        for samples in reversed(range(num_samples)):
            either = [orders[s] + orders[s + 1] for s in range(samples + 1)]
            chances = [orders[s + 1] / either[s] for s in range(samples + 1)]
            kept = [chance * kept[s + 1] + (1 - chance) * kept[s] for s, chance in enumerate(chances)]
            self._next[samples] = chances
            self._wrong[samples] = [1 - kept[s] if samples and keeps(samples, s) else kept[s] for s in range(samples + 1)]
            orders = either

    def rule(self, price: float) -> StoppingRule:
        """The rule with the least expected samples + price * (share of differing decisions)."""
        config, stopped = self._config, set[tuple[int, int]]()
        # What is still to come from (samples, successes) on under the best rule: samples and chance of a differing decision.
        to_come = [(0.0, 0.0)] * (self._num_samples + 1)
        for samples in reversed(range(self._num_samples)):
            may_stop = samples >= config.min_samples and (samples - config.min_samples) % config.round_samples == 0
            now: list[tuple[float, float]] = []
            for successes, chance in enumerate(self._next[samples]):
                (more_up, wrong_up), (more_down, wrong_down) = to_come[successes + 1], to_come[successes]
                more, wrong = 1 + chance * more_up + (1 - chance) * more_down, chance * wrong_up + (1 - chance) * wrong_down
                if may_stop and price * self._wrong[samples][successes] <= more + price * wrong:
                    more, wrong = 0.0, self._wrong[samples][successes]
                    stopped.add((samples, successes))
                now.append((more, wrong))
            to_come = now
        return StoppingRule(self._num_samples, config.min_samples, config.round_samples, frozenset(stopped), *to_come[0])
