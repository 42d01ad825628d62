"""Optimal stopping of a candidate's sampling: the cheapest rule for a price of a wrong decision, and what any rule costs.

Pure. All that matters of the candidates is how often S of all K samples succeed, since every order of as many successes is
equally likely. The math is in docs/profiling.md. Called by adaptive.py and by benchmarks/adaptive_profile.py. Suffixes: S =
successes of all K samples, 0 to K; n = successes of the first n samples, 0 to n.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from math import comb

import numpy as np
import numpy.typing as npt

from pivotrl.pivots.pass_rates import Floats
from pivotrl.pivots.select import Decision

# In samples per differing decision; the last one is beyond any trade, so that it buys only what is certain.
_PRICES = (*np.geomspace(1.0, 1e6, 240).tolist(), 1e15)


@dataclass(frozen=True, slots=True)
class Looks:
    """When sampling may stop at all."""

    num_samples: int
    """K."""
    min_samples: int
    """Samples before the first look."""
    round_samples: int
    """Samples between two looks."""

    def __contains__(self, samples: int) -> bool:
        return self.min_samples <= samples < self.num_samples and (samples - self.min_samples) % self.round_samples == 0


@dataclass(frozen=True, slots=True)
class Stops:
    """Where sampling stops, and what that does to a candidate by the successes of all its K samples."""

    states: frozenset[tuple[int, int]]
    """(samples, successes) below K after which sampling stops."""
    samples_S: Floats
    """Expected samples."""
    differing_S: Floats
    """Chance that select decides otherwise than after all K samples."""


class StoppingProblem:
    """What there is to win and to lose under one distribution of successes."""

    def __init__(self, successes_S: Floats, looks: Looks, keeps: Decision) -> None:
        """Args:
        successes_S: P(S = s).
        keeps: select's rule.
        """
        size = looks.num_samples
        self._looks = looks
        self._keeps = [np.array([samples > 0 and keeps(samples, s) for s in range(samples + 1)]) for samples in range(size + 1)]
        # Chance of one given order of n samples, and of that order and all K being kept, or dropped.
        order = successes_S / np.array([comb(size, s) for s in range(size + 1)], dtype=np.float64)
        kept, dropped = order * self._keeps[size], order * ~self._keeps[size]
        self._order: list[Floats] = [np.empty(0)] * size
        self._wrong: list[Floats] = [np.empty(0)] * size
        for samples in reversed(range(size)):
            order, kept, dropped = (one[:-1] + one[1:] for one in (order, kept, dropped))
            self._order[samples] = order
            self._wrong[samples] = np.where(self._keeps[samples], dropped, kept)

    def rules(self) -> Iterator[Stops]:
        """The cheapest rules for a growing price of a wrong decision, each once; the last one stops only where no decision can change."""
        last: frozenset[tuple[int, int]] | None = None
        for price in _PRICES:
            stopped = self._cheapest(price)
            states = frozenset((samples, int(s)) for samples, mask in enumerate(stopped) for s in np.flatnonzero(mask))
            if states != last:
                yield self.judged(states)
            last = states

    def judged(self, states: frozenset[tuple[int, int]]) -> Stops:
        """A rule that stops at these states, by the successes of all K samples: paths to each stop over the paths there are."""
        size, ways = self._looks.num_samples, _ways(self._looks.num_samples)
        samples_S, differing_S, paths = np.zeros(size + 1), np.zeros(size + 1), np.ones(1)
        for samples in range(size):
            ending = paths * np.array([(samples, s) in states for s in range(samples + 1)])
            if ending.any():
                chances = ending[:, None] * ways[samples]
                samples_S += samples * chances.sum(axis=0)
                differing_S += (chances * (self._keeps[samples][:, None] != self._keeps[size])).sum(axis=0)
            going = paths - ending
            paths = np.concatenate([going, [0.0]]) + np.concatenate([[0.0], going])
        return Stops(states, samples_S + size * paths / np.array([comb(size, s) for s in range(size + 1)], dtype=np.float64), differing_S)

    def _cheapest(self, price: float) -> list[npt.NDArray[np.bool_]]:
        """Backward induction: where stopping costs no more than going on, cost = samples + price * (decided otherwise), each by its chance."""
        size = self._looks.num_samples
        stopped: list[npt.NDArray[np.bool_]] = [np.zeros(samples + 1, dtype=bool) for samples in range(size)]
        to_come = np.zeros(size + 1)
        for samples in reversed(range(size)):
            going_on = self._order[samples] + to_come[:-1] + to_come[1:]
            if samples in self._looks:
                stopping = price * self._wrong[samples]
                stopped[samples] = stopping <= going_on
                to_come = np.minimum(stopping, going_on)
            else:
                to_come = going_on
        return stopped


@functools.cache
def _ways(size: int) -> list[Floats]:
    """[n][s, S]: chance of one given order of n samples with s successes where S of all K succeed: C(K - n, S - s) / C(K, S)."""
    log_factorial = np.concatenate([[0.0], np.cumsum(np.log(np.arange(1, size + 1)))])
    log_choose = lambda n, k: log_factorial[n] - log_factorial[k] - log_factorial[n - k]  # noqa: E731
    totals = np.arange(size + 1)
    ways: list[Floats] = []
    for samples in range(size):
        left = totals[None] - np.arange(samples + 1)[:, None]
        is_possible = (left >= 0) & (left <= size - samples)
        ways.append(np.where(is_possible, np.exp(log_choose(size - samples, np.clip(left, 0, size - samples)) - log_choose(size, totals)), 0.0))
    return ways
