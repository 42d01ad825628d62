"""Runs a trainer in a layout: the worker of test_layouts (fakes/ranks.py runs it).

A job is a model's directory, a layout (keys of `parallel`), how the step's rows are laid out, and optionally a checkpoint to load from or
save to, or a format of the weights other than a CPU's, with one of the gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from fakes.trainer_batches import joined, micro_batches, policy_loss

from pivotrl.config.schema import MoeConfig, OptimizerConfig, ParallelConfig
from pivotrl.errors import UserError
from pivotrl.megatron import checkpoint
from pivotrl.megatron.trainer import Trainer
from pivotrl.megatron.upstream import PLATFORM, parallel_state
from pivotrl.objective.microbatch import MicroBatch

NUM_ROWS, NUM_STEPS = 7, 2
TEMPERATURE = 0.8
# An eps far above the gradient's rounding: Adam divides a gradient of nearly zero by its own size, which makes rounding a step of lr.
OPTIMIZER = OptimizerConfig(lr=1e-3, eps=1e-4, weight_decay=0.1, max_grad_norm=0.5)


def _rows(step: int) -> list[MicroBatch]:
    return micro_batches(rows=NUM_ROWS, tokens=24, action_tokens=5, seed=step)


ARRANGEMENTS: Mapping[str, Callable[[list[MicroBatch]], list[MicroBatch]]] = {
    "uneven": lambda rows: [joined(rows[:3]), joined(rows[3:5]), joined(rows[5:])],
    "one each": list,
    "reversed": lambda rows: [joined(rows[:3:-1]), joined(rows[3::-1])],
    "padded": lambda rows: [joined(rows[:4], extra_padding=9), joined(rows[4:], extra_padding=3)],
    "packed": lambda rows: [replace(joined(rows[:3]), batching="packed"), replace(joined(rows[3:]), batching="packed")],
}
"""Ways to lay one step's rows out; all have the same log-probs, loss and gradient."""


@contextmanager
def weights_in(name: str) -> Iterator[None]:
    """The platform with another format of weights: what a GPU has, on this CPU."""
    before = PLATFORM.parameter_dtype
    object.__setattr__(PLATFORM, "parameter_dtype", getattr(torch, name))
    try:
        yield
    finally:
        object.__setattr__(PLATFORM, "parameter_dtype", before)


def measure(job: Mapping[str, Any]) -> dict[str, Any]:
    """Log-probs of the scored tokens by row, then loss, gradient norm and sums of every step, and what every rank holds at the end."""
    with weights_in(job.get("weights", "float32")):
        return _measured(job)


def _measured(job: Mapping[str, Any]) -> dict[str, Any]:
    trainer = Trainer.from_hf(
        Path(job["model"]),
        optimizer=OPTIMIZER.model_copy(update={"gradient_dtype": job.get("gradients", "float32")}),
        parallel=ParallelConfig(**job["parallel"]),
        moe=MoeConfig(**job.get("moe", {})),
        num_steps=10,
        seed=0,
        with_reference=False,
    )
    if "load" in job:
        try:
            trainer.load_checkpoint(Path(job["load"]))
        except UserError as error:
            return {"refused": str(error)}
    arrange = ARRANGEMENTS[job.get("arrangement", "uneven")]
    batches = arrange(_rows(0))
    logprobs = trainer.token_logprobs(batches, temperature=TEMPERATURE)
    rows: dict[tuple[int, ...], list[float]] = {}
    for batch, values_B_T in zip(batches, logprobs, strict=True):
        for row, length in enumerate(batch.lengths_B.tolist()):
            is_scored_T = batch.action_mask_B_T[row] != 0
            rows[tuple(batch.token_ids_B_T[row, :length].tolist())] = values_B_T[row, is_scored_T].tolist()
    steps = []
    for _ in range(job.get("num_steps", NUM_STEPS)):
        result = trainer.step(arrange(_rows(trainer.steps_done)), policy_loss, temperature=TEMPERATURE)
        steps.append([result.loss, result.grad_norm, result.sums["entropy"], result.sums["surprise/max"]])
    if "save" in job:
        trainer.save_checkpoint(Path(job["save"]), {})
    return {"logprobs": [values for _, values in sorted(rows.items())], "steps": steps, "held": _held(trainer)}


def _gathered_bytes(optimizer: Any) -> int:
    """Of what upstream gathers on every process to save: on a GPU in this form, on a CPU on the first alone."""
    state = optimizer.get_parameter_state_dp_zero(use_gloo_comm=True, return_on_all_ranks=True)
    by_dtype = [tensors for buffer, dtypes in state.items() if buffer != "buckets_coalesced" for tensors in dtypes.values()]
    return sum(tensors[key].nbytes for tensors in by_dtype for key in ("param", "exp_avg", "exp_avg_sq"))


def _held(trainer: Trainer) -> list[dict[str, int]]:
    """By rank: its pipeline stage, and bytes: buffers of weights and of gradients, what saving gathers, float32 copies of weights, Adam's moments."""
    update = trainer._require_update()
    # Upstream hides torch's method of the same name behind its list.
    chunks: list[Any] = [*update.chunks]
    buffers = [buffer for chunk in chunks for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers)]
    moments = [
        state[name] for adam in checkpoint._torch_adams(update.optimizer) for state in adam.state.values() for name in ("exp_avg", "exp_avg_sq")
    ]
    optimizers = getattr(update.optimizer, "chained_optimizers", [update.optimizer])
    copies = [copy for one in optimizers for group in one.shard_fp32_from_float16_groups for copy in group]
    own = {
        "stage": parallel_state.get_pipeline_model_parallel_rank(),
        "weights": sum(buffer.param_data.nbytes for buffer in buffers),
        "gradients": sum(buffer.grad_data.nbytes for buffer in buffers),
        "gathered": sum(_gathered_bytes(one) for one in optimizers),
        "copies": sum(copy.nbytes for copy in copies),
        "moments": sum(moment.nbytes for moment in moments),
    }
    held: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(held, own)
    return held
