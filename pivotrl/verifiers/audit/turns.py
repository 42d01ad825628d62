"""The expert turns that an audit judges, streamed from ingested data or taken from labelled pairs."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from pivotrl.identity import content_id, derive_seed
from pivotrl.pivots.candidates import state_of
from pivotrl.pivots.dataset import PROFILES
from pivotrl.pivots.parquet import read_rows
from pivotrl.rundir import Stage
from pivotrl.trajectories.store import CandidateStore, TrajectoryStore
from pivotrl.types import Action, State
from pivotrl.verifiers.labelled import LabelledPair


@dataclass(frozen=True, slots=True)
class ExpertTurn:
    """One state with the expert's action, as the audit sees it."""

    id: str
    task_id: str
    """Turns of one task are not independent: intervals resample whole tasks."""
    source: str
    """Format it was read from, or ``labelled``."""
    domain: str
    state: State
    expert: Action
    quarantine_reason: str | None
    """Why an earlier profile quarantined the turn, or None."""


def count_turns(ingest_dir: Path, limit: int | None) -> int:
    """How many turns `stored_turns` gives."""
    num_candidates = len(CandidateStore.open(ingest_dir))
    return num_candidates if limit is None else min(limit, num_candidates)


def stored_turns(ingest_dir: Path, quarantined: Mapping[str, str], limit: int | None) -> Iterator[ExpertTurn]:
    """The candidates of a finished ingest stage in stored order.

    Args:
        quarantined: reason by candidate id, from `quarantine_reasons`.
        limit: a sample of that many candidates, the same at every call; None gives all.
    """
    candidates, trajectories = CandidateStore.open(ingest_dir), TrajectoryStore.open(ingest_dir)
    chosen = None if limit is None else _sample((one.id for one in candidates.iterate()), limit)
    for candidate in candidates.iterate():
        if chosen is not None and candidate.id not in chosen:
            continue
        trajectory = trajectories.get(candidate.trajectory_id)
        yield ExpertTurn(
            id=candidate.id,
            task_id=candidate.task_id,
            source=trajectory.source_format,
            domain=candidate.domain.value,
            state=state_of(trajectory, candidate),
            expert=candidate.expert_action,
            quarantine_reason=quarantined.get(candidate.id),
        )


def _sample(ids: Iterable[str], limit: int) -> frozenset[str]:
    return frozenset(heapq.nsmallest(limit, ids, key=lambda one: derive_seed(0, "audit sample", one)))


def quarantine_reasons(run: Path) -> dict[str, str]:
    """Reason by candidate id of what the run's profile quarantined; empty where it has not been profiled."""
    if not Stage.is_done(run, "profile"):
        return {}
    rows = read_rows(run / "profile" / PROFILES, ("candidate_id", "quarantine_reason"))
    return {row["candidate_id"]: row["quarantine_reason"] for row in rows if row["quarantine_reason"] is not None}


def labelled_turns(pairs: Iterable[LabelledPair]) -> list[ExpertTurn]:
    """Each expert action of the pairs once per state; its id is that of the first pair that holds it."""
    turns: dict[str, ExpertTurn] = {}
    for pair in pairs:
        key = content_id(pair.domain, pair.state, pair.expert)
        turns.setdefault(key, ExpertTurn(pair.id, key, "labelled", pair.domain, pair.state, pair.expert, None))
    return list(turns.values())
