"""The profile stage: K local rollouts of the frozen reference policy for every chosen candidate, Eq. 4, resumable to the byte.

Consumes the candidates and trajectories of `ingest` and a `LocalSampler` that holds the reference policy; produces
profiles.parquet and rollouts.parquet. Any number of processes may work on one stage, each on its shard (`profile_units`);
one of them, or a later call, does what is missing and finishes (`run_profile`). Called by the pipeline; selects nothing.
"""

from __future__ import annotations

import math
import shutil
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pivotrl.artifacts import UnitRow, read_artifact_lines
from pivotrl.config.profiling import AdaptiveConfig
from pivotrl.identity import derive_seed
from pivotrl.locks import NumberedLocks
from pivotrl.pivots.dataset import PROFILES, ROLLOUTS
from pivotrl.pivots.parquet import read_rows
from pivotrl.pivots.select import decision_of
from pivotrl.profiling.adaptive import ADAPTIVE, StageSize, StoppingRule, counts_of, differing_estimate, pilot_size, read_rule, rule_for, write_rule
from pivotrl.profiling.measure import Measurer, ProfileSettings
from pivotrl.profiling.shards import WHOLE, Shard
from pivotrl.profiling.summary import summarize
from pivotrl.profiling.units import UNITS, Ledger, Work, add_timing, locks_path, merge, total_timing, unit_path, unit_rows
from pivotrl.progress import ProgressBar, progress_bar
from pivotrl.rollouts.local import LocalSampler
from pivotrl.rollouts.render import Renderer
from pivotrl.rundir import Stage, write_jsonl
from pivotrl.trajectories.store import CandidateStore, TrajectoryStore
from pivotrl.types import Candidate

# Beyond every unit's number: the lock on adaptive.json.
_RULE_LOCK = 1 << 40


def run_profile(
    stage: Stage,
    *,
    candidates: CandidateStore,
    trajectories: TrajectoryStore,
    sampler: LocalSampler,
    renderer: Renderer,
    settings: ProfileSettings,
    provenance: Mapping[str, Any],
) -> dict[str, Any]:
    """Profiles both splits, finishes the stage and returns its summary.

    Killed at any moment, the same call redoes at most one unit and ends with the same bytes.

    Args:
        provenance: what the pivot set is specific to and only the caller knows (policy hash, verifier); tokenizer, template
            and generation settings are added here.

    Raises:
        InfraLimitError: where more than `max_infra_frac` of the verdicts, or half of one unit's, are infra; finished units are kept.
    """
    profile_units(stage, WHOLE, candidates=candidates, trajectories=trajectories, sampler=sampler, renderer=renderer, settings=settings)
    return finish_profile(stage, candidates=candidates, renderer=renderer, settings=settings, provenance=provenance)


def profile_units(
    stage: Stage,
    shard: Shard,
    *,
    candidates: CandidateStore,
    trajectories: TrajectoryStore,
    sampler: LocalSampler,
    renderer: Renderer,
    settings: ProfileSettings,
) -> None:
    """Profiles the units of one shard that are not on disk; returns when all of them are, whoever made them.

    Other processes may work on the same stage, under any number of shards: a unit is made by one at a time, a second process
    leaves it to the first and waits for it at the end, and takes it over where the first one dies.

    Raises:
        InfraLimitError: as `run_profile`.
    """
    if (stage.path / PROFILES).exists():
        return
    (stage.path / UNITS).mkdir(exist_ok=True)
    work, started_s = Work(candidates, settings), time.monotonic()
    numbers = work.numbers(shard)
    title = "profile" if shard == WHOLE else f"profile {shard.index}/{shard.count}"
    with NumberedLocks(locks_path(stage.path)) as locks, progress_bar(title, work.num_candidates(numbers), "candidates") as bar:
        worker = _Worker(stage, work, Measurer(trajectories, sampler, renderer, settings), settings, locks, bar)
        worker.make_all(numbers)
    if (stage.path / UNITS).exists():
        add_timing(stage.path, shard, {"worker_s": round(time.monotonic() - started_s, 3), **sampler.take_cost()})


def finish_profile(
    stage: Stage, *, candidates: CandidateStore, renderer: Renderer, settings: ProfileSettings, provenance: Mapping[str, Any]
) -> dict[str, Any]:
    """Merges the units, all of which must be on disk, finishes the stage and returns its summary. Needs no engine."""
    directory, work = stage.path, Work(candidates, settings)
    timing = total_timing(directory)
    if not (directory / PROFILES).exists():
        merge(directory, work.num_units)
    if (directory / UNITS).exists():
        shutil.rmtree(directory / UNITS)
    summary = summarize(
        directory,
        run_seed=settings.run_seed,
        provenance={**provenance, **_generation_provenance(renderer, settings)},
        min_samples=settings.profile.adaptive.min_samples if settings.profile.adaptive else None,
    )
    summary["num_not_asked_for"] = {"message turns" if settings.with_held_out else "message turns and held-out turns": work.num_not_asked_for}
    outputs = [PROFILES, ROLLOUTS]
    if settings.profile.adaptive is not None:
        outputs.append(ADAPTIVE)
        assert settings.select is not None
        rule, counts = read_rule(directory), counts_of(read_rows(directory / PROFILES, ("rewards", "quarantine_reason")))
        estimated = differing_estimate(rule, decision_of(settings.select), counts)
        figures = {"risk": settings.profile.adaptive.risk, **rule.figures(), "estimated_differing_frac": None if math.isnan(estimated) else estimated}
        summary["adaptive"] = figures
    stage.finish(outputs=outputs, summary=summary, timing=timing)
    return summary


class _Worker:
    """One process at work on the units of one stage."""

    def __init__(self, stage: Stage, work: Work, measurer: Measurer, settings: ProfileSettings, locks: NumberedLocks, bar: ProgressBar) -> None:
        self._directory, self._work, self._measurer, self._locks, self._bar = stage.path, work, measurer, locks, bar
        self._settings, self._max_infra_frac = settings, settings.profile.max_infra_frac
        self._rule: StoppingRule | None = None
        self._booked: set[int] = set()
        self._ledger = Ledger(settings.profile.num_samples)

    def make_all(self, numbers: frozenset[int]) -> None:
        """Returns when all these units are on disk; with adaptive K also those of the first pass, which every worker waits for."""
        if (adaptive := self._settings.profile.adaptive) is not None and not (self._directory / ADAPTIVE).exists():
            pilot = self._work.drawn(pilot_size(adaptive, self._work.num_candidates(range(self._work.num_units))), "pilot")
            self._make(pilot)
            self._locks.acquire(_RULE_LOCK)
            if not (self._directory / ADAPTIVE).exists():
                self._write_rule(adaptive, pilot)
            self._locks.release(_RULE_LOCK)
        self._rule = read_rule(self._directory) if adaptive is not None else None
        self._make(numbers)

    def _write_rule(self, config: AdaptiveConfig, pilot: frozenset[int]) -> None:
        """A function of the recipe and of the pilot's counts, so that it does not matter which worker writes it."""
        settings, work = self._settings, self._work
        assert settings.select is not None
        counts = counts_of(row["profile"] for number in sorted(pilot) for row in read_artifact_lines(self._path(number), UnitRow))
        num_pilot = work.num_candidates(pilot)
        size = StageSize(num_pilot, work.num_candidates(range(work.num_units)) - num_pilot)
        seed = derive_seed(settings.run_seed, *settings.place, "adaptive")
        rule = rule_for(config, settings.profile.num_samples, decision_of(settings.select), counts, size, seed=seed)
        write_rule(self._directory / ADAPTIVE, rule, counts)

    def _make(self, numbers: frozenset[int]) -> None:
        if left := self._pass_over(numbers, waits=False):
            self._pass_over(left, waits=True)

    def _pass_over(self, numbers: frozenset[int], *, waits: bool) -> frozenset[int]:
        """Makes the units that are missing and free, or with `waits` all that are missing; returns those left to others."""
        left: set[int] = set()
        for number, unit in self._work.units(numbers):
            if waits:
                self._locks.acquire(number)
            elif not self._locks.try_acquire(number):
                left.add(number)
                continue
            try:
                self._make_one(number, unit)
            finally:
                self._locks.release(number)
        return frozenset(left)

    def _make_one(self, number: int, unit: tuple[Candidate, ...]) -> None:
        path = self._path(number)
        if number in self._booked:
            return
        if path.exists():
            self._ledger.add(read_artifact_lines(path, UnitRow))
            self._booked.add(number)
            self._bar.skip(len(unit))
            return
        if (self._directory / PROFILES).exists():
            return  # Another process merged everything while this one waited.
        rows = unit_rows(self._measurer.measure(unit, self._rule))
        self._ledger.add(rows)
        # Before the unit is written: a unit spoiled by a dead engine is redone after the repair, not kept.
        self._ledger.check(self._max_infra_frac)
        self._ledger.check_unit(rows, self._max_infra_frac)
        write_jsonl(path, rows)
        self._booked.add(number)
        self._bar.advance(len(unit), self._ledger.note)

    def _path(self, number: int) -> Path:
        return unit_path(self._directory, number)


def _generation_provenance(renderer: Renderer, settings: ProfileSettings) -> dict[str, Any]:
    return {
        "tokenizer_hash": renderer.tokenizer_hash,
        "template_hash": renderer.template_hash,
        "prefix_stable": renderer.prefix_stable,
        "sampling": settings.sampling.model_dump(mode="json"),
        "num_samples": settings.profile.num_samples,
        "max_prompt_tokens": settings.max_prompt_tokens,
    }
