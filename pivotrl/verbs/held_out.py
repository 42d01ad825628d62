"""The held-out turns that the `eval` stage scores, wired: those that the run profiled, or in an SFT baseline those that it would have.

Called by pipeline.py.
"""

from __future__ import annotations

from itertools import batched
from pathlib import Path
from typing import Any

from pivotrl import build
from pivotrl.config.load import LoadedRecipe
from pivotrl.config.schema import HeldOutSuite
from pivotrl.rollouts.local import LocalTask
from pivotrl.rundir import Stage
from pivotrl.types import Split


def held_out_tasks(loaded: LoadedRecipe, run: Path, checkpoint: Path) -> tuple[list[LocalTask], dict[str, str]]:
    """The turns, and the trajectory id of each by its candidate id; none where no suite asks for them and nothing was profiled.

    Args:
        checkpoint: whose tokenizer and template write the prompts of a run without a profile.
    """
    from pivotrl.pivots.dataset import PivotStore
    from pivotrl.profiling.tasks import local_tasks
    from pivotrl.trajectories.store import TrajectoryStore

    recipe = loaded.recipe
    if "select" in recipe.stages:
        pivots = PivotStore.open(Stage.require(run, "select")).held_out
        tasks = local_tasks(pivots, TrajectoryStore.open(Stage.require(run, "ingest")))
        return tasks, {pivot.candidate_id: pivot.trajectory_id for pivot in pivots}
    wanted = [suite.num_candidates for suite in recipe.eval.suites if isinstance(suite, HeldOutSuite)]
    return _unprofiled(loaded, run, checkpoint, max(wanted)) if wanted else ([], {})


def _unprofiled(loaded: LoadedRecipe, run: Path, checkpoint: Path, num_tasks: int) -> tuple[list[LocalTask], dict[str, str]]:
    """The turns that `pivotrl eval` would choose after a profile of the same data: asked for, rendered, short enough, their experts accepted."""
    from pivotrl.evaluation.suites import held_out_rank
    from pivotrl.profiling.measure import Measurer, ProfileSettings
    from pivotrl.profiling.units import Work
    from pivotrl.rollouts.local import LocalSampler
    from pivotrl.trajectories.store import CandidateStore, TrajectoryStore

    recipe, ingest_dir = loaded.recipe, Stage.require(run, "ingest")
    settings = ProfileSettings(recipe.profile, recipe.sampling, recipe.render.max_prompt_tokens, recipe.seed)
    chosen = [one for _, unit in Work(CandidateStore.open(ingest_dir), settings).units() for one in unit if one.split is Split.HELD_OUT]
    # Nothing is sampled here, so no engine is asked.
    no_engine: Any = None
    renderer = build.renderer(loaded, run, checkpoint)
    sampler = LocalSampler(no_engine, renderer, build.verifier(loaded, run), recipe.sampling, recipe.seed)
    measurer = Measurer(TrajectoryStore.open(ingest_dir), sampler, renderer, settings)
    tasks: list[LocalTask] = []
    for unit in batched(sorted(chosen, key=lambda one: held_out_rank(one.id)), recipe.profile.unit_candidates):
        if len(tasks) < num_tasks:
            tasks += measurer.accepted(unit)
    return tasks[:num_tasks], {one.id: one.trajectory_id for one in chosen}
