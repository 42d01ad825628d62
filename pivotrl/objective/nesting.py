"""Sequences that begin other sequences: turns of one episode, and samples that came out the same. Pure; used to lay each out once."""

from __future__ import annotations

from collections.abc import Sequence


def hosts(sequences: Sequence[Sequence[int]]) -> list[int]:
    """For every sequence the index of one that begins with it and begins no further one; its own where there is none.

    In lexicographic order everything between a sequence and one that begins with it begins with it too, so looking at the next is enough.

    >>> hosts([(1, 2), (3,), (1, 2, 3, 4), (1, 2, 3)])
    [2, 1, 2, 2]
    """
    found = list(range(len(sequences)))
    order = sorted(found, key=lambda index: tuple(sequences[index]))
    for at in range(len(order) - 2, -1, -1):
        this, following = order[at], order[at + 1]
        if tuple(sequences[following][: len(sequences[this])]) == tuple(sequences[this]):
            found[this] = found[following]
    return found
