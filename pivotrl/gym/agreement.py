"""How often a verifier gives the reward that was recorded, and where it does not.

Pure counting over recorded actions: `compare` judges them in batches, `Agreement` keeps the numbers. Called by the verb `verify`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import batched
from pathlib import Path
from typing import Any

from pivotrl.gym.rows import GymRow, Recorded, read_rows, recorded
from pivotrl.pivots.dataset import ROLLOUTS, ProfileStore, action_of_text
from pivotrl.pivots.parquet import read_rows as read_parquet
from pivotrl.pivots.statistics import Interval, wilson_interval
from pivotrl.rundir import Stage
from pivotrl.trajectories.source import RowQuarantined
from pivotrl.trajectories.store import TrajectoryStore
from pivotrl.types import State, Verdict, VerdictKind
from pivotrl.verifiers.protocol import Case, Verifier, verify_all

# Graded rewards are float arithmetic in another order.
_SAME_REWARD = 1e-9
# A judge overlaps its waiting within one batch.
_BATCH = 256
# Disagreements kept in full; all are counted.
_KEPT_DISAGREEMENTS = 1000


@dataclass(frozen=True, slots=True)
class Unscored:
    """A recorded action that could not be compared."""

    place: str
    reason: str


@dataclass(frozen=True, slots=True)
class Disagreement:
    """One action with another reward than the recorded one."""

    place: str
    recorded: float
    given: float
    reason: str
    """The verifier's."""


@dataclass(slots=True)
class Agreement:
    """Counts of a comparison."""

    num_agreed: int = 0
    num_scored: int = 0
    unscored: Counter[str] = field(default_factory=Counter[str])
    """Reason: the row cannot be read, or the verifier did not decide."""
    kinds: Counter[tuple[float, float, str]] = field(default_factory=Counter[tuple[float, float, str]])
    """Disagreements by (recorded reward, given reward, the verifier's reason)."""
    first: dict[tuple[float, float, str], str] = field(default_factory=dict[tuple[float, float, str], str])
    """The place of the first disagreement of each kind."""
    disagreements: list[Disagreement] = field(default_factory=list[Disagreement])

    @property
    def interval(self) -> Interval:
        """Share of the scored actions that got their recorded reward."""
        return wilson_interval(self.num_agreed, self.num_scored)

    def add(self, one: Recorded, verdict: Verdict) -> None:
        """Counts one judged action."""
        if verdict.kind in (VerdictKind.INFRA, VerdictKind.ABSTAIN):
            stages = verdict.detail.get("stages")
            self.unscored[f"not decided: {stages[-1] if stages else verdict.reason}"] += 1
            return
        self.num_scored += 1
        if abs(verdict.reward - one.reward) <= _SAME_REWARD:
            self.num_agreed += 1
            return
        kind = (one.reward, verdict.reward, verdict.reason)
        self.kinds[kind] += 1
        self.first.setdefault(kind, one.place)
        if len(self.disagreements) < _KEPT_DISAGREEMENTS:
            self.disagreements.append(Disagreement(one.place, one.reward, verdict.reward, verdict.reason))

    def result(self) -> dict[str, Any]:
        """JSON-ready numbers."""
        return {
            "agreement": self.interval.as_dict(),
            "num_disagreements": self.num_scored - self.num_agreed,
            "unscored": dict(sorted(self.unscored.items())),
            "kinds": [
                {"recorded": kind[0], "given": kind[1], "reason": kind[2], "rows": count, "first": self.first[kind]}
                for kind, count in self.kinds.most_common()
            ],
            "disagreements": [{"place": one.place, "recorded": one.recorded, "given": one.given, "reason": one.reason} for one in self.disagreements],
        }


def compare(actions: Iterable[Recorded | Unscored], verifier_for: Callable[[Recorded], Verifier], advance: Callable[[int], None]) -> Agreement:
    """Judges recorded actions again.

    Args:
        verifier_for: the verifier of one action; the same object for the same settings, so that a batch is judged at once.
        advance: called with the number of actions done.
    """
    agreement = Agreement()
    for batch in batched(actions, _BATCH):
        by_verifier: dict[int, tuple[Verifier, list[Recorded]]] = {}
        for one in batch:
            if isinstance(one, Unscored):
                agreement.unscored[one.reason] += 1
                continue
            verifier = verifier_for(one)
            by_verifier.setdefault(id(verifier), (verifier, []))[1].append(one)
        for verifier, group in by_verifier.values():
            for one, verdict in zip(group, verify_all(verifier, [one.case for one in group]), strict=True):
                agreement.add(one, verdict)
        advance(len(batch))
    return agreement


def recorded_responses(path: Path, expected: Path | None) -> Iterator[Recorded | Unscored]:
    """Every row of a file or folder of NeMo-Gym rollouts.

    Args:
        expected: rows that hold the expert's action, joined by `uuid`, for rollouts that do not.
    """
    experts = {} if expected is None else {str(row.value.get("uuid")): row.value for row in read_rows([expected]) if isinstance(row, GymRow)}
    for row in read_rows([path]):
        try:
            if isinstance(row, RowQuarantined):
                raise row
            yield recorded(row, experts)
        except RowQuarantined as broken:
            place = row.place if isinstance(row, GymRow) else f"{broken.file}:{broken.line}"
            yield Unscored(place, broken.reason)


def recorded_rollouts(run: Path) -> Iterator[Recorded | Unscored]:
    """Every completion that a run's profile paid for, with the reward its verifier gave."""
    profile_dir, trajectories = Stage.require(run, "profile"), TrajectoryStore.open(Stage.require(run, "ingest"))
    candidates = {one.candidate.id: one.candidate for one in ProfileStore.open(profile_dir).iterate()}
    for row in read_parquet(profile_dir / ROLLOUTS, ("candidate_id", "sample_index", "reward", "verdict", "action")):
        place = f"{row['candidate_id']}/{row['sample_index']}"
        if row["verdict"] == VerdictKind.INFRA:
            yield Unscored(place, "recorded verdict is infra")
            continue
        candidate = candidates[row["candidate_id"]]
        trajectory = trajectories.get(candidate.trajectory_id)
        state = State(trajectory.messages[: candidate.message_index], trajectory.tools, trajectory.tool_origin)
        yield Recorded(place, Case(state, candidate.expert_action, action_of_text(row["action"])), row["reward"])
