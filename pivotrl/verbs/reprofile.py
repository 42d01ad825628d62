"""Profiling again while a run trains: the verb `reprofile`, the pivot sets that `train` learns from, and `lineage`, wired.

The rules are in pivotrl/training/pivot_sets.py, the work in pivotrl/profiling/. Called by pipeline.py and cli.py.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from rich.table import Table

from pivotrl import build
from pivotrl.artifacts import Declined, LedgerRow, Selection, SetManifest, StepRow, ValidationRow, read_artifact, read_artifact_lines
from pivotrl.config.load import LoadedRecipe
from pivotrl.config.training import TrainConfig
from pivotrl.console import results_console
from pivotrl.errors import UserError
from pivotrl.identity import content_id
from pivotrl.locks import NumberedLocks
from pivotrl.megatron.directories import is_complete
from pivotrl.observability.sinks import METRICS
from pivotrl.pivots.dataset import SELECTION, PivotStore
from pivotrl.profiling.measure import ProfileSettings
from pivotrl.profiling.profile import run_profile
from pivotrl.profiling.selection import run_select
from pivotrl.profiling.tasks import local_tasks
from pivotrl.rundir import MANIFEST, RESUME_KEY, Stage, output_hash
from pivotrl.training.ledger import LEDGER, VALIDATIONS
from pivotrl.training.pivot_sets import DECLINED, FIRST_SET, PIVOT_SETS, PivotSets, attempts, is_due, lineage, set_dir, spent_reason
from pivotrl.trajectories.store import CandidateStore, TrajectoryStore

if TYPE_CHECKING:
    from pivotrl.rollouts.local import LocalSampler, LocalTask

_TRAIN_LOCK = ".train.lock"
_BY_HAND = "asked for"
_SECTIONS = ("profile", "select", "render", "engine", "sampling", "verifier", "num_threads")


def run_reprofile(loaded: LoadedRecipe, run: Path) -> None:
    """Profiles and selects again with the policy of the last checkpoint of an unfinished `train`, which then goes on with the new pivots.

    Raises:
        UserError: where training runs, is finished or has no checkpoint or no round to come, or the policy leaves too few pivots.
        ValueError, RuntimeError: as `WeightProbe.hand_over`, for weights that did not arrive or are not used.
    """
    from pivotrl.training.checkpoints import Checkpoints
    from pivotrl.training.probe import WeightProbe

    config, train_dir = loaded.recipe.train, run / "train"
    select_dir, ingest_dir = Stage.require(run, "select"), Stage.require(run, "ingest")
    states = train_dir / "checkpoints"
    if Stage.is_done(run, "train") or not states.is_dir() or not any(map(is_complete, states.iterdir())):
        found = "is finished" if Stage.is_done(run, "train") else "has no checkpoint yet"
        raise UserError(
            f"training in {train_dir} {found}",
            rule="reprofile takes the policy of the last checkpoint of a run that is to go on",
            fix="reprofile an interrupted run, or start another run from this one's hf/ with model.path",
        )
    build.set_threads(loaded)
    with training_alone(run):
        reference = build.reference_checkpoint(loaded, run)
        trainer = build.trainer(loaded, reference, config, with_reference=config.kl.beta > 0)
        Checkpoints(train_dir).load_last(trainer)
        with build.open_sampler(loaded, run, reference) as sampler:
            step = trainer.steps_done + sampled_ahead(config)
            if step >= config.num_steps:
                raise UserError(
                    f"training stands at step {trainer.steps_done} of {config.num_steps}",
                    rule="a new set needs a round to come; with max_policy_age 1 the next one is sampled already",
                    fix="raise train.num_steps in another run from this one's hf/, with model.path",
                )
            tasks = local_tasks(PivotStore.open(select_dir).pivots, TrajectoryStore.open(ingest_dir))
            sets = pivot_sets(loaded, run, sampler, tasks)
            recipe = loaded.recipe
            probe = WeightProbe(tasks[0].prompt_token_ids, recipe.weight_sync, temperature=recipe.sampling.temperature, seed=recipe.seed)
            sets.published(probe.hand_over(trainer, sampler.engine, trainer.steps_done).digest)
            if step not in attempts(run / PIVOT_SETS):
                sets.remake(step, _BY_HAND)
    declined = set_dir(run / PIVOT_SETS, step) / DECLINED
    if declined.exists():
        raise UserError(
            f"the policy of step {trainer.steps_done} leaves too few pivots ({read_artifact(declined, Declined)['why']})",
            rule=f"a set needs at least {config.pivots_per_step}",
            fix="train on with the set in force, or profile more candidates in another run",
        )
    sys.stderr.write(f"reprofile: the pivots from step {step} on are in {declined.parent}; `pivotrl train` goes on with them\n")


def pivot_sets(loaded: LoadedRecipe, run: Path, sampler: LocalSampler, first: Sequence[LocalTask]) -> PivotSets:
    """The pivot sets of a run whose policy the sampler's engine holds."""
    recipe, config = loaded.recipe, loaded.recipe.train
    ingest_dir = Stage.require(run, "ingest")
    trajectories = TrajectoryStore.open(ingest_dir)

    def make(directory: Path, step: int, policy_hash: str, reason: str) -> None:
        inputs = {"ingest": output_hash(ingest_dir), "policy": policy_hash}
        config, key = loaded.section(*_SECTIONS), directory / "profile" / RESUME_KEY
        if key.exists() and key.read_text().strip() != content_id(config, inputs, recipe.seed):
            # Unfinished, of the same step and another policy: of a future that was lost.
            shutil.rmtree(directory)
        profile = Stage.open(directory, "profile", config=config, inputs=inputs, seed=recipe.seed)
        if not Stage.is_done(directory, "profile"):
            run_profile(
                profile,
                candidates=CandidateStore.open(ingest_dir),
                trajectories=trajectories,
                sampler=sampler,
                renderer=sampler.renderer,
                settings=ProfileSettings(
                    recipe.profile,
                    recipe.sampling,
                    recipe.render.max_prompt_tokens,
                    recipe.seed,
                    recipe.select,
                    place=("reprofile", step),
                    with_held_out=False,
                ),
                provenance={"policy_hash": policy_hash, "verifier": recipe.verifier.model_dump(mode="json"), "step": step, "reason": reason},
            )
        select = Stage.open(directory, "select", config=loaded.section("select"), inputs={"profile": output_hash(profile.path)}, seed=recipe.seed)
        run_select(select, profile.path, build.select_rule(loaded, run), run_seed=recipe.seed)

    def reason(step: int, since: int) -> str | None:
        if config.reprofile is None or not is_due(step, every=config.checkpoint_every, updates_per_rollout=config.updates_per_rollout):
            return None
        metrics = list(read_artifact_lines(run / "train" / METRICS, StepRow))
        validations = list(read_artifact_lines(run / "train" / VALIDATIONS, ValidationRow))
        return spent_reason(config.reprofile, metrics, validations, since=since, step=step)

    return PivotSets(
        run / PIVOT_SETS,
        first,
        load=lambda select_dir: local_tasks(PivotStore.open(select_dir).pivots, trajectories),
        make=make,
        reason=reason,
        min_pivots=config.pivots_per_step,
        sampled_ahead=sampled_ahead(config),
    )


def sampled_ahead(config: TrainConfig) -> int:
    """Optimizer steps between the policy that samples a round and the round's own step."""
    return config.max_policy_age * config.updates_per_rollout


@contextmanager
def training_alone(run: Path) -> Iterator[None]:
    """One process at a time trains in a run or makes its next pivot set.

    Raises:
        UserError: where another one does.
    """
    with NumberedLocks(run / _TRAIN_LOCK) as locks:
        if not locks.try_acquire(0):
            raise UserError(
                f"another process trains or reprofiles in {run}",
                rule="a run has one trainer, and its pivots change between two calls of it only",
                fix="wait for it or stop it; both resume by the same command",
            )
        yield


def print_lineage(run: Path) -> None:
    """A table: every pivot set of a run, the policy that made it, and the steps that learned from it.

    Raises:
        UserError: where nothing was selected yet.
    """
    Stage.require(run, "select")
    root = run / PIVOT_SETS
    directories = {FIRST_SET: run} | {set_dir(root, step).name: set_dir(root, step) for step in attempts(root)}
    declined = {name for name, directory in directories.items() if (directory / DECLINED).exists()}
    in_force = {name: 0 if name == FIRST_SET else int(name) for name in directories if name not in declined}
    ledger_file = run / "train" / LEDGER
    rows = list(read_artifact_lines(ledger_file, LedgerRow, is_growing=True)) if ledger_file.exists() else []
    if unknown := {row.get("pivot_set", FIRST_SET) for row in rows} - in_force.keys():
        raise UserError(
            f"{ledger_file}: pivot_set is {min(unknown)!r}",
            rule=f"steps learn from the sets that the run holds: {', '.join(in_force)}",
            fix=f"restore {root}, or train again",
        )
    found = {one.name: one for one in lineage(in_force, rows)}
    table = Table(
        "set", "policy", "from step", "rounds learned", "pivots", "of turns", "rollouts", "why", title=str(run), title_justify="left", box=None
    )
    for name, directory in directories.items():
        profile = read_artifact(directory / "profile" / MANIFEST, SetManifest)["summary"]
        provenance, rollouts = profile["provenance"], f"{profile['cost']['turns']:,}"
        if name in declined:
            why = f"{provenance.get('reason', _BY_HAND)}; declined: {read_artifact(directory / DECLINED, Declined)['why']}"
            table.add_row(name, provenance["policy_hash"][:12], str(int(name)), "0", "", "", rollouts, why)
            continue
        selection = read_artifact(directory / "select" / SELECTION, Selection)
        one = found[name]
        why = provenance.get("reason", "the reference policy")
        counts = (f"{one.num_steps:,}", f"{selection['num_pivots']:,}", f"{selection['num_turns']:,}")
        table.add_row(name, provenance["policy_hash"][:12], str(one.from_step), *counts, rollouts, why)
    results_console().print(table)
