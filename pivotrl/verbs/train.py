"""The stage `train`, wired: GRPO on pivots, or on whole episodes of a world or an environment where the recipe has `train.episodes`.

The work is in pivotrl/training/. Called by pipeline.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from pivotrl import build
from pivotrl.config.environment import WHERE_PLAYED
from pivotrl.config.load import LoadedRecipe
from pivotrl.config.schema import Recipe
from pivotrl.identity import content_id
from pivotrl.pipeline import checkpoint_hash, open_stage, template_hash
from pivotrl.pivots.dataset import PivotStore
from pivotrl.profiling.tasks import local_tasks
from pivotrl.rollouts.episodes import EpisodePlayer, WorldPlayer
from pivotrl.rollouts.local import LocalSampler
from pivotrl.rundir import Stage, output_hash
from pivotrl.training.ahead import sampling_ahead
from pivotrl.training.checks import Checks
from pivotrl.training.curve import SuccessCurve
from pivotrl.training.episodes import EpisodeSource, check_amount, training_tasks
from pivotrl.training.parity import gated
from pivotrl.training.sources import PivotSource
from pivotrl.training.stages import run_train
from pivotrl.training.validation import Validation
from pivotrl.trajectories.store import CandidateStore, TrajectoryStore
from pivotrl.types import Split
from pivotrl.verbs.reprofile import pivot_sets, training_alone
from pivotrl.worlds.protocol import TaskSplit, WorldTask
from pivotrl.worlds.registry import scripted_world

_SECTIONS = ("train", "render", "engine", "sampling", "verifier", "num_threads")


def run_train_stage(loaded: LoadedRecipe, run: Path) -> None:
    """Trains to the end of the recipe; resumes an interrupted stage.

    Raises:
        UserError: where another process trains in the run, or an earlier stage has not been run.
    """
    recipe = loaded.recipe
    if recipe.plays_environment:
        # The first stage of its run.
        run.mkdir(parents=True, exist_ok=True)
    else:
        Stage.require(run, "select" if recipe.train.episodes is None else "ingest")
    with training_alone(run):
        if recipe.train.episodes is None:
            _train_on_pivots(loaded, run)
        elif recipe.environment is None:
            _train_on_episodes(loaded, run)
        else:
            _train_in_environment(loaded, run)


def _train_on_pivots(loaded: LoadedRecipe, run: Path) -> None:
    recipe, config = loaded.recipe, loaded.recipe.train
    select_dir, ingest_dir, reference = Stage.require(run, "select"), Stage.require(run, "ingest"), build.reference_checkpoint(loaded, run)
    inputs = {"select": output_hash(select_dir), "reference": checkpoint_hash(reference), "chat_template": template_hash(loaded, run)}
    sections = (*_SECTIONS, "world") if config.curve is not None else _SECTIONS
    stage = open_stage(loaded, run, "train", sections, inputs)
    if stage is None:
        return
    build.set_threads(loaded)
    pivots, trajectories = PivotStore.open(select_dir), TrajectoryStore.open(ingest_dir)
    with build.open_sampler(loaded, run, reference) as sampler:
        tasks = local_tasks(pivots.pivots, trajectories)
        source = PivotSource(
            sampler,
            tasks,
            config=config,
            sampling=recipe.sampling,
            decode=sampler.renderer.decode,
            seed=recipe.seed,
            weight_sync=recipe.weight_sync,
            sets=pivot_sets(loaded, run, sampler, tasks),
        )
        held_out = local_tasks(pivots.held_out, trajectories)
        validation = None
        if config.validation is not None:
            limits = {"truncated": recipe.sampling.truncated, "max_infra_frac": config.max_infra_frac}
            validation = Validation(sampler, held_out, config.validation, **limits, seed=recipe.seed)
        trainer = build.trainer(loaded, reference, config, with_reference=config.kl.beta > 0)
        with sampling_ahead(source, config) as ahead:
            rounds = gated(ahead, sampler, tasks, trainer, recipe=recipe, scratch_dir=stage.path)
            run_train(stage, trainer, rounds, config=config, sampling=recipe.sampling, checks=Checks(validation, _curve(recipe, sampler)))


def _train_on_episodes(loaded: LoadedRecipe, run: Path) -> None:
    recipe, config = loaded.recipe, loaded.recipe.train
    assert recipe.world is not None, "the schema demands a world section"
    ingest_dir, reference = Stage.require(run, "ingest"), build.reference_checkpoint(loaded, run)
    inputs = {"ingest": output_hash(ingest_dir), "reference": checkpoint_hash(reference), "chat_template": template_hash(loaded, run)}
    stage = open_stage(loaded, run, "train", (*_SECTIONS, "world"), inputs)
    if stage is None:
        return
    world = scripted_world(recipe.world.type).world
    train_ids = frozenset(one.task_id for one in CandidateStore.open(ingest_dir).iterate() if one.split is Split.TRAIN)
    drawn = world.tasks(TaskSplit.TRAIN, num_tasks=recipe.world.num_train_tasks, seed=recipe.seed)
    tasks = training_tasks(drawn, train_ids, config=config)
    build.set_threads(loaded)
    with build.open_sampler(loaded, run, reference) as sampler:
        _learn(loaded, stage, sampler, WorldPlayer(world, sampler.engine, sampler.renderer, run_seed=recipe.seed), tasks, reference)


def _train_in_environment(loaded: LoadedRecipe, run: Path) -> None:
    recipe, reference = loaded.recipe, build.reference_checkpoint(loaded, run)
    rows = build.environment_rows(loaded, run, "train_rows")
    check_amount(rows, recipe.train)
    inputs = {"rows": content_id([row.id for row in rows]), "reference": checkpoint_hash(reference), "chat_template": template_hash(loaded, run)}
    stage = open_stage(loaded, run, "train", (*_SECTIONS, "environment"), inputs, WHERE_PLAYED)
    if stage is None:
        return
    build.set_threads(loaded)
    with build.open_sampler(loaded, run, reference) as sampler, build.open_player(loaded, run, rows, sampler) as player:
        _learn(loaded, stage, sampler, player, rows, reference)


def _learn[TaskT: WorldTask](
    loaded: LoadedRecipe, stage: Stage, sampler: LocalSampler, player: EpisodePlayer[TaskT], tasks: Sequence[TaskT], reference: Path
) -> None:
    """End-to-end RL on tasks."""
    recipe, config = loaded.recipe, loaded.recipe.train
    source = EpisodeSource(
        sampler,
        player,
        tasks,
        config=config,
        sampling=recipe.sampling,
        max_prompt_tokens=recipe.render.max_prompt_tokens,
        seed=recipe.seed,
        weight_sync=recipe.weight_sync,
    )
    trainer = build.trainer(loaded, reference, config, with_reference=config.kl.beta > 0)
    run_train(stage, trainer, source, config=config, sampling=recipe.sampling, checks=Checks(curve=_curve(recipe, sampler)))


def _curve(recipe: Recipe, sampler: LocalSampler) -> SuccessCurve | None:
    if recipe.train.curve is None:
        return None
    assert recipe.world is not None, "the schema demands a world section"
    limits = {"sampling": recipe.sampling, "max_prompt_tokens": recipe.render.max_prompt_tokens}
    return SuccessCurve(sampler, recipe.train.curve, world=recipe.world, **limits, seed=recipe.seed)
