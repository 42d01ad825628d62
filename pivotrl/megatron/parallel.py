"""Process groups: joins torch.distributed and lays megatron-core's parallel groups over its processes.

One process or many, through the same calls. Called by the trainer when it is built; layout.py has refused by then what cannot be.
"""

from __future__ import annotations

import contextlib
import functools
import os
from datetime import timedelta

import torch.distributed as dist

from pivotrl.config.schema import ParallelConfig
from pivotrl.megatron.layout import check_world, expert_tensor_size
from pivotrl.megatron.upstream import PLATFORM, TransformerConfig, model_parallel_cuda_manual_seed, parallel_state


def initialize_parallel(parallel: ParallelConfig, seed: int) -> None:
    """Joins the processes that the launcher started and makes upstream's groups; a trainer built earlier under another layout is void.

    A process alone meets itself in an in-memory store, so that any number of runs on one machine never meet on a port. A process group
    that exists already (an in-process engine made it) is used.

    Args:
        parallel: the layout.
        seed: seed of upstream's random number tracker (weight initialisation and dropout, neither of which the trainer uses).

    Raises:
        UserError: where the layout does not fit the number of processes.
    """
    world_size = dist.get_world_size() if dist.is_initialized() else int(os.environ.get("WORLD_SIZE", "1"))
    check_world(parallel, world_size)
    timeout = timedelta(minutes=parallel.timeout_minutes)
    if not dist.is_initialized():
        alone = {"store": dist.HashStore(), "rank": 0, "world_size": 1} if world_size == 1 else {}  # pyright: ignore[reportPrivateImportUsage]
        dist.init_process_group(PLATFORM.communication_backend, timeout=timeout, **alone)
    control_group()
    if parallel_state.model_parallel_is_initialized():
        if _current_sizes() == _sizes(parallel):
            return
        _leave_groups()
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=parallel.tensor_model_parallel_size,
        pipeline_model_parallel_size=parallel.pipeline_model_parallel_size,
        virtual_pipeline_model_parallel_size=parallel.virtual_pipeline_model_parallel_size,
        context_parallel_size=parallel.context_parallel_size,
        expert_model_parallel_size=parallel.expert_model_parallel_size,
        expert_tensor_parallel_size=expert_tensor_size(parallel),
        distributed_timeout_minutes=parallel.timeout_minutes,
    )
    # numpy, which upstream seeds beside torch, takes 32 bits.
    model_parallel_cuda_manual_seed(seed % 2**32)


def running_layout(model_config: TransformerConfig) -> dict[str, int | bool | str]:
    """Sizes of upstream's groups and what the model does with them, as they are rather than as the recipe asks: what a checkpoint records."""
    return {
        "processes": dist.get_world_size(),
        "tensor": parallel_state.get_tensor_model_parallel_world_size(),
        "sequence_parallel": model_config.sequence_parallel,
        "pipeline": parallel_state.get_pipeline_model_parallel_world_size(),
        "virtual_pipeline": parallel_state.get_virtual_pipeline_model_parallel_world_size() or 1,
        "context": parallel_state.get_context_parallel_world_size(),
        "data": parallel_state.get_data_parallel_world_size(),
        "expert": parallel_state.get_expert_model_parallel_world_size(),
        "expert_tensor": parallel_state.get_expert_tensor_parallel_world_size() or 1,
        "expert_data": parallel_state.get_expert_data_parallel_world_size(),
        "recompute": model_config.recompute_granularity or "none",
    }


def _leave_groups() -> None:
    """Gives up the groups of a layout with their threads and memory: upstream only forgets them. Every process does so in the same order."""
    groups = [group for group in parallel_state._global_process_group_list or () if group is not None]
    parallel_state.destroy_model_parallel()
    for group in groups:
        # A group that goes together with another one is not known any more.
        with contextlib.suppress(ValueError):
            dist.destroy_process_group(group)


@functools.cache
def control_group() -> dist.ProcessGroup:
    """All processes, over the CPU: for messages between programs rather than tensors of a model. Collective at its first call."""
    group = dist.new_group(backend="gloo") if PLATFORM.is_gpu else dist.group.WORLD
    assert isinstance(group, dist.ProcessGroup)
    return group


def _sizes(parallel: ParallelConfig) -> tuple[int | None, ...]:
    return (
        parallel.tensor_model_parallel_size,
        parallel.pipeline_model_parallel_size,
        parallel.virtual_pipeline_model_parallel_size,
        parallel.context_parallel_size,
        parallel.expert_model_parallel_size,
        expert_tensor_size(parallel),
    )


def _current_sizes() -> tuple[int | None, ...]:
    return (
        parallel_state.get_tensor_model_parallel_world_size(),
        parallel_state.get_pipeline_model_parallel_world_size(),
        parallel_state.get_virtual_pipeline_model_parallel_world_size(),
        parallel_state.get_context_parallel_world_size(),
        parallel_state.get_expert_model_parallel_world_size(),
        parallel_state.get_expert_tensor_parallel_world_size(),
    )
