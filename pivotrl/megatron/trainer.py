"""The trainer: log-probs, gradient steps and checkpoints of one policy on megatron-core, on a CPU or a GPU alike.

Knows micro-batches and a loss function, not pivots. Called by the training loop (GRPO and SFT) and by whoever needs log-probs.
Everything runs through upstream's schedule (`get_forward_backward_func`), data parallel wrapper and distributed optimizer, which is
what a parallel layout needs too. Suffixes: B = sequences of a micro-batch, T = padded tokens.

Loss scaling. A loss function returns each micro-batch's loss already divided by the step's global denominator, so losses and gradients
must simply add up, over micro-batches and over data parallel ranks:
    grad(step) = sum over ranks, micro-batches of grad(loss).
Upstream by default averages: it divides each micro-batch's loss by their number, and gradients by the data parallel size. Multiplying
by both numbers first would undo that only up to rounding. With `calculate_per_token_loss` upstream leaves losses as they are, sums
gradients over ranks, and at the end divides by the tokens the schedule counted; `_sum_gradients` passes it no count, so nothing is ever
divided and the split into micro-batches cannot reach the gradient. (An auxiliary loss inside the model is then scaled by nobody.)
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any, cast

import torch

from pivotrl.config.schema import MoeConfig, OptimizerConfig, ParallelConfig
from pivotrl.identity import content_id, file_id
from pivotrl.megatron import checkpoint, hf_weights, upstream
from pivotrl.megatron.checkpoint import CheckpointRecord
from pivotrl.megatron.hf_checkpoint import CONFIG, read_config, weight_files
from pivotrl.megatron.logprobs import token_scores
from pivotrl.megatron.model import build_model
from pivotrl.megatron.parallel import initialize_parallel
from pivotrl.megatron.schedule import learning_rate
from pivotrl.megatron.upstream import PLATFORM, GPTModel
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


@dataclass(frozen=True, slots=True)
class _Update:
    """What a trainer that takes steps has beside its model."""

    config: OptimizerConfig
    num_steps: int
    wrapped: upstream.DistributedDataParallel
    optimizer: upstream.MegatronOptimizer


class Trainer:
    """One policy being trained. Lifecycle: `from_hf`, optionally `load_checkpoint`, then any number of steps; one per process."""

    def __init__(self, checkpoint_dir: Path, *, policy: GPTModel, reference: GPTModel | None, update: _Update | None) -> None:
        self._checkpoint_dir = checkpoint_dir
        self._policy = policy
        self._reference = reference
        self._update = update
        self._steps_done = 0

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
            UserError: for an unsupported architecture, or tensors that do not fit it.
        """
        initialize_parallel(parallel, seed)
        policy = _load(checkpoint_dir, parallel, moe)
        reference = _load(checkpoint_dir, parallel, moe).requires_grad_(False) if with_reference else None
        update = None if optimizer is None else _prepare_update(policy, optimizer, num_steps)
        return cls(checkpoint_dir, policy=policy, reference=reference, update=update)

    @property
    def steps_done(self) -> int:
        """Calls of `step` so far, those without a micro-batch included; restored by `load_checkpoint`."""
        return self._steps_done

    def token_logprobs(self, micro_batches: Sequence[MicroBatch], *, temperature: float, reference: bool = False) -> list[torch.Tensor]:
        """Log-probs [B, T] float32 of the masked tokens of every micro-batch, zero elsewhere, under softmax(logits / temperature).

        Args:
            reference: under pi_0 instead of the policy.

        Raises:
            ValueError: where `reference` is asked for and the trainer was built without.
        """
        model = self._reference if reference else self._policy
        if model is None:
            raise ValueError("this trainer was built with with_reference=False")

        def forward_step(batches: Iterator[MicroBatch], model: torch.nn.Module) -> tuple[torch.Tensor, Any]:
            return token_scores(model, next(batches), temperature=temperature), _collect_logprobs

        with torch.no_grad():
            return _run_schedule(forward_step, micro_batches, model, forward_only=True, collect_non_loss_data=True)

    def step(self, micro_batches: Sequence[MicroBatch], loss: LossFunction, *, temperature: float) -> StepResult:
        """One optimizer step: forward and backward over all micro-batches, clip by global norm, AdamW (no weight decay on norms and biases).

        Without a micro-batch (every group was skipped) the step counts, so that the schedule moves on, and nothing else changes: no weight
        decay and no decay of Adam's moments.

        Args:
            loss: called once per micro-batch with log-probs (gradient) and entropies (none), zero outside the action mask.

        Raises:
            ValueError: where the trainer was built without an optimizer.
            FloatingPointError: where the gradient is not finite; the weights must not be used after that.
        """
        update = self._require_update()
        lr = learning_rate(self._steps_done, update.config, num_steps=update.num_steps)
        self._steps_done += 1
        if not micro_batches:
            return StepResult(loss=0.0, grad_norm=0.0, lr=lr, sums={})
        update.wrapped.zero_grad_buffer()
        update.optimizer.zero_grad()
        forward_step = partial(_training_forward_step, loss=loss, temperature=temperature)
        outputs = _run_schedule(forward_step, micro_batches, update.wrapped, forward_only=False, collect_non_loss_data=False)
        for group in update.optimizer.param_groups:
            # Upstream builds groups with multipliers (0 for the weight decay of norms and biases) and leaves applying them to its scheduler.
            group["lr"] = lr * group["lr_mult"]
            group["weight_decay"] = update.config.weight_decay * group["wd_mult"]
        _, grad_norm, _ = cast("tuple[bool, float, int | None]", update.optimizer.step())
        if not math.isfinite(grad_norm):
            raise FloatingPointError(f"the gradient norm of step {self._steps_done - 1} is {grad_norm}")
        losses, sums = zip(*outputs, strict=True)
        return StepResult(loss=float(sum(losses)), grad_norm=float(grad_norm), lr=lr, sums=_combine(sums))

    def named_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The policy's weights by Hugging Face name, for an engine; they may share memory with the trainer and change in the next step."""
        return hf_weights.export_hf([self._policy])

    def save_hf(self, out_dir: Path) -> None:
        """Writes the policy as a Hugging Face checkpoint directory with the config and tokenizer it started with, whole or not at all."""
        hf_weights.save_hf([self._policy], source_dir=self._checkpoint_dir, out_dir=out_dir)

    def save_checkpoint(self, path: Path, extra: Mapping[str, Any]) -> None:
        """Writes a resumable checkpoint below `path` (one directory per saved step, the newest two kept).

        Args:
            path: the run's directory of checkpoints.
            extra: the caller's position, JSON-ready; `load_checkpoint` returns it.
        """
        record = CheckpointRecord(self._steps_done, self._initial_weights_id, extra)
        checkpoint.save(path, record, model=self._policy, optimizer=self._require_update().optimizer)

    def load_checkpoint(self, path: Path) -> Mapping[str, Any]:
        """Continues from the newest complete checkpoint below `path`, bit for bit; the reference policy is left as it was loaded.

        Returns:
            The `extra` it was saved with.

        Raises:
            UserError: where there is none, or it belongs to a run from other initial weights.
        """
        optimizer = self._require_update().optimizer
        record = checkpoint.load(path, model=self._policy, optimizer=optimizer, initial_weights_id=self._initial_weights_id)
        self._steps_done = record.steps_done
        return record.extra

    def _require_update(self) -> _Update:
        if self._update is None:
            raise ValueError("this trainer was built without an optimizer")
        return self._update

    @cached_property
    def _initial_weights_id(self) -> str:
        files = sorted({self._checkpoint_dir / CONFIG, *weight_files(self._checkpoint_dir).values()})
        return content_id({file.name: file_id(file) for file in files})


def _load(checkpoint_dir: Path, parallel: ParallelConfig, moe: MoeConfig) -> GPTModel:
    (model,) = build_model(read_config(checkpoint_dir), parallel, moe=moe)
    hf_weights.load_hf([model], checkpoint_dir)
    return cast(GPTModel, model)


def _prepare_update(policy: GPTModel, config: OptimizerConfig, num_steps: int) -> _Update:
    reduction = upstream.DistributedDataParallelConfig(grad_reduce_in_fp32=True, use_distributed_optimizer=True)
    wrapped = upstream.DistributedDataParallel(policy.config, reduction, policy)
    policy.config.finalize_model_grads_func = _sum_gradients
    optimizer_config = upstream.OptimizerConfig(
        optimizer="adam",
        lr=config.lr,
        weight_decay=config.weight_decay,
        adam_beta1=config.beta1,
        adam_beta2=config.beta2,
        adam_eps=config.eps,
        clip_grad=config.max_grad_norm,
        params_dtype=PLATFORM.parameter_dtype,
        bf16=PLATFORM.is_gpu,
        use_distributed_optimizer=True,
    )
    return _Update(config, num_steps, wrapped, upstream.get_megatron_optimizer(optimizer_config, [wrapped]))


def _sum_gradients(model: list[torch.nn.Module], _num_tokens: torch.Tensor | None, **groups: Any) -> None:
    """Upstream's final reduction of gradients without its division by the number of tokens (see the module's first paragraph)."""
    upstream.finalize_model_grads(model, None, **groups)


def _run_schedule(
    forward_step: Any, micro_batches: Sequence[MicroBatch], model: torch.nn.Module, *, forward_only: bool, collect_non_loss_data: bool
) -> list[Any]:
    """Upstream's schedule over the micro-batches; one output per micro-batch, in order."""
    if not micro_batches:
        return []
    batch_size, sequence = micro_batches[0].token_ids_B_T.shape
    return upstream.get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=iter([_on_device(micro_batch) for micro_batch in micro_batches]),
        model=model,
        num_microbatches=len(micro_batches),
        seq_length=sequence,
        micro_batch_size=batch_size,
        forward_only=forward_only,
        collect_non_loss_data=collect_non_loss_data,
    )


def _training_forward_step(
    batches: Iterator[MicroBatch], model: torch.nn.Module, *, loss: LossFunction, temperature: float
) -> tuple[torch.Tensor, Any]:
    micro_batch = next(batches)

    def compute_loss(scores_2_B_T: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, tuple[float, dict[str, float]]]:
        logprobs_B_T, entropies_B_T = scores_2_B_T[0], scores_2_B_T[1].detach()
        terms = loss(logprobs_B_T, entropies_B_T, micro_batch)
        report = (terms.loss.item(), {name: value.item() for name, value in terms.sums.items()})
        # The count of tokens that upstream adds up and `_sum_gradients` ignores.
        return terms.loss, torch.zeros((), dtype=torch.int, device=PLATFORM.device), report

    return token_scores(model, micro_batch, temperature=temperature), compute_loss


def _collect_logprobs(scores_2_B_T: torch.Tensor, *, non_loss_data: bool) -> torch.Tensor:
    assert non_loss_data
    return scores_2_B_T[0]


def _on_device(micro_batch: MicroBatch) -> MicroBatch:
    tensors = {field.name: value for field in dataclasses.fields(micro_batch) if torch.is_tensor(value := getattr(micro_batch, field.name))}
    return dataclasses.replace(micro_batch, **{name: tensor.to(PLATFORM.device) for name, tensor in tensors.items()})


def _combine(sums: Sequence[Mapping[str, float]]) -> dict[str, float]:
    combined: dict[str, float] = {}
    for terms in sums:
        for name, value in terms.items():
            if name not in combined:
                combined[name] = value
            else:
                combined[name] = max(combined[name], value) if name.endswith(_MAX_SUFFIX) else combined[name] + value
    return combined
