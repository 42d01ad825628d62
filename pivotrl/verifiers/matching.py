"""Maximum matching between what the expert did and what the action did (parallel calls, items of unordered lists, batched queries)."""

from __future__ import annotations

from collections.abc import Callable

MAX_MATCHED = 64
"""Larger sides are not matched: the work is cubic, and no expert makes so many calls."""


def maximum_matching(num_left: int, num_right: int, is_pair: Callable[[int, int], bool]) -> dict[int, int]:
    """The right partner of each matched left one, as many as possible (augmenting paths). `is_pair` is asked once per pair.

    >>> maximum_matching(2, 2, lambda i, j: (i, j) in {(0, 0), (0, 1), (1, 0)})
    {1: 0, 0: 1}
    """
    known: dict[tuple[int, int], bool] = {}
    left_of: dict[int, int] = {}

    def asked(i: int, j: int) -> bool:
        if (i, j) not in known:
            known[i, j] = is_pair(i, j)
        return known[i, j]

    def augment(i: int, tried: set[int]) -> bool:
        for j in range(num_right):
            if j not in tried and asked(i, j):
                tried.add(j)
                if j not in left_of or augment(left_of[j], tried):
                    left_of[j] = i
                    return True
        return False

    for i in range(num_left):
        augment(i, set())
    return {i: j for j, i in left_of.items()}
