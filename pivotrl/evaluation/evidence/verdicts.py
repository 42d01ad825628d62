"""The rules by which the hypotheses of docs/evidence_protocol.md are decided, and Holm's correction. Pure: numbers in, verdicts out.

Changes are in points. A number that is not there (None) leaves a hypothesis undecided.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import StrEnum

from pivotrl.pivots.statistics import Interval

FORGETS_LESS_POINTS = 1.0
"""H2: PivotRL's interval must lie within minus to plus this."""
MAX_TURNS_RATIO = 0.25
"""H3."""
NUM_QUARTERS = 4
"""H5."""


class Verdict(StrEnum):
    """What the runs say about a hypothesis."""

    SHOWN = "shown"
    CONTRADICTED = "contradicted"
    NOT_DECIDED = "not decided"


def improves(change: Interval | None) -> Verdict:
    """H1: shown where the whole interval is above 0, contradicted where it is below.

    >>> improves(Interval(2.0, 0.5, 3.0, 100)).value
    'shown'
    """
    return _all_above([change])


def forgets_less(sft: Interval | None, pivotrl: Interval | None) -> Verdict:
    """H2: shown where SFT's interval is below 0 and PivotRL's within -1 to +1; contradicted where either lies wholly on the other side.

    >>> forgets_less(Interval(-9.0, -11.0, -7.0, 100), Interval(0.1, -0.6, 0.9, 100)).value
    'shown'
    """
    if sft is None or pivotrl is None:
        return Verdict.NOT_DECIDED
    if sft.high < 0 and pivotrl.low >= -FORGETS_LESS_POINTS and pivotrl.high <= FORGETS_LESS_POINTS:
        return Verdict.SHOWN
    is_outside = pivotrl.high < -FORGETS_LESS_POINTS or pivotrl.low > FORGETS_LESS_POINTS
    return Verdict.CONTRADICTED if sft.low > 0 or is_outside else Verdict.NOT_DECIDED


def needs_fewer_turns(ratio: Interval | None) -> Verdict:
    """H3: shown by the point estimate, contradicted only with the whole interval above a quarter."""
    if ratio is None:
        return Verdict.NOT_DECIDED
    if ratio.value <= MAX_TURNS_RATIO:
        return Verdict.SHOWN
    return Verdict.CONTRADICTED if ratio.low > MAX_TURNS_RATIO else Verdict.NOT_DECIDED


def is_ordered(differences: Sequence[Interval | None]) -> Verdict:
    """H4: shown where every interval is above 0, contradicted where any lies below."""
    return _all_above(differences)


def keeps_signal(quarters: Sequence[float] | None) -> Verdict:
    """H5: shown where the mean difference is above 0 in every quarter, contradicted where it is below in any."""
    if quarters is None or len(quarters) < NUM_QUARTERS:
        return Verdict.NOT_DECIDED
    if all(value > 0 for value in quarters):
        return Verdict.SHOWN
    return Verdict.CONTRADICTED if any(value < 0 for value in quarters) else Verdict.NOT_DECIDED


def holm(p_values: Mapping[str, float]) -> dict[str, float]:
    """Holm's step-down correction (1979): the i-th smallest of m times m - i + 1, never below a smaller one's, at most 1.

    >>> holm({"a": 0.01, "b": 0.04, "c": 0.03})
    {'a': 0.03, 'b': 0.06, 'c': 0.06}
    """
    corrected: dict[str, float] = {}
    largest = 0.0
    for index, (name, p) in enumerate(sorted(p_values.items(), key=lambda pair: pair[1])):
        largest = max(largest, min(1.0, (len(p_values) - index) * p))
        corrected[name] = largest
    return {name: corrected[name] for name in p_values}


def _all_above(intervals: Sequence[Interval | None]) -> Verdict:
    known = [interval for interval in intervals if interval is not None]
    if any(interval.high < 0 for interval in known):
        return Verdict.CONTRADICTED
    return Verdict.SHOWN if len(known) == len(intervals) and all(interval.low > 0 for interval in known) else Verdict.NOT_DECIDED
