"""What the model's layers need to know of a stream in which actions share their prefix.

The stream holds, group by group, the prefix once and the group's actions behind it. Streams.py builds the records; attention and Mamba
layers read them. Suffixes: S = tokens of the stream.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from pivotrl.megatron.upstream import PackedSeqParams


@dataclass(frozen=True)
class Branches:
    """One group in the stream; positions before context parallelism deals them out.

    >>> group = Branches.of(prefix_start=0, prefix_length=3, action_starts=[3, 5], action_lengths=[2, 1])
    >>> group.action_index_G_A.tolist(), group.action_rows.tolist()
    ([[3, 4], [5, 5]], [3, 4, 5])
    """

    prefix: slice
    """Positions of the prefix."""
    action_index_G_A: torch.Tensor
    """int64, positions of every action's tokens; padding repeats the action's last."""
    is_real_G_A: torch.Tensor
    """bool, false at padding."""

    @classmethod
    def of(cls, *, prefix_start: int, prefix_length: int, action_starts: Sequence[int], action_lengths: Sequence[int]) -> Branches:
        """A group from the first position and the number of tokens of its prefix and of each action."""
        starts_G_1, lengths_G_1 = (torch.tensor(values).unsqueeze(1) for values in (action_starts, action_lengths))
        steps_A = torch.arange(max(action_lengths))
        return cls(
            slice(prefix_start, prefix_start + prefix_length),
            starts_G_1 + torch.minimum(steps_A, lengths_G_1 - 1),
            steps_A < lengths_G_1,
        )

    @cached_property
    def action_rows(self) -> torch.Tensor:
        """Positions of all action tokens, action by action."""
        return self.action_index_G_A[self.is_real_G_A]

    def to(self, device: torch.device) -> Branches:
        """The same group with its tensors on a device."""
        return Branches(self.prefix, self.action_index_G_A.to(device), self.is_real_G_A.to(device))


@dataclass
class StreamParams(PackedSeqParams):
    """Upstream's description of a packed stream, handed through to every layer, with what a token stands for beside it."""

    token_weights_S: torch.Tensor | None = None
    """int64, rows that a token of this rank belongs to: 0 for padding, the group's actions for a shared prefix."""


@dataclass
class SharedPrefixParams(StreamParams):
    """The description of a stream with shared prefixes."""

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
