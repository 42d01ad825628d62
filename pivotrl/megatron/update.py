"""The optimizer of a policy: gradient buffers, their reduction over processes, clipping, AdamW on upstream's distributed optimizer.

Loss scaling. A loss function returns each micro-batch's loss already divided by the step's global denominator, so losses and gradients
must simply add up, over micro-batches and over data parallel ranks:
    grad(step) = sum over ranks, micro-batches of grad(loss).
Upstream by default averages: it divides each micro-batch's loss by their number, and gradients by the data parallel size. Multiplying
by both numbers first would undo that only up to rounding. With `calculate_per_token_loss` upstream leaves losses as they are, sums
gradients over ranks, and at the end divides by the tokens the schedule counted; `_sum_gradients` passes it no count, so nothing is ever
divided and the split into micro-batches cannot reach the gradient. (An auxiliary loss inside the model is then scaled by nobody.)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, cast

import torch

from pivotrl.config.schema import OptimizerConfig, ParallelConfig
from pivotrl.errors import UserError
from pivotrl.megatron import upstream
from pivotrl.megatron.model import LanguageModel
from pivotrl.megatron.schedule import learning_rate
from pivotrl.megatron.upstream import PLATFORM


class PolicyUpdate:
    """What a trainer that takes steps has beside its model: the chunks wrapped for data parallelism, and their optimizer."""

    def __init__(self, policy: Sequence[LanguageModel], config: OptimizerConfig, parallel: ParallelConfig, *, num_steps: int) -> None:
        self._config, self._num_steps = config, num_steps
        self.resume: Literal["full", "weights"] = parallel.resume
        self.async_save = parallel.async_save
        reduction = upstream.DistributedDataParallelConfig(
            # Otherwise buffers have the weights' format, and those of a bfloat16 model's float32 tensors stay float32.
            grad_reduce_in_fp32=config.gradient_dtype == "float32",
            use_distributed_optimizer=True,
            overlap_grad_reduce=parallel.overlap_grad_reduce,
        )
        # The first chunk's backward pass ends last; its gradients are the only ones worth reducing piece by piece.
        self.chunks = [
            upstream.DistributedDataParallel(chunk.config, reduction, chunk, disable_bucketing=index > 0) for index, chunk in enumerate(policy)
        ]
        for chunk in self.chunks:
            chunk.config.finalize_model_grads_func = _sum_gradients
            if parallel.overlap_grad_reduce:
                chunk.config.no_sync_func = _each([each.no_sync for each in self.chunks])
                chunk.config.grad_sync_func = _each([each.start_grad_sync for each in self.chunks])
        optimizer_config = upstream.OptimizerConfig(
            optimizer="adam",
            lr=config.lr,
            weight_decay=config.weight_decay,
            adam_beta1=config.beta1,
            adam_beta2=config.beta2,
            adam_eps=config.eps,
            clip_grad=config.max_grad_norm,
            params_dtype=PLATFORM.parameter_dtype,
            bf16=PLATFORM.parameter_dtype == torch.bfloat16,
            use_distributed_optimizer=True,
        )
        self.optimizer = upstream.get_megatron_optimizer(optimizer_config, list(self.chunks))
        _correct_order(self.optimizer)

    def learning_rate(self, step: int) -> float:
        """The scheduled rate of an optimizer step."""
        return learning_rate(step, self._config, num_steps=self._num_steps)

    def clear_gradients(self) -> None:
        """Before a step's first micro-batch."""
        for chunk in self.chunks:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()

    def apply(self, lr: float) -> float:
        """Clips the accumulated gradient, takes AdamW's step and returns the gradient's norm before clipping, the same on every process."""
        for group in self.optimizer.param_groups:
            # Upstream builds groups with multipliers (0 for the weight decay of norms and biases) and leaves applying them to its scheduler.
            group["lr"] = lr * group["lr_mult"]
            group["weight_decay"] = self._config.weight_decay * group["wd_mult"]
        _, grad_norm, _ = cast("tuple[bool, float, int | None]", self.optimizer.step())
        return float(grad_norm)


def check_formats(config: OptimizerConfig) -> None:
    """Refuses a format of gradients that megatron-core would not keep: its buffers are float32 or of the weights' format.

    Raises:
        UserError: naming the key.
    """
    if config.gradient_dtype == "bfloat16" and PLATFORM.parameter_dtype != torch.bfloat16:
        raise UserError(
            "optimizer.gradient_dtype is bfloat16 and the weights are float32, as on every CPU",
            rule="gradients are float32 or have the format of the weights, which is bfloat16 on a GPU",
            fix="set optimizer.gradient_dtype to float32, or train on a GPU",
        )


def _correct_order(optimizer: upstream.MegatronOptimizer) -> None:
    """Makes upstream find a parameter's state where it is, in a model of two formats (bfloat16 with the float32 tensors of Mamba layers).

    Upstream (0.19.2) numbers a group's parameters as its buffers hold them, then lists the float32 ones first. With both in one group it saves a
    checkpoint with one parameter's state under another's name, or fails where their sizes differ.
    """
    parts: list[Any] = getattr(optimizer, "chained_optimizers", [optimizer])
    for part in parts:
        for group, parameters in enumerate(zip(part.model_fp32_groups, part.model_float16_groups, strict=True)):
            for order, parameter in enumerate((*parameters[0], *parameters[1])):
                part.model_param_group_index_map[parameter] = (group, order)


def _each(functions: list[Any]) -> Any:
    """Upstream's schedules take a list of functions where there are several chunks and a bare function where there is one."""
    return functions if len(functions) > 1 else functions[0]


def _sum_gradients(model: list[torch.nn.Module], _num_tokens: torch.Tensor | None, **groups: Any) -> None:
    """Upstream's final reduction of gradients without its division by the number of tokens (see the module's first paragraph)."""
    upstream.finalize_model_grads(model, None, **groups)
