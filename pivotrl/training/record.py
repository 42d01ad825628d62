"""Everything a training stage leaves on disk, and how an interrupted one is taken back to its last checkpoint.

Files below the stage: metrics.jsonl and timing.jsonl (the sink's), rollouts.jsonl, ledger.jsonl, validation.jsonl,
curve.jsonl, checkpoints/, best/.
A checkpoint stores the byte length of each file; resuming cuts the files to it, so the steps that are done again write the
same bytes in the same place. One writer; called by the loop.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from pivotrl.errors import StopRequestedError
from pivotrl.observability.sinks import MetricSink, SinkPosition
from pivotrl.progress import ProgressBar
from pivotrl.training.checkpoints import Best, Checkpoints
from pivotrl.training.ledger import CURVE, LEDGER, ROLLOUTS, VALIDATIONS, Ledger
from pivotrl.training.protocols import PolicyTrainer, StepData
from pivotrl.training.stopping import StopRequest
from pivotrl.training.trace import StepTrace
from pivotrl.training.validation import HeldOutScore

_NOTHING_WRITTEN = SinkPosition(metrics_bytes=0, timing_bytes=0)


class RunRecord:
    """The record of one stage; `sink`, `bar`, `trace` and `stop` are the caller's to close."""

    def __init__(
        self,
        stage_dir: Path,
        sink: MetricSink,
        bar: ProgressBar,
        *,
        num_steps: int,
        updates_per_rollout: int,
        trace: StepTrace,
        stop: StopRequest,
    ) -> None:
        self._sink, self._bar, self._num_steps, self._updates_per_rollout = sink, bar, num_steps, updates_per_rollout
        self._ledgers = {name: Ledger(stage_dir / name) for name in (LEDGER, ROLLOUTS, VALIDATIONS, CURVE)}
        self._trace, self._stop = trace, stop
        self.checkpoints = Checkpoints(stage_dir)
        self.best: Best | None = None
        self.is_stopped_early = False

    def resume(self, trainer: PolicyTrainer) -> Mapping[str, Any] | None:
        """Takes trainer and files to the last complete checkpoint and returns the source's position, or empties the files and returns None."""
        state = self.checkpoints.load_last(trainer)
        self._sink.truncate(SinkPosition(**state["sink"]) if state else _NOTHING_WRITTEN)
        for name, ledger in self._ledgers.items():
            ledger.truncate(state["ledgers"][name] if state else 0)
        if state:
            self.best = Best(**state["best"]) if state["best"] else None
            self._bar.skip(trainer.steps_done)
        self._trace.reach(trainer.steps_done)
        return state["source"] if state else None

    def validated(self, trainer: PolicyTrainer, score: HeldOutScore, *, patience: int | None) -> dict[str, float]:
        """Books a validation of the current policy: keeps it where it is the best, stops the run where patience is spent."""
        step = trainer.steps_done
        self.best = self.best.after(step, score.mean.value) if self.best else Best(step, score.mean.value, 0)
        if self.best.step == step:
            self.checkpoints.save_best(trainer, self.best)
        self.is_stopped_early = patience is not None and self.best.num_since >= patience
        self._ledgers[VALIDATIONS].append([{"step": step, **score.as_dict()}])
        return {"eval/held_out_reward/mean": score.mean.value}

    def measured(self, step: int, point: Mapping[str, Any]) -> dict[str, float]:
        """Books a point of the success curve."""
        self._ledgers[CURVE].append([{"step": step, **point}])
        return {"eval/world_success/mean": point["value"]}

    def log(self, step: int, data: StepData, metrics: Mapping[str, float]) -> None:
        """Books one round: its rollouts, what it learned from, its metrics."""
        self._ledgers[ROLLOUTS].append(data.rollout_rows)
        self._ledgers[LEDGER].append(data.ledger_rows)
        self._sink.write(step, metrics)
        self._sink.show(step, self._num_steps, metrics)
        self._bar.advance(self._updates_per_rollout)
        self._trace.reach(step + self._updates_per_rollout)

    def log_last(self, step: int, metrics: Mapping[str, float]) -> None:
        """Books the final policy, which is validated but samples nothing."""
        if metrics:
            self._sink.write(step, metrics)
            self._sink.show(step, self._num_steps, metrics)

    @property
    def is_asked_to_stop(self) -> bool:
        """Whether the run is to save and stop before it is done."""
        return self._stop.reason is not None

    def save(self, trainer: PolicyTrainer, position: Mapping[str, Any]) -> None:
        """Writes a checkpoint of trainer, record and the source's position.

        Raises:
            StopRequestedError: afterwards, where the run was asked to stop.
        """
        state = {
            "sink": self._sink.position().as_dict(),
            "ledgers": {name: ledger.position() for name, ledger in self._ledgers.items()},
            "best": asdict(self.best) if self.best else None,
            "source": position,
        }
        self.checkpoints.save(trainer, state, best=self.best)
        if (reason := self._stop.reason) is not None:
            # A checkpoint that is still being written would be lost with the process.
            trainer.finish_saving()
            raise StopRequestedError(f"stopped after step {trainer.steps_done} as {reason}")
