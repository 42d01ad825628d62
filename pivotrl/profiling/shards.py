"""Which worker profiles which units: a pure function of the candidates and the number of shards, the same in every process.

Called by profile.py. A unit is never split, so what an engine sees in one call, and with it every byte of the result, does
not depend on how many workers there are.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from pivotrl.errors import UserError
from pivotrl.identity import content_id


@dataclass(frozen=True, slots=True)
class Shard:
    """One worker's part of the work.

    >>> Shard.parse("0/4")
    Shard(index=0, count=4)
    """

    index: int
    """From 0."""
    count: int

    @staticmethod
    def parse(text: str) -> Shard:
        """The shard of a command line's ``I/N``.

        Raises:
            UserError: unless 0 <= I < N.
        """
        match = re.fullmatch(r"(\d+)/(\d+)", text)
        shard = Shard(int(match[1]), int(match[2])) if match else None
        if shard is None or shard.index >= shard.count:
            raise UserError(f"--shard is {text!r}", rule="it must be I/N with I from 0 to N - 1", fix="for four workers give 0/4, 1/4, 2/4 and 3/4")
        return shard

    def units(self, trajectory_ids: Sequence[str]) -> frozenset[int]:
        """Numbers of this shard's units.

        Trajectories are ordered by a hash of their content id and their units dealt in that order, equally many to each shard:
        a trajectory's units, which share a prefix, go to one worker wherever the equal shares allow it.

        >>> sorted(Shard(0, 2).units(["a", "a", "b", "c"]) | Shard(1, 2).units(["a", "a", "b", "c"]))
        [0, 1, 2, 3]

        Args:
            trajectory_ids: for each unit, in order, the trajectory that its first candidate is a turn of.
        """
        runs = [(content_id(key), [number for number, _ in run]) for key, run in groupby(enumerate(trajectory_ids), key=lambda pair: pair[1])]
        dealt = [number for _, numbers in sorted(runs) for number in numbers]
        start, end = (len(dealt) * index // self.count for index in (self.index, self.index + 1))
        return frozenset(dealt[start:end])


WHOLE = Shard(0, 1)
"""All units."""
