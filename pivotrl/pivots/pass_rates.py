"""The distribution of pass rates over candidates: given, or fitted to what a profile counted; what it says about one candidate and about a decision.

Pure. A candidate's pass rate p is the chance that one local rollout of it gets reward 1; n samples of it hold s successes,
s ~ Binomial(n, p). Called by profiling/adaptive.py and profiling/selection.py. Suffixes: R = rates of the grid, C = distinct counts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pivotrl.config.profiling import PassRatePriorConfig
from pivotrl.identity import derive_seed
from pivotrl.pivots.statistics import BOUNDS, Interval

type Floats = npt.NDArray[np.float64]
type Counts = Mapping[tuple[int, int], int]
"""(samples, successes) to the number of candidates with them."""

# Exact 0 and 1 are the point masses; near the ends pass rates differ in kind (once in a thousand, once in a hundred).
GRID_R: Floats = np.array([0.0, 0.001, 0.002, 0.005, *(number / 100 for number in range(1, 100)), 0.995, 0.998, 0.999, 1.0])
# Components of a fitted distribution beside the two point masses: Beta distributions of these means and concentrations (alpha + beta).
# Smooth ones, because K samples cannot tell a spike from its surroundings and a fit by single rates would make spikes.
_MEANS, _CONCENTRATIONS = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9), (0.5, 2.0, 8.0, 32.0)
_NUM_ITERATIONS = 300
_NUM_RESAMPLES = 200
RARE = 0.05
"""A pass rate below it (or above 1 - RARE) counts as 0 (or 1): a group of 16 is then more likely all equal than mixed."""


@dataclass(frozen=True, slots=True)
class PassRates:
    """A discrete distribution over `GRID_R`."""

    weights: tuple[float, ...]

    @staticmethod
    def given(prior: PassRatePriorConfig) -> PassRates:
        """The recipe's mixture, its Beta distribution taken at the grid's points between 0 and 1.

        >>> rates = PassRates.given(PassRatePriorConfig(always_fails=0.2, always_succeeds=0.5, alpha=1, beta=1))
        >>> round(rates.weights[0], 6), round(rates.weights[-1], 6), round(sum(rates.weights), 6)
        (0.2, 0.5, 1.0)
        """
        weights = (1 - prior.always_fails - prior.always_succeeds) * _beta(prior.alpha, prior.beta)
        weights[0], weights[-1] = prior.always_fails, prior.always_succeeds
        return PassRates(tuple(weights.tolist()))

    @staticmethod
    def fitted(counts: Counts) -> PassRates:
        """The mixture of the two point masses and a fixed set of Beta distributions that makes the counts likeliest, by expectation maximization.

        Early stopping of a candidate's samples does not bias it: a stopping rule that looks at the samples alone leaves the likelihood as it is.
        """
        cells = sorted(counts)
        return PassRates(tuple(_fit(_likelihood(cells), np.array([[counts[cell] for cell in cells]], dtype=np.float64))[0].tolist()))

    def successes(self, num_samples: int) -> Floats:
        """P(s of `num_samples` samples succeed), s = 0 to num_samples."""
        return _chances(num_samples) @ np.array(self.weights)

    def further(self, samples: int, successes: int, num_more: int) -> Floats:
        """P(s of `num_more` further samples succeed), s = 0 to `num_more`, for a candidate with these counts.

        >>> rates = PassRates.given(PassRatePriorConfig(always_fails=0.5, always_succeeds=0.5, alpha=1, beta=1))
        >>> rates.further(3, 3, 2).tolist()
        [0.0, 0.0, 1.0]
        """
        posterior = _likelihood([(samples, successes)])[0] * np.array(self.weights)
        return _chances(num_more) @ (posterior / posterior.sum())


@dataclass(frozen=True, slots=True)
class DecisionRates:
    """How often a profile's decisions are wrong about the pass rate, in expectation."""

    false_keep: Interval
    """Of the kept candidates, those whose pass rate is not one to keep."""
    false_drop: Interval
    """Of the dropped candidates, those whose pass rate is one to keep."""


def decision_rates(counts: Counts, is_kept: Callable[[int, int], bool], is_worth_keeping: Callable[[float], bool], *, seed: int) -> DecisionRates:
    """Expected rates of wrong decisions: the posterior of each candidate's pass rate under the fitted distribution against its decision.

    The interval is a percentile bootstrap over candidates, the distribution fitted anew to each resample.

    Args:
        is_kept: the decision for (samples, successes).
        is_worth_keeping: the decision that the pass rate itself would get.
        seed: from `identity.derive_seed`.
    """
    cells = sorted(counts)
    numbers_C = np.array([counts[cell] for cell in cells], dtype=np.float64)
    total = int(numbers_C.sum())
    if not total:
        nothing = Interval(math.nan, math.nan, math.nan, 0)
        return DecisionRates(nothing, nothing)
    generator = np.random.Generator(np.random.PCG64(derive_seed(seed, "decision rates")))
    resampled = generator.multinomial(total, numbers_C / total, size=_NUM_RESAMPLES).astype(np.float64)
    rows = np.concatenate([numbers_C[None], resampled])
    likelihood_C_R = _likelihood(cells)
    weights = _fit(likelihood_C_R, rows)
    worth_R = np.array([is_worth_keeping(float(rate)) for rate in GRID_R], dtype=np.float64)
    worth_C = (weights * worth_R) @ likelihood_C_R.T / (weights @ likelihood_C_R.T)
    kept_C = np.array([is_kept(*cell) for cell in cells], dtype=bool)
    return DecisionRates(
        _rate(rows, 1 - worth_C, kept_C),
        _rate(rows, worth_C, ~kept_C),
    )


def _rate(rows: Floats, wrong_C: Floats, chosen_C: npt.NDArray[np.bool_]) -> Interval:
    """The mean of `wrong_C` over the chosen cells, of the data (row 0), with the resamples' quantiles."""
    num_chosen = rows[:, chosen_C].sum(axis=1)
    if not num_chosen[0]:
        return Interval(math.nan, math.nan, math.nan, 0)
    rates: Floats = (rows * wrong_C)[:, chosen_C].sum(axis=1)[num_chosen > 0] / num_chosen[num_chosen > 0]
    low, high = np.quantile(rates[1:], BOUNDS)
    return Interval(float(rates[0]), float(low), float(high), int(num_chosen[0]))


def _likelihood(cells: list[tuple[int, int]]) -> Floats:
    """[C, R]: probability of one sequence with the cell's samples and successes under each rate; 0 ** 0 is 1."""
    samples, successes = np.array(cells, dtype=np.float64).reshape(-1, 2).T
    return GRID_R ** successes[:, None] * (1 - GRID_R) ** (samples - successes)[:, None]


def _chances(num_samples: int) -> Floats:
    """[s, R]: P(s of `num_samples` samples succeed) under each rate."""
    orders = np.array([math.comb(num_samples, successes) for successes in range(num_samples + 1)], dtype=np.float64)
    return orders[:, None] * _likelihood([(num_samples, successes) for successes in range(num_samples + 1)])


def _beta(alpha: float, beta: float) -> Floats:
    """[R]: a Beta distribution on the grid, nothing at 0 and 1."""
    inner = GRID_R[1:-1]
    widths = np.diff(np.concatenate([[0.0], (inner[1:] + inner[:-1]) / 2, [1.0]]))
    density = inner ** (alpha - 1) * (1 - inner) ** (beta - 1) * widths
    return np.concatenate([[0.0], density / density.sum(), [0.0]])


def _fit(likelihood_C_R: Floats, rows: Floats) -> Floats:
    """EM for the weights of the components, several data sets at once: [rows, C] to the mixtures, [rows, R]."""
    ends = np.eye(len(GRID_R))[[0, -1]]
    components = np.array([*ends, *(_beta(size * mean, size * (1 - mean)) for size in _CONCENTRATIONS for mean in _MEANS)])
    likelihood = likelihood_C_R @ components.T
    weights = np.full((len(rows), len(components)), 1 / len(components))
    shares = rows / np.maximum(rows.sum(axis=1, keepdims=True), 1)
    for _ in range(_NUM_ITERATIONS if rows.sum() else 0):
        mixture = np.maximum(weights @ likelihood.T, np.finfo(np.float64).tiny)
        weights = weights * ((shares / mixture) @ likelihood)
    return weights @ components
