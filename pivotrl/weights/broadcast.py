"""Weights from device to device: one NCCL broadcast per bucket, from the trainer's process 0 to every process that holds a part of a replica.

Nothing is kept, so a replica that dies later stays away until the next hand-over, and one that dies in the middle of it leaves the others
waiting for a timeout, after which the run stops (the same command resumes). The group is no part of torch's default one, which belongs to
the trainer; it is made anew where the replicas are others than last time. Without a GPU the same path runs over gloo, for tests.

The rendezvous of a group is torch's TCPStore, which asks for no key: the cluster's network must keep strangers out.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]
from torch.distributed.distributed_c10d import BroadcastOptions, ProcessGroup

from pivotrl.weights.buckets import Bucket, Invited, aligned_places
from pivotrl.weights.manifest import TensorRecord, dtype_named

KIND = "broadcast"
# The rendezvous listens on all of this machine's addresses; this is its own way to it.
_HERE = "127.0.0.1"
_TIMEOUT = timedelta(minutes=10)


class BroadcastStore:
    """A `WeightStore` that holds two buckets, on the trainer's device: one is on its way while the next one is gathered, digested and laid out."""

    is_kept = False

    def __init__(self) -> None:
        self._members: list[Invited] = []
        self._rendezvous: Any = None
        self._group: ProcessGroup | None = None
        self._bytes = torch.empty(0)
        self._under_way: Any = None
        self._sent_bytes = torch.empty(0)

    def invite(self, members: Sequence[Invited]) -> list[dict[str, Any]]:
        """Where each member finds the group, in order; ranks follow the order, a member's own one after the other, this process is rank 0.

        Everyone at the address under which it came: a machine's name need not be known to others.
        """
        if self._group is None or list(members) != self._members:
            self._rendezvous = TCPStore(_HERE, 0, is_master=True, wait_for_workers=False, timeout=_TIMEOUT)
            self._group, self._members = None, list(members)
        place = {"port": self._rendezvous.port, "size": _group_size(members)}
        return [{**place, "host": member.reached_at, "rank": _group_size(members[:index])} for index, member in enumerate(members)]

    def begin(self, version: int) -> None:  # noqa: ARG002 - nothing is stored under a version
        """Waits for all members to have come."""
        if self._group is None and self._members:
            self._group = _make_group(self._rendezvous, 0, _group_size(self._members))

    def put(self, tensors: Sequence[tuple[TensorRecord, torch.Tensor]]) -> Bucket:
        """Lays the tensors one after the other on the device."""
        offsets, size = aligned_places([tensor.nbytes for _, tensor in tensors])
        self._bytes = torch.empty(size, dtype=torch.uint8, device=_device())
        for (_, tensor), offset in zip(tensors, offsets, strict=True):
            _view(self._bytes, tensor.dtype, tuple(tensor.shape), offset).copy_(tensor)
        return Bucket(KIND, "", tuple(record for record, _ in tensors), tuple(offsets))

    def deliver(self) -> None:
        """Begins to broadcast the bucket that was put last, once the one before is there; the members have been told of it."""
        if self._group is None:
            return
        self._arrive()
        with self._leaving_on_failure():
            self._under_way, self._sent_bytes = _begin_broadcast(self._group, self._bytes), self._bytes

    def finish(self) -> None:
        """Waits for the last bucket to arrive."""
        self._arrive()
        self._bytes = self._sent_bytes = torch.empty(0)

    def _arrive(self) -> None:
        """Waits for the bucket that is under way; its memory is held until then."""
        if self._under_way is not None:
            under_way, self._under_way = self._under_way, None
            with self._leaving_on_failure():
                _end_broadcast(under_way, self._sent_bytes)

    @contextlib.contextmanager
    def _leaving_on_failure(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            # Its members are out of step from here on: the next hand-over makes another one.
            self._group, self._members = None, []
            raise

    def close(self) -> None:
        """Leaves the group."""
        self._group, self._rendezvous, self._under_way = None, None, None


class Member:
    """One process's end of it, in a replica; keeps its group from one hand-over to the next."""

    def __init__(self) -> None:
        self._invitation: Mapping[str, Any] = {}
        self._group: ProcessGroup | None = None

    def join(self, invitation: Mapping[str, Any]) -> None:
        """Joins the group of an invitation, unless it is in it already."""
        if invitation != self._invitation:
            self._group, self._invitation = None, {}
            store = TCPStore(invitation["host"], invitation["port"], is_master=False, timeout=_TIMEOUT)
            self._group = _make_group(store, invitation["rank"], invitation["size"])
            self._invitation = dict(invitation)

    def read(self, bucket: Bucket) -> Iterator[torch.Tensor]:
        """Takes part in the broadcast of a bucket; its tensors, on this process's device."""
        if self._group is None:
            raise ValueError("a bucket of weights is broadcast, but this engine was invited to no group")
        _, size = aligned_places([record.num_bytes for record in bucket.records])
        data = torch.empty(size, dtype=torch.uint8, device=_device())
        _end_broadcast(_begin_broadcast(self._group, data), data)
        for record, offset in zip(bucket.records, bucket.offsets, strict=True):
            yield _view(data, dtype_named(record.dtype), record.shape, offset)


def _group_size(members: Sequence[Invited]) -> int:
    return 1 + sum(member.num_receivers for member in members)


def _device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def _make_group(store: Any, rank: int, size: int) -> ProcessGroup:
    """A group of its own beside torch's default one."""
    if torch.cuda.is_available():
        group: Any = dist.ProcessGroupNCCL(store, rank, size)  # pyright: ignore
    else:
        group = dist.ProcessGroupGloo(store, rank, size, timeout=_TIMEOUT)  # pyright: ignore[reportPrivateImportUsage]
    return group


def _begin_broadcast(group: ProcessGroup, data: torch.Tensor) -> Any:
    options = BroadcastOptions()
    options.rootRank = 0
    return group.broadcast([data], options)


def _end_broadcast(under_way: Any, data: torch.Tensor) -> None:
    under_way.wait()
    if data.is_cuda:
        torch.cuda.synchronize()


def _view(data: torch.Tensor, dtype: torch.dtype, shape: tuple[int, ...], offset: int) -> torch.Tensor:
    count = torch.Size(shape).numel()
    return data[offset : offset + count * dtype.itemsize].view(dtype).view(shape)
