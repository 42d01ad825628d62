"""What the loop asks of a trainer and of a source of data: the two things that vary between SFT, PivotRL and its ablations.

The trainer of the product is megatron/trainer.py; tests use a softmax bandit. Sources are in training/sources.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from pivotrl.config.schema import ParallelConfig
from pivotrl.objective.microbatch import LossFunction, MicroBatch

if TYPE_CHECKING:
    import torch

    from pivotrl.megatron.copies import UnequalCopy
    from pivotrl.megatron.layer_outputs import LayerOutputs


class StepResult(Protocol):
    """What one optimizer step reports; `sums` are the loss's sums over all micro-batches of the step, `measures` what it cost and did."""

    @property
    def loss(self) -> float: ...
    @property
    def grad_norm(self) -> float: ...
    @property
    def lr(self) -> float: ...
    @property
    def sums(self) -> Mapping[str, float]: ...
    @property
    def measures(self) -> Mapping[str, float]: ...


class PolicyTrainer(Protocol):
    """Lifecycle: built at step 0 with the reference's weights; `load_checkpoint` at most once, before the first step."""

    @property
    def steps_done(self) -> int:
        """Optimizer steps taken since the reference policy: the policy's version."""
        ...

    def token_logprobs(self, micro_batches: Sequence[MicroBatch], *, temperature: float, reference: bool) -> list[torch.Tensor]:
        """[B, T] per micro-batch, without gradient, under the current weights or the frozen reference's."""
        ...

    def step(self, micro_batches: Sequence[MicroBatch], loss: LossFunction, *, temperature: float) -> StepResult:
        """Forward and backward over all micro-batches, one optimizer step."""
        ...

    def named_tensors(self) -> Iterable[tuple[str, torch.Tensor]]:
        """All weights under their Hugging Face names."""
        ...

    def replica_logprobs(self, micro_batches: Sequence[MicroBatch], *, temperature: float) -> list[list[torch.Tensor]]:
        """`token_logprobs` by every data parallel replica, replica by replica; changes nothing."""
        ...

    def unequal_copy(self) -> UnequalCopy | None:
        """A part of the weights that two processes should hold alike and do not; asked for only where engine and trainer disagree."""
        ...

    def layer_outputs(self, token_ids: Sequence[int]) -> LayerOutputs:
        """Outputs [T, H] of "embedding", "layer 0" ... and "final norm" for one sequence; asked for only where engine and trainer disagree."""
        ...

    def outputs_in_layout(self, checkpoint_dir: Path, parallel: ParallelConfig, token_ids: Sequence[int]) -> LayerOutputs | str:
        """`layer_outputs` of a checkpoint in another layout on the same processes, or why there is none; this trainer has no model afterwards."""
        ...

    def parameter_drift(self) -> float:
        """Relative distance of the weights from the reference's, in the 2-norm."""
        ...

    def save_hf(self, out_dir: Path) -> None:
        """The current weights as a Hugging Face checkpoint directory, which appears whole or not at all."""
        ...

    def save_checkpoint(self, path: Path, extra: Mapping[str, Any]) -> None:
        """Adds a state below `path`, whole or not at all: all the trainer needs to continue bit for bit, with `extra` (JSON-ready).

        It may appear later, but before the next one and at the latest in `finish_saving`.
        """
        ...

    def finish_saving(self) -> None:
        """Returns when the state last added is complete."""
        ...

    def load_checkpoint(self, path: Path) -> Mapping[str, Any]:
        """Restores the newest complete state below `path` and returns its `extra`."""
        ...


@dataclass(frozen=True, slots=True)
class StepData:
    """What a source gives for one round of the loop.

    >>> StepData([], {"rollout/reward/mean": 0.5}, [], [{"step": 0}]).rollout_rows
    []
    """

    micro_batches: list[MicroBatch]
    metrics: Mapping[str, float]
    """Registered names; no clock."""
    rollout_rows: Sequence[Mapping[str, Any]]
    """Rows of rollouts.jsonl; empty for demonstrations."""
    ledger_rows: Sequence[Mapping[str, Any]]
    """Rows of ledger.jsonl: what the step learned from."""


class Source(Protocol):
    """Where a step's data come from: a function of (step, published weights), and of `position` where it samples ahead."""

    def batch(self, step: int) -> StepData:
        """The data of the round that starts at optimizer step `step`."""
        ...

    def publish(self, trainer: PolicyTrainer, version: int) -> None:
        """Hands the trainer's weights to whatever samples, under policy version `version`."""
        ...

    def position(self) -> Mapping[str, Any]:
        """What a checkpoint must hold, JSON-ready, so that `resume` continues as if nothing had happened."""
        ...

    def resume(self, trainer: PolicyTrainer, position: Mapping[str, Any]) -> None:
        """Takes back a position and hands the resumed trainer's weights on, as `publish` does."""
        ...
