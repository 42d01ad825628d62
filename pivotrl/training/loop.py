"""Algorithm 1 of the paper, and SFT, as one loop: a source gives a step's data, the trainer learns from them, the policy is published.

Step s is the policy after s optimizer steps: row s of the metrics holds its scores, the rollouts it sampled and the
update made from them. SFT, PivotRL and every ablation differ in the source and the loss passed in, never here. Called by
training/stages.py; everything on disk (metrics, rollouts, ledger, checkpoints) is the record's.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from pivotrl.objective.microbatch import LossFunction, MicroBatch
from pivotrl.training.checks import Checks
from pivotrl.training.metrics import Stopwatch, objective_metrics
from pivotrl.training.protocols import PolicyTrainer, Source
from pivotrl.training.record import RunRecord


@dataclass(frozen=True, slots=True)
class LoopPlan:
    """How long the loop runs and what it does besides stepping.

    >>> LoopPlan(10, 1, 5, 1.0, needs_reference=False).is_due(5, every=5)
    True
    """

    num_steps: int
    updates_per_rollout: int
    checkpoint_every: int
    temperature: float
    needs_reference: bool

    def is_due(self, step: int, *, every: int) -> bool:
        """Whether a multiple of `every` was reached by the round that ended at `step`; always at the first and last step."""
        return step in (0, self.num_steps) or step // every > (step - self.updates_per_rollout) // every


def run_loop(trainer: PolicyTrainer, source: Source, loss: LossFunction, plan: LoopPlan, record: RunRecord, checks: Checks) -> None:
    """Runs to the last step or an early stop, from the latest checkpoint where there is one."""
    if (position := record.resume(trainer)) is not None:
        source.resume(trainer, position)

    while True:
        step, watch = trainer.steps_done, Stopwatch()
        scores = checks.book(trainer, plan, record)
        if step >= plan.num_steps or record.is_stopped_early:
            return record.log_last(step, scores)

        with watch.span("rollout"):
            data = source.batch(step)

        with watch.span("train"):
            micro_batches = data.micro_batches
            if plan.needs_reference:
                micro_batches = _with_reference(trainer, micro_batches, plan.temperature)
            if plan.updates_per_rollout > 1:
                micro_batches = _with_old(trainer, micro_batches, plan.temperature)
            results = [trainer.step(micro_batches, loss, temperature=plan.temperature) for _ in range(plan.updates_per_rollout)]

        with watch.span("sync"):
            source.publish(trainer, trainer.steps_done)

        is_due = plan.is_due(trainer.steps_done, every=plan.checkpoint_every)
        drift = {"optim/parameter_drift/mean": trainer.parameter_drift()} if is_due else {}
        record.log(step, data, {**scores, **data.metrics, **objective_metrics(results), **drift, **watch.metrics(data, results)})
        if is_due or record.is_asked_to_stop:
            record.save(trainer, source.position())


def _with_reference(trainer: PolicyTrainer, micro_batches: list[MicroBatch], temperature: float) -> list[MicroBatch]:
    logprobs = trainer.token_logprobs(micro_batches, temperature=temperature, reference=True)
    return [replace(batch, reference_logprobs_B_T=values) for batch, values in zip(micro_batches, logprobs, strict=True)]


def _with_old(trainer: PolicyTrainer, micro_batches: list[MicroBatch], temperature: float) -> list[MicroBatch]:
    logprobs = trainer.token_logprobs(micro_batches, temperature=temperature, reference=False)
    return [replace(batch, old_logprobs_B_T=values) for batch, values in zip(micro_batches, logprobs, strict=True)]
