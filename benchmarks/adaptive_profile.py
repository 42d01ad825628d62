"""Adaptive K against fixed K: rollouts saved and decisions that differ, on simulated candidates and on a real profile.

    python benchmarks/adaptive_profile.py [--profile RUN/profile] [--seed N]

Simulated: 20,000 candidates, 71 % of them uninformative at K = 16, mostly solved or mostly failed, lambda_diff 0.6; the prior is fitted to a pilot
of 512 candidates that get all 16 samples, which count. Real: the rewards of a finished profile, its own K being the maximum and a quarter of it the
pilot, mean of ten orders; and the same candidates drawn with replacement to 20,000, with the pilot of 512.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Sequence
from decimal import Decimal
from pathlib import Path

from pivotrl.config.profiling import AdaptiveConfig
from pivotrl.config.schema import Eq5Rule
from pivotrl.identity import derive_seed
from pivotrl.pivots.parquet import read_rows
from pivotrl.pivots.pass_rates import PassRates
from pivotrl.pivots.select import decision_of
from pivotrl.profiling.adaptive import StoppingRule, stopping_rule

K = 16
NUM_PILOT = 512
POPULATIONS = {
    # Shares of pass rate 0 and 1, and the Beta distribution of the rest: 71 % of 16 equal rewards, in expectation.
    "mostly solved": (0.10, 0.565, 0.9, 0.9),
    "mostly failed": (0.565, 0.10, 0.9, 0.9),
    # The same share without point masses: harder, since a turn that failed ten times may still be solved in the next six.
    "mostly solved, smooth": (0.0, 0.0, 0.417, 0.0834),
    "mostly failed, smooth": (0.0, 0.0, 0.0834, 0.417),
}


def simulated(name: str, num_candidates: int, seed: int) -> list[list[int]]:
    """K rewards of each candidate."""
    fails, succeeds, alpha, beta = POPULATIONS[name]
    generator = random.Random(derive_seed(seed, "population", name))
    rewards: list[list[int]] = []
    for _ in range(num_candidates):
        draw = generator.random()
        rate = 0.0 if draw < fails else 1.0 if draw < fails + succeeds else generator.betavariate(alpha, beta)
        rewards.append([int(generator.random() < rate) for _ in range(K)])
    return rewards


def stopped_at(rule: StoppingRule, rewards_K: Sequence[int]) -> int:
    """Samples drawn of one candidate."""
    samples = rule.min_samples
    while not rule.stops(samples, sum(rewards_K[:samples])):
        samples = min(samples + rule.round_samples, len(rewards_K))
    return samples


def measure(rewards: Sequence[Sequence[int]], config: AdaptiveConfig, select: Eq5Rule, num_pilot: int) -> dict[str, float]:
    """Shares of saved rollouts and differing decisions, the pilot's candidates included in both."""
    num_samples, keeps = len(rewards[0]), decision_of(select)
    counts: dict[tuple[int, int], int] = {}
    for row in rewards[:num_pilot]:
        counts[num_samples, sum(row)] = counts.get((num_samples, sum(row)), 0) + 1
    rule = stopping_rule(PassRates.fitted(counts), config, num_samples, keeps)
    drawn, differing = num_pilot * num_samples, 0
    for row in rewards[num_pilot:]:
        samples = stopped_at(rule, row)
        drawn += samples
        differing += keeps(samples, sum(row[:samples])) != keeps(num_samples, sum(row))
    return {
        "uninformative": sum(sum(row) in (0, num_samples) for row in rewards) / len(rewards),
        "saved": 1 - drawn / (num_samples * len(rewards)),
        "differing": differing / len(rewards),
        "expected_differing": rule.expected_differing,
    }


def show(name: str, figures: dict[str, float]) -> None:
    """One line of the result."""
    print(f"{name:32} " + ", ".join(f"{key} {100 * value:.2f} %" for key, value in figures.items()))


def main() -> None:
    """Prints a line per population, seed and risk."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--profile", type=Path)
    parser.add_argument("--lambda-diff", type=Decimal, default=Decimal("0.6"))
    parser.add_argument("--risk", type=float, default=0.008)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    config, select = AdaptiveConfig(risk=options.risk), Eq5Rule(rule="eq5", lambda_diff=options.lambda_diff)
    if options.profile is None:
        for name in POPULATIONS:
            for seed in range(options.seed, options.seed + 3):
                show(f"{name}, seed {seed}", measure(simulated(name, 20_000, seed), config, select, NUM_PILOT))
        return
    rows = [
        row["rewards"] for row in read_rows(options.profile / "profiles.parquet", ("rewards", "quarantine_reason")) if not row["quarantine_reason"]
    ]
    rows = [list(map(int, row)) for row in rows if len(row) == max(map(len, rows))]
    orders = [random.Random(derive_seed(options.seed, "order", number)) for number in range(10)]
    as_is = [measure(generator.sample(rows, len(rows)), config, select, len(rows) // 4) for generator in orders]
    show(f"{len(rows)} real candidates", {key: sum(figures[key] for figures in as_is) / len(as_is) for key in as_is[0]})
    many = [generator.sample(row, len(row)) for generator in orders[:1] for row in generator.choices(rows, k=20_000)]
    show("drawn to 20,000", measure(many, config, select, NUM_PILOT))


if __name__ == "__main__":
    main()
