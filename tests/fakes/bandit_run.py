"""One training stage on the bandit, put together as build puts together the real one."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

from fakes.bandit import MAX_NEW_TOKENS, BanditEngine, BanditSampler, BanditTrainer, bandit_tasks, bandit_text
from fakes.objective_steps import train_config

from pivotrl.config.schema import SamplingConfig, TrainConfig
from pivotrl.rollouts.local import LocalSampler, LocalTask
from pivotrl.rundir import Stage
from pivotrl.training.ahead import sampling_ahead
from pivotrl.training.checks import Checks
from pivotrl.training.curve import SuccessCurve
from pivotrl.training.pivot_sets import PivotSets
from pivotrl.training.sources import PivotSource
from pivotrl.training.stages import run_train
from pivotrl.training.validation import Validation

SEED = 11
NUM_PIVOTS, NUM_HELD_OUT = 5, 3


def sampling_config(truncated: str = "zero", temperature: float = 1.0) -> SamplingConfig:
    return SamplingConfig.model_validate({"temperature": temperature, "max_new_tokens": MAX_NEW_TOKENS, "truncated": truncated})


def bandit_train_config(**changes: object) -> TrainConfig:
    base: dict[str, object] = {"num_steps": 5, "pivots_per_step": 2, "group_size": 6, "checkpoint_every": 2}
    return train_config(**{**base, **changes})


@dataclasses.dataclass
class VersionCurve:
    """Whose value is the version of the policy that it measured."""

    every_steps: int
    engine: BanditEngine
    on_call: Callable[[str], None]

    def point(self) -> dict[str, Any]:
        self.on_call("curve")
        return {"value": float(self.engine.policy_version), "items": []}


def run_bandit(
    run: Path,
    config: TrainConfig,
    *,
    truncated: str = "zero",
    infra: frozenset[int] = frozenset(),
    on_call: Callable[[str], None] = lambda name: None,
    sets_of: Callable[[Path, Sequence[LocalTask], Callable[[str], None]], PivotSets] | None = None,
) -> tuple[dict[str, Any], BanditTrainer, BanditSampler]:
    """Runs (or resumes) RUN/train to its end; returns summary, trainer and sampler."""
    # Not Stage.open: it asks git for the commit, which takes longer than the run and changes while others work in the checkout.
    stage = Stage("train", run / "train", {"stage": "train", "config": config.model_dump(mode="json"), "seed": SEED}, started_s=0.0)
    stage.path.mkdir(parents=True, exist_ok=True)
    sampling = sampling_config(truncated)
    trainer, sampler = BanditTrainer(on_call=on_call), BanditSampler(BanditEngine(), run_seed=SEED, infra=infra, on_call=on_call)
    tasks = bandit_tasks(NUM_PIVOTS)
    face = cast(LocalSampler, sampler)
    sets = sets_of(run, tasks, on_call) if sets_of is not None else None
    source = PivotSource(face, tasks, config=config, sampling=sampling, decode=bandit_text, seed=SEED, sets=sets)
    validation = None
    if config.validation is not None:
        # Other ids, so other random numbers, but states the table can learn.
        held_out = [dataclasses.replace(task, candidate_id=f"held-out-{i}") for i, task in enumerate(tasks[:NUM_HELD_OUT])]
        validation = Validation(face, held_out, config.validation, truncated=sampling.truncated, max_infra_frac=config.max_infra_frac, seed=SEED)
    curve = None if config.curve is None else cast(SuccessCurve, VersionCurve(config.curve.every_steps, sampler.engine, on_call))
    with sampling_ahead(source, config) as rounds:
        summary = run_train(stage, trainer, rounds, config=config, sampling=sampling, checks=Checks(validation, curve))
    return summary, trainer, sampler


def data_bytes(run: Path) -> dict[str, bytes]:
    """Every file of the stage that may not depend on the clock or on interruptions."""
    stage = run / "train"
    timing = ("timing.json", "timing.jsonl", "record.json")
    return {str(path.relative_to(stage)): path.read_bytes() for path in sorted(stage.rglob("*")) if path.is_file() and path.name not in timing}
