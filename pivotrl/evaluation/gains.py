"""Format gain and decision gain: how much of a reward difference comes from readable actions, and how much from better ones.

Any two checkpoints are compared at the candidates that both were sampled at, from held-out scores or from profiles. Pure but for
`profile_attempts`, which reads a profile directory. Suffixes: C = candidates.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pivotrl.pivots.dataset import PROFILES, ROLLOUTS
from pivotrl.pivots.parquet import read_rows
from pivotrl.pivots.statistics import Interval, cluster_bootstrap_interval
from pivotrl.types import VerdictKind


@dataclass(frozen=True, slots=True)
class Attempt:
    """One counted action of one checkpoint at one candidate.

    Raises:
        ValueError: where an action that could not be read has a reward.
    """

    candidate_id: str
    cluster: str
    """What is resampled together: the candidate, or the trajectory that it is a turn of."""
    reward: float
    is_well_formed: bool
    """The action could be read and was judged; False for an invalid verdict (malformed, cut, no action), whose reward is 0."""

    def __post_init__(self) -> None:
        if self.reward and not self.is_well_formed:
            raise ValueError(f"an action at {self.candidate_id} could not be read and has reward {self.reward}; it must be 0")


@dataclass(frozen=True, slots=True)
class GainSplit:
    """total = format + decision, exactly, in the estimates and in every resample."""

    total: Interval
    """Mean over candidates of the difference in mean reward, after - before."""
    format: Interval
    """What the change in the share of readable actions is worth at the decisions made."""
    decision: Interval
    """What the change in the reward of readable actions is worth at the share that is readable."""
    well_formed_before: float
    """Mean over candidates of the share of readable actions."""
    well_formed_after: float
    num_one_sided: int
    """Candidates at which one checkpoint, and only one, wrote no readable action: their whole difference is format's."""

    def as_dict(self) -> dict[str, Any]:
        """JSON-ready: three intervals, two shares, n candidates and how many of them are one-sided."""
        intervals = {"total": self.total.as_dict(), "format": self.format.as_dict(), "decision": self.decision.as_dict()}
        shares = {"well_formed_before": self.well_formed_before, "well_formed_after": self.well_formed_after}
        return {**intervals, **shares, "num_candidates": self.total.n, "num_one_sided": self.num_one_sided}


def split_gain(before: Iterable[Attempt], after: Iterable[Attempt], *, seed: int) -> GainSplit | None:
    """Splits the difference of two checkpoints, candidate by candidate; None where they share no candidate.

    At candidate c let f be the share of actions that could be read and d the mean reward of those, so that the mean reward is f d.
    With f', d' after (Kitagawa 1955, the symmetric form, which is also the Shapley value of the two factors)::

        f' d' - f d = (f' - f) (d + d') / 2  +  (d' - d) (f + f') / 2
                       format                    decision

    Decisions nobody could read are unknown: where f = 0, d is taken to be d', and the difference is format's alone (and so for f' = 0).
    Every candidate weighs the same, whatever its number of counted actions. Splitting per candidate keeps a checkpoint that is
    unreadable at hard candidates from looking decided at the rest.

    Args:
        seed: from `identity.derive_seed`; the intervals resample whole clusters, the same ones for all three figures.
    """
    before_C, after_C = _by_candidate(before), _by_candidate(after)
    shared = [candidate_id for candidate_id in before_C if candidate_id in after_C]
    if not shared:
        return None
    pairs = [(_rates(before_C[candidate_id]), _rates(after_C[candidate_id])) for candidate_id in shared]
    format_C, decision_C = zip(*(_split(*early, *late) for early, late in pairs), strict=True)
    clusters = [after_C[candidate_id][0].cluster for candidate_id in shared]
    total_C = [in_format + in_decision for in_format, in_decision in zip(format_C, decision_C, strict=True)]
    interval = lambda values: cluster_bootstrap_interval(values, clusters, seed=seed)  # noqa: E731
    return GainSplit(
        total=interval(total_C),
        format=interval(format_C),
        decision=interval(decision_C),
        well_formed_before=math.fsum(share for (share, _), _ in pairs) / len(pairs),
        well_formed_after=math.fsum(share for _, (share, _) in pairs) / len(pairs),
        num_one_sided=sum((early[0] == 0) != (late[0] == 0) for early, late in pairs),
    )


def profile_attempts(profile_dir: Path) -> list[Attempt]:
    """The counted rollouts of a profile directory, clustered by task; those of two checkpoints' profiles go to `split_gain`."""
    task_of = {row["candidate_id"]: row["task_id"] for row in read_rows(profile_dir / PROFILES, ("candidate_id", "task_id"))}
    rows = read_rows(profile_dir / ROLLOUTS, ("candidate_id", "counted_reward", "verdict"))
    return [_attempt(row, task_of) for row in rows if row["counted_reward"] is not None]


def _attempt(row: Mapping[str, Any], task_of: Mapping[str, str]) -> Attempt:
    is_well_formed = row["verdict"] != VerdictKind.INVALID
    return Attempt(row["candidate_id"], task_of[row["candidate_id"]], row["counted_reward"], is_well_formed)


def _by_candidate(attempts: Iterable[Attempt]) -> dict[str, list[Attempt]]:
    grouped: dict[str, list[Attempt]] = defaultdict(list)
    for attempt in attempts:
        grouped[attempt.candidate_id].append(attempt)
    return grouped


def _rates(attempts: Sequence[Attempt]) -> tuple[float, float | None]:
    """f and d of one checkpoint at one candidate; d is None where nothing could be read."""
    rewards = [attempt.reward for attempt in attempts if attempt.is_well_formed]
    return len(rewards) / len(attempts), math.fsum(rewards) / len(rewards) if rewards else None


def _split(f: float, d: float | None, f_after: float, d_after: float | None) -> tuple[float, float]:
    d, d_after = d if d is not None else d_after, d_after if d_after is not None else d
    if d is None or d_after is None:
        return 0.0, 0.0
    return (f_after - f) * (d + d_after) / 2, (d_after - d) * (f + f_after) / 2
