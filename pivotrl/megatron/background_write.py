"""Writing the files of a checkpoint in a thread, from a copy in host memory, while training goes on.

Upstream plans an asynchronous save (`async_sharded_save`) and leaves running it to a process: the one its library offers takes seconds to
start and outlives a killed run, whose successor writes in the same place. A thread dies with its process, and nearly all of its time is
spent in the file system, which holds no interpreter lock. Called by checkpoint.py; collective where stated.
"""

from __future__ import annotations

import queue
import threading
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from pivotrl.megatron.parallel import control_group
from pivotrl.megatron.upstream import PLATFORM, dist_checkpointing, filesystem_async


class BackgroundWrite:
    """This process's part of a checkpoint; staged, and being written, once it is built. The state may change right after."""

    def __init__(self, state: dict[str, Any], state_dir: Path, *, content_metadata: dict[str, Any]) -> None:
        """Plans and stages; collective.

        Args:
            state: upstream's sharded state.
            state_dir: an existing directory, the same for all processes.
            content_metadata: what upstream stores beside it about its form.

        Raises:
            CheckpointException: where planning fails on any process.
        """
        # Upstream starts a process to carry the writer's results, which matters only for a writer in another process.
        filesystem_async._results_queue = queue.Queue()
        self._request: Any = dist_checkpointing.save(
            state, str(state_dir), content_metadata=content_metadata, async_sharded_save=True, async_strategy="mcore"
        )
        self._thread: threading.Thread | None = None
        if self._request.async_fn is not None:
            rank, _, results = self._request.async_fn_args
            arguments = (rank, _staged(self._request.preload_fn()), results)
            # A failure is among the results, for `finish` to raise.
            self._thread = threading.Thread(target=self._request.async_fn, args=arguments, name="checkpoint", daemon=True)
            self._thread.start()

    def is_written(self) -> bool:
        """Whether every process has written its part; collective, waits for no file."""
        is_running = torch.tensor(int(self._thread is not None and self._thread.is_alive()))
        dist.all_reduce(is_running, group=control_group())
        return is_running.item() == 0

    def finish(self) -> None:
        """Waits for every process's files and writes the index that makes them a checkpoint; collective.

        Raises:
            CheckpointException: where a process could not write, on every process.
        """
        if self._thread is not None:
            self._thread.join()
        dist.barrier()
        for finalize in self._request.finalize_fns:
            finalize()


def _staged(buckets: list[Any]) -> list[Any]:
    """Upstream's copy in host memory; of tensors that are there already it makes none."""
    if PLATFORM.is_gpu:
        return buckets
    return [(path, key, (objects, [(item, tensor.clone()) for item, tensor in tensors])) for path, key, (objects, tensors) in buckets]
