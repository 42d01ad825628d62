"""Hands a trainer's weights to an engine, wherever it runs, and proves afterwards that all of them arrived.

Consumes the trainer's (name, tensor) stream once, tensor by tensor; nothing is gathered. The engine checks names, shapes and types
against its own census while it loads (weights/manifest.py); this file makes the one allowed rounding explicit, writes the manifest, and
compares it with the digests of what the engine holds. How the bytes travel is the engine's affair.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch

from pivotrl.rollouts.engine import Engine
from pivotrl.weights.manifest import Manifest, SentStream, TensorSpec, WeightCensus, first_difference, loses_precision


@runtime_checkable
class HasCensus(Protocol):
    """An engine that can say which weights it needs: every engine that holds a model, here or elsewhere."""

    def weight_census(self) -> WeightCensus | None: ...


@dataclass(frozen=True, slots=True)
class SyncReport:
    """What one push handed over."""

    version: int
    num_tensors: int
    num_bytes: int
    """Bytes as the engine received them."""
    digest: str
    """Of names, shapes, types and bytes of all tensors; equal digests mean equal policies."""
    num_rounded: int
    """Tensors that were rounded to the engine's type (engine.dtype: bfloat16 under a float32 trainer)."""


def push(named_tensors: Iterable[tuple[str, torch.Tensor]], engine: Engine, version: int) -> SyncReport:
    """Loads all weights into the engine under a policy version.

    Float tensors wider than the engine's are rounded here, because the recipe's engine.dtype asks for it; an engine itself refuses them.
    Narrower ones are widened, which loses nothing: what is sent, held and compared are the same bytes.

    Raises:
        ValueError: for an unknown, repeated, missing or misshapen tensor, naming it; the engine must not be used after that.
        RuntimeError: where the engine left tensors unread, does not state the new version, or holds other bytes than were sent.
    """
    census = engine.weight_census() if isinstance(engine, HasCensus) else None
    rounded: list[str] = []

    def in_engine_type() -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in named_tensors:
            sent = _to_engine_type(tensor, census.spec(name) if census else None)
            if loses_precision(tensor.dtype, sent.dtype):
                rounded.append(name)
            yield name, sent

    stream = SentStream(in_engine_type())
    engine.load_weights(stream, version)
    if (unread := next(stream, None)) is not None:
        raise RuntimeError(f"the engine stopped reading before tensor {unread[0]!r}: its weights are a mixture of two policies")
    if engine.policy_version != version:
        raise RuntimeError(f"the engine states policy version {engine.policy_version} after a push of version {version}")
    manifest = Manifest(tuple(stream.records.values()))
    if census and (missing := sorted(census.tensors.keys() - stream.records.keys())):
        raise RuntimeError(f"the engine accepted weights without {missing[0]!r} ({len(missing)} missing)")
    sent = {name: record.digest for name, record in stream.records.items() if census is None or name in census.tensors}
    if census and (difference := first_difference(sent, engine.weight_digests())):
        raise RuntimeError(f"after a push of version {version}, {difference}; the engine must not be used")
    return SyncReport(version, len(manifest.tensors), manifest.num_bytes, manifest.digest, len(rounded))


def _to_engine_type(tensor: torch.Tensor, spec: TensorSpec | None) -> torch.Tensor:
    """The tensor in the type that the engine holds it in; itself where the engine refuses it for another reason."""
    if spec is None or not (tensor.is_floating_point() and spec.dtype.is_floating_point):
        return tensor
    return tensor.to(spec.dtype)
