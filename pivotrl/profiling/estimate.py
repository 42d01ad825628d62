"""What a whole profile will take, from some of its units: rollouts, tokens and time with intervals. Writes nothing.

Called by verbs/profile.py.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass

from pivotrl.identity import derive_seed
from pivotrl.pivots.dataset import profile_row
from pivotrl.pivots.select import decision_of
from pivotrl.pivots.statistics import ClusteredMean, Interval
from pivotrl.profiling.adaptive import StageSize, counts_of, pilot_size, rule_for
from pivotrl.profiling.measure import Measured, Measurer, ProfileSettings
from pivotrl.profiling.units import Work
from pivotrl.progress import progress_bar

ROLLOUTS, PROMPT_TOKENS, GENERATED_TOKENS, WORKER_S = "rollouts", "prompt tokens", "generated tokens", "worker seconds"
# The first unit also compiles and fills caches; with so many it is left out of the time.
_MIN_TIMED_UNITS = 3


@dataclass(frozen=True, slots=True)
class Estimate:
    """Totals of the stage with 95 % intervals, whole units resampled."""

    num_candidates: int
    """Of the whole stage."""
    num_sampled: int
    num_units: int
    """Units that were profiled for the estimate."""
    totals: Mapping[str, Interval]
    """By `ROLLOUTS`, `PROMPT_TOKENS` (each candidate's prompt once, as with a prefix cache), `GENERATED_TOKENS` and `WORKER_S`."""
    adaptive_share: float
    """Samples of a candidate over K that adaptive K is expected to draw; 1 where the recipe has none."""


def estimate(work: Work, measurer: Measurer, settings: ProfileSettings, num_candidates: int) -> Estimate:
    """Profiles whole units, drawn by hash, that hold `num_candidates`, and scales what they took to the stage.

    With adaptive K the units get all K samples, and rollouts, generated tokens and time are scaled by what its rule is expected to draw.
    """
    numbers = work.drawn(num_candidates, "estimate")
    means = {name: ClusteredMean() for name in (ROLLOUTS, PROMPT_TOKENS, GENERATED_TOKENS, WORKER_S)}
    measured: list[Measured] = []
    with progress_bar("estimate", work.num_candidates(numbers), "candidates") as bar:
        for position, (number, unit) in enumerate(work.units(numbers)):
            started_s = time.monotonic()
            new = measurer.measure(unit)
            seconds = (time.monotonic() - started_s) / len(unit)
            for one in new:
                means[ROLLOUTS].add(number, len(one.samples))
                means[PROMPT_TOKENS].add(number, len(one.profiled.profile.prompt_token_ids) if one.samples else 0)
                means[GENERATED_TOKENS].add(number, sum(len(sample.rollout.completion.token_ids) for sample in one.samples))
                if position or len(numbers) < _MIN_TIMED_UNITS:
                    means[WORKER_S].add(number, seconds)
            measured += new
            bar.advance(len(unit))
    total = work.num_candidates(range(work.num_units))
    share = _adaptive_share(measured, settings, total)
    totals: dict[str, Interval] = {}
    for name, mean in means.items():
        interval = mean.interval(seed=derive_seed(settings.run_seed, "profile", "estimate", name))
        scale = total * (1 if name == PROMPT_TOKENS else share)
        totals[name] = Interval(interval.value * scale, interval.low * scale, interval.high * scale, interval.n)
    return Estimate(total, len(measured), len(numbers), totals, share)


def _adaptive_share(measured: list[Measured], settings: ProfileSettings, num_candidates: int) -> float:
    """Of the whole stage, its pilot included; the rule is made of what was measured here, as if that were the pilot."""
    config, num_samples = settings.profile.adaptive, settings.profile.num_samples
    if config is None:
        return 1.0
    assert settings.select is not None
    size = StageSize(len(measured), num_candidates - len(measured))
    counts, seed = counts_of(profile_row(one.profiled) for one in measured), derive_seed(settings.run_seed, "profile", "estimate", "adaptive")
    rule = rule_for(config, num_samples, decision_of(settings.select), counts, size, seed=seed)
    pilot_frac = pilot_size(config, num_candidates) / num_candidates
    return pilot_frac + (1 - pilot_frac) * rule.expected_samples / num_samples
