"""The profile stage: K local rollouts of the frozen reference policy for every chosen candidate, Eq. 4, resumable to the byte.

Consumes the candidates and trajectories of `ingest` and a `LocalSampler` that holds the reference policy; produces
profiles.parquet and rollouts.parquet. Called by the pipeline; selects nothing.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from itertools import batched
from typing import Any

from pivotrl.pivots.dataset import PROFILES, ROLLOUTS
from pivotrl.profiling.measure import Measurer, ProfileSettings
from pivotrl.profiling.summary import summarize
from pivotrl.profiling.units import UNITS, Ledger, choose, merge, unit_path, unit_rows
from pivotrl.progress import progress_bar
from pivotrl.rollouts.local import LocalSampler
from pivotrl.rollouts.render import Renderer
from pivotrl.rundir import Stage, read_jsonl, write_jsonl
from pivotrl.trajectories.store import CandidateStore, TrajectoryStore
from pivotrl.types import Candidate


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
    directory = stage.path
    if not (directory / PROFILES).exists():
        num_units = _profile_units(stage, candidates, settings, Measurer(trajectories, sampler, renderer, settings))
        merge(directory, num_units)
    if (directory / UNITS).exists():
        shutil.rmtree(directory / UNITS)
    summary = summarize(directory, run_seed=settings.run_seed, provenance={**provenance, **_generation_provenance(renderer, settings)})
    summary["num_not_asked_for"] = {"message turns": len(candidates) - _num_eligible(candidates, settings)}
    stage.finish(outputs=(PROFILES, ROLLOUTS), summary=summary, timing=sampler.take_verifier_cost())
    return summary


def _profile_units(stage: Stage, candidates: CandidateStore, settings: ProfileSettings, measurer: Measurer) -> int:
    """Profiles every unit that is not on disk yet and returns the number of units."""
    config = settings.profile
    (stage.path / UNITS).mkdir(exist_ok=True)
    num_eligible = _num_eligible(candidates, settings)
    total = num_eligible if config.max_candidates is None else min(config.max_candidates, num_eligible)
    ledger, num_units = Ledger(config.num_samples), 0
    with progress_bar("profile", total, "candidates") as bar:
        for num_units, unit in _numbered_units(candidates, settings):
            path = unit_path(stage.path, num_units - 1)
            if not path.exists():
                rows = unit_rows(measurer.measure(unit))
                ledger.add(rows)
                # Before the unit is written: a unit spoiled by a dead engine is redone after the repair, not kept.
                ledger.check(config.max_infra_frac)
                ledger.check_unit(rows, config.max_infra_frac)
                write_jsonl(path, rows)
                bar.advance(len(unit), ledger.note)
            else:
                ledger.add(read_jsonl(path))
                bar.skip(len(unit))
    return num_units


def _numbered_units(candidates: CandidateStore, settings: ProfileSettings) -> Iterator[tuple[int, tuple[Candidate, ...]]]:
    chosen = choose(_eligible(candidates, settings), settings.profile.max_candidates, run_seed=settings.run_seed)
    return enumerate(batched(chosen, settings.profile.unit_candidates), start=1)


def _eligible(candidates: CandidateStore, settings: ProfileSettings) -> Iterator[Candidate]:
    """The candidates that the recipe asks for (`profile.expert_actions`)."""
    wants_calls = settings.profile.expert_actions == "calls"
    return (candidate for candidate in candidates.iterate() if candidate.expert_action.tool_calls or not wants_calls)


def _num_eligible(candidates: CandidateStore, settings: ProfileSettings) -> int:
    """Costs a pass over the candidates only where the recipe leaves some out."""
    return len(candidates) if settings.profile.expert_actions == "all" else sum(1 for _ in _eligible(candidates, settings))


def _generation_provenance(renderer: Renderer, settings: ProfileSettings) -> dict[str, Any]:
    return {
        "tokenizer_hash": renderer.tokenizer_hash,
        "template_hash": renderer.template_hash,
        "prefix_stable": renderer.prefix_stable,
        "sampling": settings.sampling.model_dump(mode="json"),
        "num_samples": settings.profile.num_samples,
        "max_prompt_tokens": settings.max_prompt_tokens,
    }
