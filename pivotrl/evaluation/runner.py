"""The `eval` stage: every suite on every checkpoint, scores with intervals, paired differences, a few conversations to read.

One work unit is one suite on one checkpoint, written whole; a killed stage redoes at most one. Output: scores.json and samples.jsonl.
Called by pipeline.py, which opens the samplers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pivotrl.artifacts import EvalUnit, read_artifact
from pivotrl.config.schema import EnvironmentSuite, EvalConfig, HeldOutSuite, SamplingConfig, SkillsSuite, SuiteConfig, WorldConfig, WorldSuite
from pivotrl.errors import InfraLimitError, UserError
from pivotrl.evaluation import suites
from pivotrl.evaluation.named import UNITS as UNITS
from pivotrl.evaluation.named import check_suites
from pivotrl.evaluation.scores import difference_row, gain_row, suite_row
from pivotrl.evaluation.suites import ItemScore, SuiteScores
from pivotrl.progress import progress_bar
from pivotrl.rollouts.engine import EngineError
from pivotrl.rollouts.episodes import EpisodePlayer, Limits
from pivotrl.rollouts.local import LocalSampler, LocalTask
from pivotrl.rundir import Stage, read_json, write_json, write_jsonl
from pivotrl.worlds.protocol import TaskSplit, WorldTask
from pivotrl.worlds.registry import scripted_world

SCORES, SAMPLES, DIAGNOSTICS = "scores.json", "samples.jsonl", "diagnostics.json"
REFERENCE, TRAINED = "reference", "trained"
_SINGLE_TURNS = "held_out"
# Conversations of one suite and checkpoint that are kept to be read.
_NUM_SHOWN = 8


@dataclass(frozen=True, slots=True)
class EvalInputs:
    """What the suites need besides their own settings."""

    checkpoints: Mapping[str, Path]
    """`reference` and `trained`; the difference is trained - reference."""
    open_sampler: Callable[[Path], LocalSampler]
    """Builds a policy from a checkpoint; the stage closes its engine."""
    held_out: Sequence[LocalTask]
    trajectory_of: Mapping[str, str]
    """Trajectory id by candidate id, for the held-out tasks."""
    world: WorldConfig | None
    sampling: SamplingConfig
    max_prompt_tokens: int
    run_seed: int
    open_player: Callable[[LocalSampler], AbstractContextManager[EpisodePlayer[Any]]] | None = None
    """Starts the environment with a policy; None where no suite plays it."""
    environment_rows: Sequence[WorldTask] = ()
    """What it plays."""
    diagnose: Callable[[], Mapping[str, Any]] | None = None
    """Measures what the theory says, after the suites; None: not."""


def run_eval(stage: Stage, config: EvalConfig, inputs: EvalInputs) -> dict[str, Any]:
    """Runs what is missing, writes scores.json and samples.jsonl, finishes the stage and returns the scores.

    Raises:
        UserError: where a suite is named twice, or has nothing to run on.
        InfraLimitError: where the engine fails, or more than `max_infra_frac` of a suite's verdicts are infra; finished suites are kept.
    """
    names = check_suites(config)
    (stage.path / UNITS).mkdir(exist_ok=True)
    missing = [(label, suite) for label in inputs.checkpoints for suite in config.suites if not _unit_path(stage, suite.type, label).exists()]
    cost: Counter[str] = Counter()
    with progress_bar("eval", len(missing), "suites") as bar:
        for label in dict.fromkeys(label for label, _ in missing):
            policy = inputs.open_sampler(inputs.checkpoints[label])
            try:
                for suite in (suite for of, suite in missing if of == label):
                    scored = _run_suite(suite, policy, inputs, config.max_infra_frac)
                    write_json(_unit_path(stage, suite.type, label), {"items": list(map(asdict, scored.items)), "samples": list(scored.samples)})
                    bar.advance(1, f"{suite.type} on {label}")
            finally:
                cost.update(policy.take_cost())
                policy.engine.close()
    scores = _merge(stage, names, inputs)
    stage.finish(outputs=[SCORES, SAMPLES], summary=scores, timing=dict(cost))
    return scores


def _run_suite(suite: SuiteConfig, policy: LocalSampler, inputs: EvalInputs, max_infra_frac: float) -> SuiteScores:
    """One suite on one checkpoint; a dead engine, which leaves nothing to score, is reported as what it is."""
    try:
        return _scored(suite, policy, inputs, max_infra_frac)
    except EngineError as error:
        raise InfraLimitError(f"the engine failed in the {suite.type} suite ({error}); the same command resumes once that is repaired") from error


def _scored(suite: SuiteConfig, policy: LocalSampler, inputs: EvalInputs, max_infra_frac: float) -> SuiteScores:
    limits = Limits(inputs.max_prompt_tokens, inputs.sampling.max_new_tokens, inputs.sampling.temperature)
    match suite:
        case HeldOutSuite():
            tasks = suites.choose_held_out(inputs.held_out, suite.num_candidates)
            if not tasks:
                raise UserError(
                    "eval.suites has a held_out suite but there is no held-out candidate",
                    rule="it needs at least one",
                    fix="raise ingest.held_out_frac or drop the suite",
                )
            return suites.held_out(
                policy,
                tasks,
                trajectory_of=inputs.trajectory_of,
                num_samples=suite.num_samples,
                truncated=inputs.sampling.truncated,
                max_infra_frac=max_infra_frac,
                num_shown=_NUM_SHOWN,
            )
        case WorldSuite():
            assert inputs.world is not None, "the schema demands a world section"
            world = scripted_world(inputs.world.type).world
            tasks = world.tasks(TaskSplit.TEST, num_tasks=inputs.world.num_test_tasks, seed=inputs.run_seed)
            return suites.world_success(
                policy, world, tasks, num_samples=suite.num_samples, limits=limits, run_seed=inputs.run_seed, num_shown=_NUM_SHOWN
            )
        case EnvironmentSuite():
            assert inputs.open_player is not None, "the caller gives one where a suite plays the environment"
            with inputs.open_player(policy) as player:
                return suites.environment_reward(
                    player, inputs.environment_rows, num_samples=suite.num_samples, limits=limits, max_infra_frac=max_infra_frac, num_shown=_NUM_SHOWN
                )
        case SkillsSuite():
            assert inputs.world is not None, "the schema demands a world section"
            name = inputs.world.skills
            return suites.skills(policy, name, num_examples=suite.num_examples, limits=limits, run_seed=inputs.run_seed, num_shown=_NUM_SHOWN)


def _merge(stage: Stage, names: Sequence[str], inputs: EvalInputs) -> dict[str, Any]:
    units = {(name, label): read_artifact(_unit_path(stage, name, label), EvalUnit) for name in names for label in inputs.checkpoints}
    items = {key: [ItemScore(**item) for item in unit["items"]] for key, unit in units.items()}
    samples = [{"suite": name, "checkpoint": label, **sample} for (name, label), unit in units.items() for sample in unit["samples"]]
    scores = {
        "suites": [suite_row(name, label, scored, run_seed=inputs.run_seed) for (name, label), scored in items.items()],
        "differences": [
            _difference(name, items[name, REFERENCE], items[name, TRAINED], inputs.run_seed)
            for name in names
            if {REFERENCE, TRAINED} <= inputs.checkpoints.keys()
        ],
        "turns": sum(item.num_turns for scored in items.values() for item in scored),
    }
    if inputs.diagnose is not None:
        done = stage.path / UNITS / DIAGNOSTICS
        if not done.exists():
            write_json(done, inputs.diagnose())
        scores["diagnostics"] = read_json(done)
    write_jsonl(stage.path / SAMPLES, samples)
    write_json(stage.path / SCORES, scores)
    return scores


def _difference(name: str, before: Sequence[ItemScore], after: Sequence[ItemScore], run_seed: int) -> dict[str, Any]:
    """The paired difference; for single turns also what of it is format and what decision."""
    row = difference_row(name, before, after, run_seed=run_seed)
    gain = gain_row(name, before, after, run_seed=run_seed) if name == _SINGLE_TURNS else None
    return row if gain is None else {**row, "gain": gain}


def _unit_path(stage: Stage, suite: str, label: str) -> Path:
    return stage.path / UNITS / f"{suite}-{label}.json"
