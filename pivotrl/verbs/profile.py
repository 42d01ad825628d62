"""The verb `profile`, wired: one process, or one shard of several, or the local workers that the recipe asks for.

The work is in pivotrl/profiling/. Called by pipeline.py and cli.py.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from rich.table import Table

from pivotrl import build
from pivotrl.config.engines import RemotePlacement
from pivotrl.config.load import LoadedRecipe
from pivotrl.console import results_console
from pivotrl.errors import UserError
from pivotrl.locks import exclusive
from pivotrl.pipeline import LOCK, checkpoint_hash, open_stage, prepare, template_hash
from pivotrl.profiling.estimate import WORKER_S, estimate
from pivotrl.profiling.measure import Measurer, ProfileSettings
from pivotrl.profiling.profile import finish_profile, profile_units
from pivotrl.profiling.shards import WHOLE, Shard
from pivotrl.profiling.units import Work
from pivotrl.profiling.workers import run_workers
from pivotrl.rundir import Stage, output_hash
from pivotrl.trajectories.store import CandidateStore, TrajectoryStore


def run_profile_stage(loaded: LoadedRecipe, run: Path) -> None:
    """Does what is missing of the stage, with `profile.num_workers` processes, and finishes it."""
    work = ProfileRun(loaded, run)
    if (stage := work.open()) is None:
        return
    if (num_workers := loaded.recipe.profile.num_workers) > 1:
        run_workers([_worker_command(loaded, run, Shard(index, num_workers)) for index in range(num_workers)], stage, work.candidates, work.settings)
        renderer = build.renderer(loaded, run, work.reference)
    else:
        renderer = work.profile_units(stage, WHOLE)
    with exclusive(run / LOCK):
        if not Stage.is_done(run, stage.name):
            finish_profile(stage, candidates=work.candidates, renderer=renderer, settings=work.settings, provenance=work.provenance)


def run_shard(text: str, loaded: LoadedRecipe, run: Path) -> None:
    """Profiles one shard and leaves merging to a call without one.

    Raises:
        UserError: for a shard that is none or that would share remote engines with others, or where an earlier stage has not been run.
    """
    shard = Shard.parse(text)
    if isinstance(loaded.recipe.placement, RemotePlacement) and shard.count > 1:
        raise UserError(
            f"--shard is {text} and placement.type is remote",
            rule="engines find one process of a run, whose address is RUN/engines/address; shards each need engines of their own",
            fix="profile without --shard, or with placement.type=in_process",
        )
    prepare("profile", loaded, run)
    work = ProfileRun(loaded, run)
    if (stage := work.open()) is None:
        sys.stderr.write(f"profile: finished before, kept ({run / 'profile'})\n")
    else:
        work.profile_units(stage, shard)


def print_estimate(num_candidates: int, loaded: LoadedRecipe, run: Path) -> None:
    """What the whole profile would take, from about `num_candidates` of it; writes nothing into the stage.

    Raises:
        UserError: where an earlier stage has not been run.
    """
    prepare("profile", loaded, run)
    work = ProfileRun(loaded, run)
    build.set_threads(loaded)
    with build.open_sampler(loaded, run, work.reference) as sampler:
        measurer = Measurer(TrajectoryStore.open(work.ingest_dir), sampler, sampler.renderer, work.settings)
        found = estimate(Work(work.candidates, work.settings), measurer, work.settings, num_candidates)
    num_workers = loaded.recipe.profile.num_workers
    title = f"profile of {found.num_candidates:,} candidates, from {found.num_sampled:,} in {found.num_units} units"
    table = Table("", "expected", "95 % interval", title=title, title_justify="left", box=None)
    for name, interval in found.totals.items():
        table.add_row(name, f"{interval.value:,.0f}", f"{interval.low:,.0f} - {interval.high:,.0f}")
    seconds = found.totals[WORKER_S]
    hours = [value / 3600 / num_workers for value in (seconds.value, seconds.low, seconds.high)]
    table.add_row(f"hours with {num_workers} workers", f"{hours[0]:,.3f}", f"{hours[1]:,.3f} - {hours[2]:,.3f}")
    results_console().print(table)
    if found.adaptive_share < 1:
        results_console().print(f"adaptive K is expected to draw {100 * found.adaptive_share:.1f} % of K samples; counted above")


@dataclass(frozen=True)
class ProfileRun:
    """What the profile stage of one run reads, each opened when it is first asked for."""

    loaded: LoadedRecipe
    run: Path

    def open(self) -> Stage | None:
        """The stage's directory opened for work, or None where it is finished.

        Raises:
            UserError: where an earlier stage has not been run.
        """
        if self.loaded.recipe.sft is not None:
            Stage.require(self.run, "sft")
        inputs = {
            "ingest": output_hash(self.ingest_dir),
            "reference": self.policy_hash,
            "chat_template": template_hash(self.loaded, self.run),
        }
        sections = ["profile", "render", "engine", "sampling", "verifier", "num_threads"]
        if self.loaded.recipe.profile.adaptive is not None:
            sections.append("select")
        with exclusive(self.run / LOCK):
            return open_stage(self.loaded, self.run, "profile", sections, inputs, left_out=[("profile", "num_workers")])

    def profile_units(self, stage: Stage, shard: Shard) -> Any:
        """Makes the units of one shard with the reference policy; returns the renderer that it used."""
        build.set_threads(self.loaded)
        with build.open_sampler(self.loaded, self.run, self.reference) as sampler:
            profile_units(
                stage,
                shard,
                candidates=self.candidates,
                trajectories=TrajectoryStore.open(self.ingest_dir),
                sampler=sampler,
                renderer=sampler.renderer,
                settings=self.settings,
            )
        return sampler.renderer

    @cached_property
    def ingest_dir(self) -> Path:
        return Stage.require(self.run, "ingest")

    @cached_property
    def reference(self) -> Path:
        return build.reference_checkpoint(self.loaded, self.run)

    @cached_property
    def policy_hash(self) -> str:
        return checkpoint_hash(self.reference)

    @cached_property
    def candidates(self) -> CandidateStore:
        return CandidateStore.open(self.ingest_dir)

    @property
    def settings(self) -> ProfileSettings:
        recipe = self.loaded.recipe
        return ProfileSettings(recipe.profile, recipe.sampling, recipe.render.max_prompt_tokens, recipe.seed, recipe.select)

    @property
    def provenance(self) -> dict[str, Any]:
        return {"policy_hash": self.policy_hash, "verifier": self.loaded.recipe.verifier.model_dump(mode="json")}


def _worker_command(loaded: LoadedRecipe, run: Path, shard: Shard) -> list[str]:
    words = [str(loaded.directory), *loaded.overrides, "--run", str(run), "--shard", f"{shard.index}/{shard.count}"]
    return [sys.executable, "-m", "pivotrl", "profile", *words]
