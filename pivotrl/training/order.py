"""Which items each step learns from: shuffled epochs as a pure function of the step, so that a resumed run needs no state.

Called by training/sources.py.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from pivotrl.identity import derive_seed


@dataclass(frozen=True, slots=True)
class EpochOrder:
    """Epochs over `size` items in batches of `per_batch`, each epoch in its own shuffled order.

    An epoch is as many whole batches as the items give; the items left over sit out that epoch and, the order being new each
    time, others sit out the next. So no batch holds an item twice, which would be one group with each sample's seed used twice.

    >>> order = EpochOrder(size=5, per_batch=2, seed=1)
    >>> order.epoch(3), len(set(order.items(2) + order.items(3)))
    (1, 4)
    """

    size: int
    per_batch: int
    seed: int

    def epoch(self, batch: int) -> int:
        """The epoch that batch number `batch` (from 0) belongs to."""
        return batch // (self.size // self.per_batch)

    def items(self, batch: int) -> tuple[int, ...]:
        """Indices of the items of batch number `batch`, `per_batch` different ones."""
        epoch = self.epoch(batch)
        order = list(range(self.size))
        random.Random(derive_seed(self.seed, "order", epoch)).shuffle(order)
        start = (batch - epoch * (self.size // self.per_batch)) * self.per_batch
        return tuple(order[start : start + self.per_batch])
