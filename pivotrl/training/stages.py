"""The `train` and `sft` stages: the same loop with their own source, loss and plan, ending in hf/ and a finished stage directory.

Called by build; the caller makes trainer, source and checks from the recipe and closes the engine.
"""

from __future__ import annotations

from typing import Any

from pivotrl.config.schema import SamplingConfig, SftConfig, TrainConfig
from pivotrl.config.training import TraceConfig
from pivotrl.objective.grpo import make_grpo_loss
from pivotrl.objective.microbatch import LossFunction
from pivotrl.objective.nll import make_nll_loss
from pivotrl.observability.sinks import METRICS, MetricSink
from pivotrl.progress import progress_bar
from pivotrl.rundir import Stage
from pivotrl.training.checks import Checks
from pivotrl.training.ledger import CURVE, LEDGER, ROLLOUTS, VALIDATIONS
from pivotrl.training.loop import LoopPlan, run_loop
from pivotrl.training.protocols import PolicyTrainer, Source
from pivotrl.training.record import RunRecord
from pivotrl.training.rounds import check_rounds
from pivotrl.training.stopping import StopRequest
from pivotrl.training.trace import StepTrace

# Supervised training imitates the text as it is; only sampling has a temperature.
_SFT_TEMPERATURE = 1.0


def run_train(
    stage: Stage,
    trainer: PolicyTrainer,
    source: Source,
    *,
    config: TrainConfig,
    sampling: SamplingConfig,
    checks: Checks,
) -> dict[str, Any]:
    """GRPO on pivots to the end of the recipe or an early stop; resumes an interrupted stage; returns the manifest's summary.

    Raises:
        UserError: where train.num_steps is not a multiple of train.updates_per_rollout.
        InfraLimitError: from the source or a check.
    """
    check_rounds(config)
    plan = LoopPlan(
        num_steps=config.num_steps,
        updates_per_rollout=config.updates_per_rollout,
        checkpoint_every=config.checkpoint_every,
        temperature=sampling.temperature,
        needs_reference=config.kl.beta > 0,
    )
    return _run(stage, trainer, source, make_grpo_loss(config), plan, config.trace, checks)


def run_sft(stage: Stage, trainer: PolicyTrainer, source: Source, *, config: SftConfig) -> dict[str, Any]:
    """Supervised training (Eq. 1) to the last step; resumes an interrupted stage; returns the manifest's summary."""
    plan = LoopPlan(
        num_steps=config.num_steps,
        updates_per_rollout=1,
        checkpoint_every=config.checkpoint_every,
        temperature=_SFT_TEMPERATURE,
        needs_reference=False,
    )
    return _run(stage, trainer, source, make_nll_loss(), plan, config.trace, Checks())


def _run(
    stage: Stage,
    trainer: PolicyTrainer,
    source: Source,
    loss: LossFunction,
    plan: LoopPlan,
    trace_config: TraceConfig | None,
    checks: Checks,
) -> dict[str, Any]:
    with (
        MetricSink(stage.path) as sink,
        progress_bar(stage.name, plan.num_steps, "steps") as bar,
        StepTrace(stage.path, trace_config) as trace,
        StopRequest(stage.path.parent) as stop,
    ):
        record = RunRecord(stage.path, sink, bar, num_steps=plan.num_steps, updates_per_rollout=plan.updates_per_rollout, trace=trace, stop=stop)
        run_loop(trainer, source, loss, plan, record, checks)
        hf_dir = record.checkpoints.export(trainer, record.best)
    summary = {
        "num_steps": trainer.steps_done,
        "exported_step": record.best.step if record.best else trainer.steps_done,
        "held_out_reward": record.best.mean if record.best else None,
        "is_stopped_early": trainer.steps_done < plan.num_steps,
    }
    exported = [str(path.relative_to(stage.path)) for path in hf_dir.rglob("*") if path.is_file()]
    stage.finish(outputs=[*exported, METRICS, LEDGER, ROLLOUTS, VALIDATIONS, CURVE], summary=summary)
    return summary
