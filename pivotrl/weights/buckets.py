"""A hand-over of weights in pieces of bounded size: what a piece is, how a stream is cut into pieces, how one is read and checked.

A bucket's description (names, shapes, types, digests, and where the bytes lie) travels ahead of its bytes. Used by shared_memory.py and
filesystem.py, which say where that is, and by both ends of a replica (rollouts/pool.py, rollouts/replica.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol

import torch

from pivotrl.weights.digest import finish, start
from pivotrl.weights.manifest import TensorRecord, dtype_name

# A view needs its type's alignment, and torch's kernels read memory that is aligned to a cache line faster.
_ALIGNMENT = 64


@dataclass(frozen=True, slots=True)
class Bucket:
    """One piece of a hand-over.

    >>> Bucket.of(Bucket("file", "v1/0.safetensors", (), ()).as_dict()).location
    'v1/0.safetensors'
    """

    kind: str
    """Which reader takes it: "shared_memory", "file" or "broadcast"."""
    location: str
    records: tuple[TensorRecord, ...]
    offsets: tuple[int, ...]
    """First byte of every tensor; empty where the file says so itself."""

    def as_dict(self) -> dict[str, Any]:
        """JSON-ready form."""
        return asdict(self)

    @staticmethod
    def of(value: Mapping[str, Any]) -> Bucket:
        """Reads `as_dict` back.

        Raises:
            ValueError: for another form, as from a peer of another version.
        """
        try:
            records = tuple(TensorRecord(**{**record, "shape": tuple(record["shape"])}) for record in value["records"])
            return Bucket(value["kind"], value["location"], records, tuple(value["offsets"]))
        except (KeyError, TypeError) as error:
            raise ValueError(f"a bucket of weights has another form than this version's ({error})") from error


@dataclass(frozen=True, slots=True)
class Invited:
    """A replica that is to take part in a hand-over."""

    name: str
    """Another one for every connection."""
    reached_at: str
    """Address under which it reached this machine."""
    num_receivers: int = 1
    """Processes of it that take part."""


class WeightStore(Protocol):
    """Where the buckets of one hand-over lie. Lifecycle: invite, begin, put and deliver any number of times, finish; again; close."""

    is_kept: bool
    """Whether the buckets lie there until the next hand-over, so that a replica that died can read them again."""

    def invite(self, members: Sequence[Invited]) -> list[dict[str, Any]]:
        """What each replica needs to take part, in order; sent with the announcement of the hand-over."""
        ...

    def begin(self, version: int) -> None:
        """Starts a hand-over; what the one before left may be overwritten from here on."""
        ...

    def put(self, tensors: Sequence[tuple[TensorRecord, torch.Tensor]]) -> Bucket:
        """Copies tensors and describes where they lie, under the records of what they were copied from."""
        ...

    def deliver(self) -> None:
        """The bucket that was put last has been announced to all replicas: the bytes may follow, while the next one is put."""
        ...

    def finish(self) -> None:
        """All of the hand-over was put and delivered; returns once its bytes are on their way no longer."""
        ...

    def close(self) -> None:
        """Removes everything."""
        ...


def bucketed(named_tensors: Iterable[tuple[str, torch.Tensor]], bucket_bytes: int) -> Iterator[list[tuple[str, torch.Tensor]]]:
    """Runs of tensors, in order, of at most `bucket_bytes` together; a larger tensor is a run of its own.

    >>> [[name for name, _ in run] for run in bucketed([("a", torch.zeros(2)), ("b", torch.zeros(1)), ("c", torch.zeros(9))], 12)]
    [['a', 'b'], ['c']]
    """
    run: list[tuple[str, torch.Tensor]] = []
    size = 0
    for name, tensor in named_tensors:
        if run and size + tensor.nbytes > bucket_bytes:
            yield run
            run, size = [], 0
        run.append((name, tensor))
        size += tensor.nbytes
    if run:
        yield run


def aligned_places(sizes: Sequence[int]) -> tuple[list[int], int]:
    """Offsets of tensors of so many bytes laid one after the other, and the bytes of all, at least 1.

    >>> aligned_places([3, 64, 1])
    ([0, 64, 128], 192)
    """
    offsets, end = [], 0
    for size in sizes:
        offsets.append(end)
        end += -(-size // _ALIGNMENT) * _ALIGNMENT
    return offsets, max(end, 1)


class Reader(Protocol):
    """A replica's end of a hand-over: the tensors of a bucket in order."""

    def __call__(self, bucket: Bucket) -> Iterator[torch.Tensor]: ...


def read_bucket(bucket: Bucket, readers: Mapping[str, Reader]) -> list[tuple[TensorRecord, torch.Tensor]]:
    """The tensors of a bucket, each checked against its record, bytes included. They may be views of memory that the next hand-over overwrites.

    Args:
        readers: by kind of bucket.

    Raises:
        ValueError: for a tensor with other bytes, shape or type than announced, naming it.
    """
    if bucket.kind not in readers:
        raise ValueError(f"a bucket of kind {bucket.kind!r}; this version reads {', '.join(readers)}")
    # The whole bucket before its first tensor goes on: engines load with threads of their own, which compete with those that hash while both
    # take turns.
    verified = list(zip(bucket.records, readers[bucket.kind](bucket), strict=True))
    for record, tensor in verified:
        found = (tuple(tensor.shape), dtype_name(tensor.dtype))
        if found != (record.shape, record.dtype):
            raise ValueError(f"tensor {record.name!r} arrived as {found[1]} {found[0]}, announced as {record.dtype} {record.shape}")
    digests = finish([start(tensor, like=record.digest) for record, tensor in verified])
    for record, digest in zip(bucket.records, digests, strict=True):
        if digest != record.digest:
            raise ValueError(f"tensor {record.name!r} arrived with other bytes than were sent (digest differs)")
    return verified
