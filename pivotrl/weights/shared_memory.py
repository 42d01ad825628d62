"""Weights between processes of one machine, through segments of /dev/shm.

One copy of the weights lies there from one hand-over to the next, in segments of the recipe's bucket size that are used again, so a
replica that died meanwhile is rebuilt from them; a page that is new to a process costs several times the copy of its bytes. The segments
are freed by `close`, by Python's resource tracker where the process was killed, and where both were (a job's whole group of processes) by the
next hand-over or vLLM engine of this user on the machine. Memory: the weights once for all replicas of the machine.
"""

from __future__ import annotations

import itertools
import mmap
import os
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path
from typing import Any

import numpy as np
import torch

from pivotrl.errors import UserError
from pivotrl.weights.buckets import Bucket, Invited, aligned_places
from pivotrl.weights.manifest import TensorRecord, dtype_named
from pivotrl.weights.owned_directory import OwnedDirectory, remove_abandoned

KIND = "shared_memory"
_ROOT = Path("/dev/shm")
# Large enough to outweigh handing it to a thread, small enough that the threads end together.
_PIECE_BYTES = 8 << 20


class SharedMemoryStore:
    """A `WeightStore` in shared memory."""

    is_kept = True

    def __init__(self) -> None:
        self._segments: list[SharedMemory] = []
        self._own: OwnedDirectory | None = None
        self._numbers = itertools.count()
        self._num_used = 0
        self._threads = ThreadPoolExecutor(torch.get_num_threads(), thread_name_prefix="weights")
        self.copy_s = 0.0
        """Seconds of the current hand-over."""

    def invite(self, members: Sequence[Invited]) -> list[dict[str, Any]]:
        """Nothing is needed but what every bucket says."""
        return [{} for _ in members]

    def begin(self, version: int) -> None:  # noqa: ARG002 - a segment has no name of its own per version
        if self._own is None:
            remove_abandoned(_ROOT)
            self._own = OwnedDirectory(_ROOT)
        self._num_used = 0
        self.copy_s = 0.0

    def put(self, tensors: Sequence[tuple[TensorRecord, torch.Tensor]]) -> Bucket:
        """Copies tensors into the next segment.

        Raises:
            UserError: where the machine's shared memory is too small.
        """
        offsets, size = aligned_places([tensor.nbytes for _, tensor in tensors])
        segment = self._segment(size)
        assert segment.buf is not None
        started_s = time.perf_counter()
        pieces: list[tuple[np.ndarray, np.ndarray]] = []
        for (_, tensor), offset in zip(tensors, offsets, strict=True):
            if tensor.device.type == "cpu" and tensor.is_contiguous():
                pieces += _pieces(np.frombuffer(segment.buf, np.uint8, tensor.nbytes, offset), tensor)
            else:
                _view(segment.buf, tensor.dtype, tuple(tensor.shape), offset).copy_(tensor)
        # Not by torch's own threads: they wait for each other after every tensor, and on cores that a replica keeps busy that takes longer
        # than the copy.
        list(self._threads.map(lambda piece: np.copyto(*piece), pieces))
        self.copy_s += time.perf_counter() - started_s
        return Bucket(KIND, segment.name, tuple(record for record, _ in tensors), tuple(offsets))

    def deliver(self) -> None:
        """Nothing: the bytes lie there already."""

    def finish(self) -> None:
        """Frees segments that this hand-over did not need."""
        while len(self._segments) > self._num_used:
            _free(self._segments.pop())

    def close(self) -> None:
        """Frees all segments."""
        self._threads.shutdown()
        self._num_used = 0
        self.finish()
        if self._own is not None:
            self._own.close()
            self._own = None

    def _segment(self, size: int) -> SharedMemory:
        """The next segment, made anew where there is none or it is too small."""
        index = self._num_used
        self._num_used += 1
        if index < len(self._segments) and self._segments[index].size >= size:
            return self._segments[index]
        if index < len(self._segments):
            _free(self._segments.pop(index))
        assert self._own is not None, "begin was not called"
        segment = SharedMemory(f"{self._own.path.name}.{next(self._numbers)}", create=True, size=size)
        try:
            # Claimed now: a write to a page that the machine cannot give would end the process without a word.
            with (_ROOT / segment.name).open("r+b") as file:
                os.posix_fallocate(file.fileno(), 0, size)
        except OSError as error:
            _free(segment)
            raise UserError(
                f"/dev/shm has no room for {size:,} more bytes of weights",
                rule="placement.transfer shared_memory keeps the weights there once, in the engine's type",
                fix="give the machine (or container) more shared memory, or set placement.transfer to filesystem",
            ) from error
        self._segments.insert(index, segment)
        return segment


def read(bucket: Bucket) -> Iterator[torch.Tensor]:
    """Views of a bucket's tensors; writing to them changes nothing outside this process."""
    with (_ROOT / Path(bucket.location).name).open("rb") as file:
        # Mapped by hand: Python 3.12's SharedMemory would remove the segment when a process that only reads it ends.
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    for record, offset in zip(bucket.records, bucket.offsets, strict=True):
        yield _view(mapped, dtype_named(record.dtype), record.shape, offset)


def _view(buffer: memoryview | mmap.mmap, dtype: torch.dtype, shape: tuple[int, ...], offset: int) -> torch.Tensor:
    count = torch.Size(shape).numel()
    if count == 0:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(buffer, dtype=dtype, count=count, offset=offset).view(shape)


def _pieces(place: np.ndarray, tensor: torch.Tensor) -> list[tuple[np.ndarray, np.ndarray]]:
    """Pairs of target and source, bytes, that together copy a tensor."""
    source = tensor.detach().reshape(-1).view(torch.uint8).numpy()
    return [(place[at : at + _PIECE_BYTES], source[at : at + _PIECE_BYTES]) for at in range(0, source.size, _PIECE_BYTES)]


def _free(segment: SharedMemory) -> None:
    segment.close()
    segment.unlink()
