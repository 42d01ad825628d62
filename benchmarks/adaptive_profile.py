"""Adaptive K against fixed K and against the optimum: rollouts saved and decisions that differ, simulated and on a real profile.

    python benchmarks/adaptive_profile.py [--num-candidates N | --profile RUN/profile [--num-samples K]] [--lambda-diff D ...] [--risk R]
        [--num-seeds N]

Simulated: populations of 20,000 candidates, 71 % of them uninformative at K = 16, mostly solved or mostly failed, a new one for each seed. Real: the
candidates of a finished profile, for each seed in another order and each candidate's samples in another order; the same drawn with replacement to
20,000. The pilot is the default one, gets all K samples and counts. Columns:

    optimum    saved by the best rule there is, randomized ones included, that knows the true distribution, has no pilot and decides the risk
               otherwise in expectation: no rule saves more
    95 %       the same, but so that a stage of this size keeps the risk with 95 % confidence
    saved      share of rollouts: mean over seeds, and the worst seed
    differing  share of candidates decided otherwise: mean over seeds, and the worst seed
    kept       share of seeds whose differing share is at most the risk
    estimated  mean error of what the stage states as its differing share

for the rule of `profile.adaptive`, and for a plug-in rule: the distribution fitted to the pilot is taken for the truth, the risk for an expectation.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Callable
from dataclasses import astuple, dataclass
from decimal import Decimal
from pathlib import Path

import numpy as np
import numpy.typing as npt

from pivotrl.config.profiling import AdaptiveConfig
from pivotrl.config.schema import Eq5Rule
from pivotrl.identity import derive_seed
from pivotrl.pivots.parquet import read_rows
from pivotrl.pivots.pass_rates import Floats, PassRates
from pivotrl.pivots.select import Decision, decision_of
from pivotrl.profiling.adaptive import Belief, StageSize, StoppingRule, differing_estimate, pilot_size, rule_for, stopping_rule
from pivotrl.profiling.stopping import Looks, StoppingProblem

type Rewards = npt.NDArray[np.int64]
"""[candidates, K], 0 or 1."""

K = 16
NUM_CANDIDATES = 20_000
POPULATIONS = {
    # Shares of pass rate 0 and 1, and the Beta distribution of the rest: 71 % of 16 equal rewards, in expectation.
    "mostly solved": (0.10, 0.565, 0.9, 0.9),
    "mostly failed": (0.565, 0.10, 0.9, 0.9),
    # The same share without point masses: harder, since a turn that failed ten times may still be solved in the next six.
    "mostly solved, smooth": (0.0, 0.0, 0.417, 0.0834),
    "mostly failed, smooth": (0.0, 0.0, 0.0834, 0.417),
}


@dataclass(frozen=True, slots=True)
class Played:
    """A rule on one population."""

    saved: float
    differing: float
    estimated: float


def simulated(name: str, num_candidates: int, generator: np.random.Generator) -> Rewards:
    """A new population."""
    fails, succeeds, alpha, beta = POPULATIONS[name]
    draws = generator.random(num_candidates)
    rates = np.where(draws < fails, 0.0, np.where(draws < fails + succeeds, 1.0, generator.beta(alpha, beta, num_candidates)))
    return (generator.random((num_candidates, K)) < rates[:, None]).astype(np.int64)


def true_successes(name: str) -> Floats:
    """P(s of K samples succeed) in a population, from a million pass rates."""
    fails, succeeds, alpha, beta = POPULATIONS[name]
    generator = np.random.Generator(np.random.PCG64(derive_seed(0, "truth", name)))
    between = generator.binomial(K, generator.beta(alpha, beta, 4_000_000))
    successes_S = (1 - fails - succeeds) * np.bincount(between, minlength=K + 1) / len(between)
    successes_S[0] += fails
    successes_S[-1] += succeeds
    return successes_S


def play(rule: StoppingRule, rewards: Rewards, num_pilot: int, keeps: Decision) -> Played:
    """What comes of a stage whose first `num_pilot` candidates get all samples."""
    num_samples = rewards.shape[1]
    successes = np.concatenate([np.zeros((len(rewards), 1), dtype=np.int64), rewards.cumsum(axis=1)], axis=1)
    stopped_at = np.full(len(rewards), num_samples)
    for samples in reversed(range(rule.min_samples, num_samples)):
        stops = np.array([rule.stops(samples, s) for s in range(samples + 1)])
        stopped_at = np.where(stops[successes[:, samples]], samples, stopped_at)
    stopped_at[:num_pilot] = num_samples
    ends = Counter(zip(stopped_at.tolist(), successes[np.arange(len(rewards)), stopped_at].tolist(), strict=True))
    pairs = Counter(zip(stopped_at.tolist(), successes[np.arange(len(rewards)), stopped_at].tolist(), successes[:, -1].tolist(), strict=True))
    differing = sum(number for (n, s, total), number in pairs.items() if keeps(n, s) != keeps(num_samples, total)) / len(rewards)
    return Played(1 - stopped_at.sum() / rewards.size, differing, differing_estimate(rule, keeps, ends))


def plug_in(pilot: Counter[tuple[int, int]], config: AdaptiveConfig, num_samples: int, keeps: Decision) -> StoppingRule:
    """The rule with the fewest samples whose expected differing share is at most the risk if the fitted distribution is the true one."""
    fitted_S = 0.999 * PassRates.fitted(pilot).successes(num_samples) + 0.001 / (num_samples + 1)
    rules = StoppingProblem(fitted_S, Looks(num_samples, config.min_samples, config.round_samples), keeps).rules()
    samples, _, stops = min(
        (float(fitted_S @ one.samples_S), number, one) for number, one in enumerate(rules) if fitted_S @ one.differing_S <= config.risk
    )
    return StoppingRule(num_samples, config.min_samples, config.round_samples, stops.states, samples, 0.0, 0.0)


def optimum(successes_S: Floats, config: AdaptiveConfig, keeps: Decision) -> float:
    """Saved rollouts of the best randomized rule: between two rules of the hull, whose corners backward induction finds."""
    num_samples = len(successes_S) - 1
    rules = list(StoppingProblem(successes_S, Looks(num_samples, config.min_samples, config.round_samples), keeps).rules())
    corners = sorted((float(successes_S @ one.differing_S), 1 - float(successes_S @ one.samples_S) / num_samples) for one in rules)
    differing, saved = zip(*corners, strict=True)
    return float(np.interp(config.risk, differing, saved))


def known(successes_S: Floats, config: AdaptiveConfig, keeps: Decision, num_candidates: int) -> float:
    """Saved rollouts of the rule that knows the distribution and keeps the risk with 95 % confidence."""
    belief = Belief(successes_S, np.broadcast_to(successes_S, (2000, len(successes_S))))
    rule = stopping_rule(belief, config, len(successes_S) - 1, keeps, StageSize(0, num_candidates), seed=0)
    return 1 - rule.expected_samples / (len(successes_S) - 1)


def show(name: str, populations: Callable[[np.random.Generator], Rewards], successes_S: Floats, options: argparse.Namespace) -> None:
    """The lines of one kind of population."""
    config = AdaptiveConfig(risk=options.risk)
    for lambda_diff in options.lambda_diff:
        keeps = decision_of(Eq5Rule(rule="eq5", lambda_diff=lambda_diff))
        played: dict[str, list[Played]] = {"rule": [], "plug-in": []}
        num_candidates = 0
        for seed in range(options.num_seeds):
            rewards = populations(np.random.Generator(np.random.PCG64(derive_seed(seed, "population", name))))
            num_candidates, num_samples = rewards.shape
            num_pilot = pilot_size(config, num_candidates)
            pilot = Counter((num_samples, int(s)) for s in rewards[:num_pilot].sum(axis=1))
            size = StageSize(num_pilot, num_candidates - num_pilot)
            played["rule"].append(play(rule_for(config, num_samples, keeps, pilot, size, seed=seed), rewards, num_pilot, keeps))
            played["plug-in"].append(play(plug_in(pilot, config, num_samples, keeps), rewards, num_pilot, keeps))
        equal = successes_S[0] + successes_S[-1]
        bests = [optimum(successes_S, config, keeps), known(successes_S, config, keeps, num_candidates)]
        print(f"{name}: {num_candidates} candidates, {100 * equal:.0f} % uninformative, lambda_diff {lambda_diff}, risk {100 * options.risk:g} %")
        print(f"  optimum {100 * bests[0]:.0f} %, 95 % {100 * bests[1]:.0f} %")
        for what, results in played.items():
            saved, differing, estimated = (100 * np.array(column) for column in zip(*map(astuple, results), strict=True))
            print(
                f"  {what:8} saved {saved.mean():.1f} % (worst {saved.min():.1f}), differing {differing.mean():.2f} % (worst {differing.max():.2f}), "
                f"kept {100 * np.mean(differing <= 100 * options.risk):.0f} %, estimated off by {np.abs(estimated - differing).mean():.2f} points",
                flush=True,
            )


def main() -> None:
    """Prints the lines of every population and lambda_diff."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--profile", type=Path)
    parser.add_argument("--num-samples", type=int, default=K, help="of a real profile: use the first so many samples")
    parser.add_argument("--lambda-diff", type=Decimal, nargs="+", default=[Decimal("0.6"), Decimal("0.9")])
    parser.add_argument("--num-candidates", type=int, default=NUM_CANDIDATES, help="of a simulated population")
    parser.add_argument("--risk", type=float, default=0.01)
    parser.add_argument("--num-seeds", type=int, default=20)
    options = parser.parse_args()
    if options.profile is None:
        for name in POPULATIONS:
            show(name, lambda generator, name=name: simulated(name, options.num_candidates, generator), true_successes(name), options)
        return
    columns = read_rows(options.profile / "profiles.parquet", ("rewards", "quarantine_reason"))
    profiled = [row["rewards"] for row in columns if not row["quarantine_reason"]]
    rows: Rewards = np.array([row[: options.num_samples] for row in profiled if len(row) >= options.num_samples], dtype=np.int64)
    successes_S = np.bincount(rows.sum(axis=1), minlength=options.num_samples + 1) / len(rows)
    show("real", lambda generator: generator.permuted(generator.permutation(rows), axis=1), successes_S, options)
    show("real, drawn", lambda generator: generator.permuted(rows[generator.integers(len(rows), size=NUM_CANDIDATES)], axis=1), successes_S, options)


if __name__ == "__main__":
    main()
