"""The trainer: log-probs, gradient steps and checkpoints of one policy on megatron-core, in any parallel layout, on CPUs or GPUs.

Knows micro-batches and a loss function, not pivots. Called by the training loop (GRPO and SFT) and by whoever needs log-probs. Every
process of the layout makes the same calls with the same arguments and gets the same results (megatron/processes.py sees to that for a
program that runs in one of them). Losses and gradients add up over micro-batches and processes, nothing is averaged: see `update`.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from pivotrl.config.schema import MoeConfig, OptimizerConfig, ParallelConfig
from pivotrl.config.training import Batching
from pivotrl.errors import UserError
from pivotrl.identity import content_id, file_id
from pivotrl.megatron import checkpoint, hf_weights
from pivotrl.megatron.checkpoint import CheckpointRecord
from pivotrl.megatron.copies import UnequalCopy, unequal_copy
from pivotrl.megatron.families import read_family
from pivotrl.megatron.hf_checkpoint import CONFIG, read_config, weight_files
from pivotrl.megatron.layer_outputs import LayerOutputs, layer_outputs
from pivotrl.megatron.layout import ModelShape, check_model, check_shared_prefix, check_world
from pivotrl.megatron.measures import StepMeasures, parameter_drift
from pivotrl.megatron.model import LanguageModel, build_model
from pivotrl.megatron.parallel import control_group, initialize_parallel, running_layout
from pivotrl.megatron.passes import logprob_pass, training_pass
from pivotrl.megatron.replay import RouterMemory, router_memory
from pivotrl.megatron.update import PolicyUpdate, check_formats
from pivotrl.megatron.upstream import parallel_state
from pivotrl.objective.microbatch import LossFunction, MicroBatch

_MAX_SUFFIX = "/max"


@dataclass(frozen=True, slots=True)
class StepResult:
    """What one optimizer step did.

    >>> StepResult(loss=0.0, grad_norm=0.0, lr=1e-4, sums={}).lr
    0.0001
    """

    loss: float
    """Sum of the micro-batches' losses."""
    grad_norm: float
    """Global gradient norm before clipping; 0 where there was no micro-batch."""
    lr: float
    sums: Mapping[str, float]
    """`LossTerms.sums` over all micro-batches: added, or the maximum for names that end in ``/max``."""
    measures: Mapping[str, float] = field(default_factory=dict)
    """What the step cost and did (measures.py); nothing where there was no micro-batch."""


class Trainer:
    """One policy being trained. Lifecycle: `from_hf`, optionally `load_checkpoint`, then any number of steps; one per process."""

    def __init__(
        self,
        checkpoint_dir: Path,
        *,
        policy: list[LanguageModel],
        reference: list[LanguageModel] | None,
        update: PolicyUpdate | None,
        memory: RouterMemory | None,
        measures: StepMeasures,
    ) -> None:
        self._checkpoint_dir = checkpoint_dir
        self._policy = policy
        self._reference = reference
        self._update = update
        self._memory = memory
        self._steps_done = 0
        self._measures = measures
        self._saving: checkpoint.Saving | None = None

    @classmethod
    def from_hf(
        cls,
        checkpoint_dir: Path,
        *,
        optimizer: OptimizerConfig | None,
        parallel: ParallelConfig,
        moe: MoeConfig,
        num_steps: int,
        seed: int,
        with_reference: bool,
    ) -> Trainer:
        """A trainer whose policy has the weights of a Hugging Face checkpoint directory.

        Args:
            optimizer: optimizer settings, or None for a trainer that only computes log-probs.
            parallel: the layout over processes.
            moe: what happens to experts in training.
            num_steps: steps of the whole run, the end of the learning rate's decay.
            seed: seed of upstream's random number tracker; training itself draws nothing.
            with_reference: keep a second, frozen copy of these weights as pi_0.

        Raises:
            UserError: for an unsupported architecture, a layout or format it cannot have, or tensors that do not fit it.
        """
        hf_config = read_config(checkpoint_dir)
        family = read_family(hf_config)
        check_model(parallel, moe, ModelShape.of(family))
        if optimizer is not None:
            check_formats(optimizer)
        initialize_parallel(parallel, seed)
        policy = build_model(hf_config, parallel, moe=moe)
        hf_weights.load_hf(policy, checkpoint_dir)
        reference = None
        if with_reference:
            reference = [chunk.requires_grad_(False) for chunk in build_model(hf_config, parallel, moe=moe)]
            hf_weights.load_hf(reference, checkpoint_dir)
        update = None if optimizer is None else PolicyUpdate(policy, optimizer, parallel, num_steps=num_steps)
        memory = router_memory(policy, moe, family)
        measures = StepMeasures(policy, family, peak_tflops=parallel.peak_tflops)
        return cls(checkpoint_dir, policy=policy, reference=reference, update=update, memory=memory, measures=measures)

    @property
    def steps_done(self) -> int:
        """Calls of `step` so far, those without a micro-batch included; restored by `load_checkpoint`."""
        return self._steps_done

    def token_logprobs(self, micro_batches: Sequence[MicroBatch], *, temperature: float, reference: bool = False) -> list[torch.Tensor]:
        """Log-probs [B, T] float32 of the masked tokens of every micro-batch, zero elsewhere, under softmax(logits / temperature).

        Args:
            reference: under pi_0 instead of the policy; its routers choose freely whatever `moe.router_replay` says.

        Raises:
            ValueError: where `reference` is asked for and the trainer was built without.
            UserError: for routes of another model.
        """
        model = self._reference if reference else self._policy
        if model is None:
            raise ValueError("this trainer was built with with_reference=False")
        if self._memory is None or reference:
            return logprob_pass(model, micro_batches, temperature=temperature)
        with self._memory.for_old_logprobs(micro_batches):
            return logprob_pass(model, micro_batches, temperature=temperature, memory=self._memory)

    def step(self, micro_batches: Sequence[MicroBatch], loss: LossFunction, *, temperature: float) -> StepResult:
        """One optimizer step: forward and backward over all micro-batches, clip by global norm, AdamW (no weight decay on norms and biases).

        Without a micro-batch (every group was skipped) the step counts, so that the schedule moves on, and nothing else changes: no weight
        decay and no decay of Adam's moments.

        Args:
            loss: called once per micro-batch with log-probs (gradient) and entropies (none), zero outside the action mask.

        Raises:
            ValueError: where the trainer was built without an optimizer.
            UserError: for routes of another model.
            FloatingPointError: where the gradient is not finite; the weights must not be used after that.
        """
        update = self._require_update()
        if self._saving is not None and self._saving.is_written():
            self.finish_saving()
        lr = update.learning_rate(self._steps_done)
        self._steps_done += 1
        if not micro_batches:
            return StepResult(loss=0.0, grad_norm=0.0, lr=lr, sums={})
        update.clear_gradients()
        self._measures.start()
        with self._memory.for_update(micro_batches) if self._memory is not None else nullcontext():
            reports = training_pass(update.chunks, micro_batches, loss, temperature=temperature, memory=self._memory)
        grad_norm = update.apply(lr)
        if not math.isfinite(grad_norm):
            raise FloatingPointError(f"the gradient norm of step {self._steps_done - 1} is {grad_norm}")
        return StepResult(
            loss=sum(report.loss for report in reports),
            grad_norm=grad_norm,
            lr=lr,
            sums=_combine([report.sums for report in reports]),
            measures=self._measures.finish(micro_batches) | (self._memory.take_coverage() if self._memory is not None else {}),
        )

    def named_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The policy's weights by Hugging Face name, for an engine; they may share memory with the trainer and change in the next step."""
        return hf_weights.export_hf(self._policy)

    def replica_logprobs(self, micro_batches: Sequence[MicroBatch], *, temperature: float) -> list[list[torch.Tensor]]:
        """`token_logprobs` of every micro-batch by every data parallel replica, replica by replica; no router's choices are remembered."""
        size = parallel_state.get_data_parallel_world_size()
        # Micro-batches are dealt out to the replicas in turn.
        logprobs = logprob_pass(self._policy, [batch for batch in micro_batches for _ in range(size)], temperature=temperature)
        return [logprobs[replica::size] for replica in range(size)]

    def unequal_copy(self) -> UnequalCopy | None:
        """The first part of the weights that two processes should hold alike and do not (copies.py)."""
        return unequal_copy(self._policy)

    def layer_outputs(self, token_ids: Sequence[int]) -> LayerOutputs:
        """What embedding, every layer and the final norm give for one sequence, in every data parallel replica (layer_outputs.py)."""
        return layer_outputs(self._policy, token_ids)

    def outputs_in_layout(self, checkpoint_dir: Path, parallel: ParallelConfig, token_ids: Sequence[int]) -> LayerOutputs | str:
        """`layer_outputs` of a checkpoint in another layout on the same processes; where a process cannot build its part, why.

        This trainer gives up its model for it and must not be used afterwards, except to call this again.

        Args:
            checkpoint_dir: a Hugging Face checkpoint directory that every process can read.
        """
        self.finish_saving()
        self._policy, self._reference, self._update, self._memory = [], None, None, None
        gc.collect()
        problem = ""
        try:
            hf_config = read_config(checkpoint_dir)
            check_model(parallel, MoeConfig(), ModelShape.of(read_family(hf_config)))
            initialize_parallel(parallel, seed=0)
            self._policy = build_model(hf_config, parallel, moe=MoeConfig())
            hf_weights.load_hf(self._policy, checkpoint_dir)
        except (UserError, torch.OutOfMemoryError) as error:
            problem = str(error).splitlines()[0]
        # Memory may be short in one process alone, and the others would wait for it in the model.
        problems = [problem for _ in range(dist.get_world_size())]
        dist.all_gather_object(problems, problem, group=control_group())
        return next(filter(None, problems), "") or layer_outputs(self._policy, token_ids)

    def parameter_drift(self) -> float:
        """Distance of the weights from those the trainer was built with, over the norm of those; reads the checkpoint again."""
        return parameter_drift(self.named_tensors(), self._checkpoint_dir)

    def save_hf(self, out_dir: Path) -> None:
        """Writes the policy as a Hugging Face checkpoint directory with the config and tokenizer it started with, whole or not at all."""
        hf_weights.save_hf(self._policy, source_dir=self._checkpoint_dir, out_dir=out_dir)

    def save_checkpoint(self, path: Path, extra: Mapping[str, Any]) -> None:
        """Writes a resumable checkpoint below `path` (one directory per saved step, the newest two kept).

        With `parallel.async_save` it returns when the state is copied to host memory. The checkpoint appears in the first call of `step`,
        `save_checkpoint` or `finish_saving` that finds all its files written; the latter two wait for them.

        Args:
            path: the run's directory of checkpoints.
            extra: the caller's position, JSON-ready; `load_checkpoint` returns it.

        Raises:
            UserError: where this checkpoint, or the one before, cannot be written.
        """
        update = self._require_update()
        self.finish_saving()
        layout = running_layout(self._policy[0].config)
        record = CheckpointRecord(self._steps_done, self._initial_weights_id, extra, checkpoint.has_expert_optimizer(), layout, file_bytes={})
        self._saving = checkpoint.Saving(path, record, model=self._policy, optimizer=update.optimizer)
        if not update.async_save:
            self.finish_saving()

    def finish_saving(self) -> None:
        """Waits until the checkpoint last saved is complete, where it is not yet.

        Raises:
            UserError: where it cannot be written.
        """
        saving, self._saving = self._saving, None
        if saving is not None:
            saving.complete()

    def load_checkpoint(self, path: Path) -> Mapping[str, Any]:
        """Continues from the newest complete checkpoint below `path`, bit for bit; the reference policy is left as it was loaded.

        Returns:
            The `extra` it was saved with.

        Raises:
            UserError: where there is none, or it belongs to a run from other initial weights.
        """
        update = self._require_update()
        record = checkpoint.load(
            path, model=self._policy, optimizer=update.optimizer, initial_weights_id=self._initial_weights_id, resume=update.resume
        )
        self._steps_done = record.steps_done
        return record.extra

    def _require_update(self) -> PolicyUpdate:
        if self._update is None:
            raise ValueError("this trainer was built without an optimizer")
        return self._update

    @cached_property
    def _initial_weights_id(self) -> str:
        identity: list[str] = [""]
        if dist.get_rank() == 0:
            files = sorted({self._checkpoint_dir / CONFIG, *weight_files(self._checkpoint_dir).values()})
            identity = [content_id({file.name: file_id(file) for file in files})]
        dist.broadcast_object_list(identity, src=0, group=control_group())
        return identity[0]


def check_layout(checkpoint_dir: Path, parallel: ParallelConfig, moe: MoeConfig, world_size: int, *, batching: Batching) -> None:
    """Refuses a layout for this checkpoint, number of processes and way of batching, before there is any process group.

    Raises:
        UserError: as `layout` says, or for an unsupported architecture.
    """
    check_world(parallel, world_size)
    shape = ModelShape.of(read_family(read_config(checkpoint_dir)))
    check_model(parallel, moe, shape)
    if batching == "shared_prefix":
        check_shared_prefix(parallel, shape)


def _combine(sums: Sequence[Mapping[str, float]]) -> dict[str, float]:
    combined: dict[str, float] = {}
    for terms in sums:
        for name, value in terms.items():
            if name not in combined:
                combined[name] = value
            else:
                combined[name] = max(combined[name], value) if name.endswith(_MAX_SUFFIX) else combined[name] + value
    return combined
