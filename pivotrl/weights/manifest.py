"""What a set of weights is, tensor by tensor: the census an engine expects, and the manifest of what it was sent.

A partial, stale or rounded hand-over is silent in every framework that allows it, so here it is an error that names the tensor.
Used by the engines (`check_stream`) and by the senders (`Manifest`). Names are Hugging Face names throughout.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from pivotrl.identity import content_id
from pivotrl.weights.digest import StartedDigest, finish, start, tensor_digest

_DTYPES = {
    str(dtype).removeprefix("torch."): dtype for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.int32)
}


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Shape and storage type of one tensor in an engine."""

    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class WeightCensus:
    """Everything an engine must be given to hold a complete policy."""

    tensors: Mapping[str, TensorSpec]
    """Required tensors by name."""
    tied: Mapping[str, str]
    """Optional name -> required name it shares memory with, for example ``lm_head.weight`` -> ``model.embed_tokens.weight``."""

    def spec(self, name: str) -> TensorSpec | None:
        """What a tensor of this name must be; None for a name the model does not have."""
        return self.tensors.get(self.tied.get(name, name))

    @property
    def is_rounded(self) -> bool:
        """Whether any tensor is of fewer bits than float32."""
        return any(spec.dtype.itemsize < torch.float32.itemsize for spec in self.tensors.values())

    def as_dict(self) -> dict[str, Any]:
        """JSON-ready form."""
        return {"tensors": {name: [spec.shape, dtype_name(spec.dtype)] for name, spec in self.tensors.items()}, "tied": dict(self.tied)}

    @staticmethod
    def of(value: Mapping[str, Any]) -> WeightCensus:
        """Reads `as_dict` back."""
        return WeightCensus({name: TensorSpec(tuple(shape), dtype_named(dtype)) for name, (shape, dtype) in value["tensors"].items()}, value["tied"])


@dataclass(frozen=True, slots=True)
class TensorRecord:
    """One tensor as it was sent."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    num_bytes: int
    digest: str
    """`digest.tensor_digest` of the tensor, which says its algorithm."""


@dataclass(frozen=True, slots=True)
class Manifest:
    """All tensors of one hand-over, in the order of sending."""

    tensors: tuple[TensorRecord, ...]

    @property
    def num_bytes(self) -> int:
        return sum(record.num_bytes for record in self.tensors)

    @property
    def digest(self) -> str:
        """One id for the whole set of weights; independent of the order of sending."""
        return content_id(sorted([record.name, list(record.shape), record.dtype, record.digest] for record in self.tensors))


def tensor_record(name: str, tensor: torch.Tensor) -> TensorRecord:
    """The record of one tensor; reads its bytes once."""
    return replace(_undigested(name, tensor), digest=tensor_digest(tensor))


def _undigested(name: str, tensor: torch.Tensor) -> TensorRecord:
    return TensorRecord(name, tuple(tensor.shape), dtype_name(tensor.dtype), tensor.nbytes, "")


class SentStream(Iterator[tuple[str, torch.Tensor]]):
    """Pairs of name and tensor on their way to an engine, each hashed once, as it passes.

    Whoever hands them on takes the digests from here: what arrives is then compared with what the sender held, copies on the way included.
    """

    def __init__(self, named_tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        self._named_tensors = iter(named_tensors)
        self._records: dict[str, TensorRecord] = {}
        self._started: list[tuple[TensorRecord, StartedDigest]] = []
        self.digest_s = 0.0

    def __next__(self) -> tuple[str, torch.Tensor]:
        name, tensor = next(self._named_tensors)
        started_s = time.perf_counter()
        self._started.append((_undigested(name, tensor), start(tensor)))
        self.digest_s += time.perf_counter() - started_s
        return name, tensor

    @property
    def records(self) -> Mapping[str, TensorRecord]:
        """Of the tensors that have passed; of a repeated name the last. Waits for a device that still computes digests."""
        if self._started:
            started_s = time.perf_counter()
            digests = finish([started for _, started in self._started])
            self._records |= {record.name: replace(record, digest=digest) for (record, _), digest in zip(self._started, digests, strict=True)}
            self._started.clear()
            self.digest_s += time.perf_counter() - started_s
        return self._records

    @property
    def digests(self) -> Mapping[str, str]:
        """By name, of the tensors that have passed."""
        return {name: record.digest for name, record in self.records.items()}


class VerifiedStream(Iterator[tuple[str, torch.Tensor]]):
    """Pairs of name and tensor whose bytes were hashed in this process, after they arrived, and found to be those that were announced.

    An engine that gets one may take its digests of what it received from here.
    """

    def __init__(self, verified: Iterable[tuple[TensorRecord, torch.Tensor]]) -> None:
        self._verified = iter(verified)
        self.digests: dict[str, str] = {}
        """By name, of the tensors that have passed."""

    def __next__(self) -> tuple[str, torch.Tensor]:
        record, tensor = next(self._verified)
        self.digests[record.name] = record.digest
        return record.name, tensor


def first_difference(sent: Mapping[str, str], held: Mapping[str, str]) -> str | None:
    """Why an engine does not hold the weights it was sent, naming the first tensor in order of names; None where it does.

    >>> first_difference({"a": "1", "b": "2"}, {"a": "1", "b": "3"})
    "tensor 'b' differs from the one that was sent (1 of 2 do)"
    >>> first_difference({"a": "1"}, {}), first_difference({}, {"a": "1"})
    ("tensor 'a' was sent but is not held", "tensor 'a' is held but was not sent")
    """
    if absent := sorted(sent.keys() ^ held.keys()):
        return f"tensor {absent[0]!r} was sent but is not held" if absent[0] in sent else f"tensor {absent[0]!r} is held but was not sent"
    wrong = sorted(name for name in sent if sent[name] != held[name])
    return f"tensor {wrong[0]!r} differs from the one that was sent ({len(wrong)} of {len(sent)} do)" if wrong else None


def dtype_name(dtype: torch.dtype) -> str:
    """The name a record gives a type.

    >>> dtype_name(torch.bfloat16)
    'bfloat16'
    """
    return str(dtype).removeprefix("torch.")


def dtype_named(name: str) -> torch.dtype:
    """The type of a record's name.

    Raises:
        ValueError: for a type that weights do not have.
    """
    if name not in _DTYPES:
        raise ValueError(f"a tensor is announced as {name!r}; weights are one of {', '.join(_DTYPES)}")
    return _DTYPES[name]


def loses_precision(source: torch.dtype, target: torch.dtype) -> bool:
    """True where some value of `source` has no equal in `target`.

    >>> loses_precision(torch.bfloat16, torch.float32), loses_precision(torch.float16, torch.bfloat16)
    (False, True)
    """
    return torch.promote_types(source, target) != target


def check_stream(named_tensors: Iterable[tuple[str, torch.Tensor]], census: WeightCensus) -> Iterator[tuple[str, torch.Tensor]]:
    """Passes the required tensors on, one by one, and fails on the first that does not fit the census.

    An optional tied name may come or not; it is not passed on, but must equal the tensor it is tied to.

    Raises:
        ValueError: unknown, repeated, misshapen, or lossy tensor when it is met; missing tensors once the stream has ended.
    """
    seen: set[str] = set()
    unpaired: dict[str, torch.Tensor] = {}
    partner_of = {**census.tied, **{required: optional for optional, required in census.tied.items()}}
    for name, tensor in named_tensors:
        if name in seen:
            raise ValueError(f"tensor {name!r} was sent twice")
        seen.add(name)
        _check_tensor(name, tensor, census)
        if (partner := partner_of.get(name)) is not None:
            if partner in unpaired:
                _check_tied(name, tensor, other=partner, other_tensor=unpaired.pop(partner))
            else:
                unpaired[name] = tensor
        if name in census.tensors:
            yield name, tensor
    if missing := sorted(census.tensors.keys() - seen):
        raise ValueError(f"tensors missing from the new weights ({len(missing)} of {len(census.tensors)}): {', '.join(missing[:5])}")


def _check_tensor(name: str, tensor: torch.Tensor, census: WeightCensus) -> None:
    spec = census.spec(name)
    if spec is None:
        raise ValueError(f"unknown tensor {name!r}: the engine's model has no such weight")
    if tuple(tensor.shape) != spec.shape:
        raise ValueError(f"tensor {name!r} has shape {tuple(tensor.shape)}; the engine's model has {spec.shape}")
    if loses_precision(tensor.dtype, spec.dtype):
        raise ValueError(f"tensor {name!r} is {tensor.dtype}; the engine stores {spec.dtype}, which would round it silently; cast it before sending")


def _check_tied(name: str, tensor: torch.Tensor, *, other: str, other_tensor: torch.Tensor) -> None:
    if not torch.equal(tensor, other_tensor):
        raise ValueError(f"tensors {name!r} and {other!r} differ; the engine's model ties them to one tensor")
