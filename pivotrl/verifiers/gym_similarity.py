"""difflib's similarity of two texts, as the public graders use it, within a bound on the work.

The graders call `difflib.SequenceMatcher` with its defaults, so from 200 characters on the frequent characters of the second text match only beside
others ("autojunk"): two long texts that share almost everything can score near 0. Scores here are the same, to the bit. What differs is that hostile
texts, on which difflib runs for minutes, raise `TooCostly` instead.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence

# Characters and pairs of equal characters looked at, about half a second; two texts of 2,000 characters need less than a tenth of it.
_MAX_STEPS = 1_000_000


class TooCostly(ValueError):
    """The comparison would take longer than a verdict may; never leaves a verifier."""


def similarity(expected: str, found: str) -> float:
    """``SequenceMatcher(None, expected, found).ratio()``, in [0, 1]; not symmetric.

    Raises:
        TooCostly: for texts beyond the bound.
    """
    if expected == found:
        # The longest common block is grown in both directions over the frequent characters, so it is the whole text.
        return 1.0
    if len(expected) + len(found) > _MAX_STEPS:
        raise TooCostly
    return _BoundedMatcher(expected, found).ratio()


class _BoundedMatcher(difflib.SequenceMatcher[str]):
    def __init__(self, expected: str, found: str) -> None:
        super().__init__(None, expected, found)
        self._expected, self._steps_left = expected, _MAX_STEPS

    def find_longest_match(self, alo: int = 0, ahi: int | None = None, blo: int = 0, bhi: int | None = None) -> difflib.Match:
        """The base's, after counting the positions it will look at: it walks the places of every character of the first text in the second."""
        end = len(self._expected) if ahi is None else ahi
        places: Mapping[str, Sequence[int]] = self.b2j  # pyright: ignore[reportAttributeAccessIssue] - documented, missing in the stub
        self._steps_left -= end - alo + sum(len(places.get(character, ())) for character in self._expected[alo:end])
        if self._steps_left < 0:
            raise TooCostly
        return super().find_longest_match(alo, ahi, blo, bhi)
