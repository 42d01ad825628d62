"""How context parallel ranks share sequences: the order that transformer-engine and upstream's rotary embedding expect.

Every sequence is cut into 2 * size equal slices; rank r holds slices r and 2 * size - 1 - r, so that all ranks have the same share of a
causal attention's work. Imports nothing of megatron-core: both the platform's layers and the trainer use it.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch


def own_positions(starts: Sequence[int], *, size: int, rank: int) -> torch.Tensor:
    """Global positions of a rank's tokens, in its order.

    Args:
        starts: first position of every sequence and, last, the total length; lengths are multiples of 2 * size.

    >>> own_positions([0, 4, 8], size=2, rank=0).tolist(), own_positions([0, 4, 8], size=2, rank=1).tolist()
    ([0, 3, 4, 7], [1, 2, 5, 6])
    """
    parts = []
    for start, end in pairwise(starts):
        length = (end - start) // (2 * size)
        firsts = (start + index * length for index in (rank, 2 * size - 1 - rank))
        parts.extend(torch.arange(first, first + length) for first in firsts)
    return torch.cat(parts)


def global_order(starts: Sequence[int], *, size: int) -> torch.Tensor:
    """For every global position, where it lies in the concatenation of all ranks' tokens.

    >>> global_order([0, 4], size=2).tolist()
    [0, 2, 3, 1]
    """
    return torch.cat([own_positions(starts, size=size, rank=rank) for rank in range(size)]).argsort()
