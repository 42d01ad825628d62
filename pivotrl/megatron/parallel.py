"""Process groups: joins torch.distributed and lays megatron-core's parallel groups over it.

One process today (every parallel size is 1), through the same calls that a parallel layout uses. Called once, by the trainer.
"""

from __future__ import annotations

import os

import torch.distributed as dist

from pivotrl.config.schema import ParallelConfig
from pivotrl.errors import UserError
from pivotrl.megatron.upstream import PLATFORM, model_parallel_cuda_manual_seed, parallel_state


def initialize_parallel(parallel: ParallelConfig, seed: int) -> None:
    """Joins a process group of this process alone and initialises megatron-core's groups; does nothing the second time.

    The rendezvous is an in-memory store, so that any number of runs on one machine never meet on a port. A process group that exists
    already (an in-process engine made it) is used where it has one member.

    Args:
        parallel: the layout; every size is 1.
        seed: seed of upstream's random number tracker (weight initialisation and dropout, neither of which the trainer uses).

    Raises:
        UserError: where more than one process was launched.
    """
    world_size = dist.get_world_size() if dist.is_initialized() else int(os.environ.get("WORLD_SIZE", "1"))
    if world_size != 1 or parallel != ParallelConfig():
        raise UserError(
            f"{world_size} processes were launched for the layout {parallel}",
            rule="the trainer runs as one process",
            fix="start pivotrl without torchrun and leave out the section `parallel`",
        )
    if not dist.is_initialized():
        dist.init_process_group(PLATFORM.communication_backend, store=dist.HashStore(), rank=0, world_size=1)  # pyright: ignore[reportPrivateImportUsage]
    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel()
        # numpy, which upstream seeds beside torch, takes 32 bits.
        model_parallel_cuda_manual_seed(seed % 2**32)
