"""What the model's layers need to know of a stream in which actions share their prefix.

The stream holds, group by group, the prefix once and the group's actions behind it. Streams.py builds the records; attention and Mamba
layers read them. Suffixes: S = tokens of the stream.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from pivotrl.megatron.upstream import PackedSeqParams


@dataclass(frozen=True, slots=True)
class Branches:
    """One group in the stream: positions and lengths in tokens, before context parallelism deals them out.

    >>> Branches(prefix_start=0, prefix_length=3, action_starts=(3, 5), action_lengths=(2, 1)).action_lengths
    (2, 1)
    """

    prefix_start: int
    prefix_length: int
    action_starts: tuple[int, ...]
    action_lengths: tuple[int, ...]


@dataclass
class SharedPrefixParams(PackedSeqParams):
    """Upstream's description of a packed stream, which hands this one through to every layer, with the groups beside it."""

    positions_S: torch.Tensor | None = None
    """int64, the position of every token of this rank in its own sequence."""
    branches: tuple[Branches, ...] = ()


@contextmanager
def stream_rotary(chunk: Any, packing: PackedSeqParams | None) -> Iterator[None]:
    """Within, the model's rotary embedding answers for the stream's positions where an action goes on from a shared prefix.

    Upstream numbers the tokens of every packed sequence from 0.
    """
    rotary = getattr(chunk, "rotary_pos_emb", None)
    if rotary is None or not isinstance(packing, SharedPrefixParams):
        yield
        return
    positions_S = packing.positions_S
    assert positions_S is not None

    def at_positions(module: Any, _arguments: Any, _embedding: torch.Tensor) -> torch.Tensor:
        return module.get_emb(int(positions_S.max()) + 1)[positions_S]

    hook = rotary.register_forward_hook(at_positions)
    try:
        yield
    finally:
        hook.remove()
