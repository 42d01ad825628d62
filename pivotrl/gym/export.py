"""Pivots out as NeMo-Gym rows: the imported row where there is one, else a row built anew; checked against the contract, one by one.

An imported row keeps every field and its order; what the contract asks for is added (`agent_ref`, `tool_choice`, tools of a tool list given at
import) and what it forbids is taken away (null metadata, seeds), nothing else. A profile adds its provenance: trajectory_id, pass_rate,
pass_rate_total, pass_rate_passed and `profile_info`, in place of another policy's.
"""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pivotrl.gym.build_row import agent_ref, build_row, tools_of
from pivotrl.gym.contract import Problem, problem_of
from pivotrl.gym.kept_rows import KeptRow, kept_rows
from pivotrl.pivots.dataset import PROFILES, PivotStore, exact_moments
from pivotrl.pivots.parquet import read_rows as read_parquet
from pivotrl.rundir import Stage
from pivotrl.trajectories.store import CandidateStore, TrajectoryStore, encode
from pivotrl.types import Action, Domain, Pivot, State, ToolOrigin, Trajectory

# Rows left out that the manifest names; all are counted.
_NAMED_ROWS = 1000


@dataclass(frozen=True, slots=True)
class ExportRow:
    """One row to write, and what it came from."""

    place: str
    """File and line of the imported row, or the candidate's id."""
    value: dict[str, Any]


@dataclass(slots=True)
class ExportCounts:
    """What was written and what was not."""

    written: int = 0
    left_out: Counter[str] = field(default_factory=Counter[str])
    """By the part of the contract that failed."""
    rows: list[dict[str, str]] = field(default_factory=list[dict[str, str]])
    """place, what, rule and fix of the first rows left out."""

    def leave_out(self, place: str, problem: Problem) -> None:
        """Counts a row that breaks the contract."""
        self.left_out[problem.what] += 1
        if len(self.rows) < _NAMED_ROWS:
            self.rows.append({"place": place, "what": problem.what, "rule": problem.rule, "fix": problem.fix})


def write_export(path: Path, rows: Iterable[ExportRow], advance: Callable[[int], None]) -> ExportCounts:
    """Writes the rows that keep the contract as JSONL; the file appears whole or not at all, and not at all where no row is left."""
    counts = ExportCounts()
    temporary = path.with_name(f".{path.name}.tmp")
    with temporary.open("wb") as stream:
        for row in rows:
            problem = problem_of(row.value)
            if problem is None:
                stream.write(encode(row.value) + b"\n")
                counts.written += 1
            else:
                counts.leave_out(row.place, problem)
            advance(1)
        stream.flush()
        os.fsync(stream.fileno())
    if counts.written:
        temporary.replace(path)
    else:
        temporary.unlink()
    return counts


def selected_rows(run: Path, agent: str | None) -> Iterator[ExportRow]:
    """The run's selected pivots, with the provenance of their profile.

    Args:
        agent: name for `agent_ref`; None keeps the row's, or takes the domain's.
    """
    store = PivotStore.open(Stage.require(run, "select"))
    trajectories = TrajectoryStore.open(Stage.require(run, "ingest"))
    wanted = {pivot.candidate_id for pivot in store.pivots}
    profiles = read_parquet(run / "profile" / PROFILES, ("candidate_id", "rewards"), keep=("candidate_id", wanted))
    rewards = {row["candidate_id"]: tuple(row["rewards"]) for row in profiles}
    imported = {row.trajectory_id: row for row in kept_rows(run, {pivot.trajectory_id for pivot in store.pivots})}
    for pivot in store.pivots:
        trajectory = trajectories.get(pivot.trajectory_id)
        row = _row(trajectory, pivot.message_index, pivot.expert_action, pivot.candidate_id, imported.get(pivot.trajectory_id), agent)
        yield ExportRow(row.place, {**row.value, **_provenance(pivot, rewards[pivot.candidate_id], row.value)})


def ingested_rows(ingest_dir: Path, run: Path, agent: str | None) -> Iterator[ExportRow]:
    """Every imported row in the order it was read; where nothing was imported, every candidate."""
    trajectories = TrajectoryStore.open(ingest_dir)
    if Stage.is_done(run, "gym"):
        for kept in kept_rows(run):
            yield ExportRow(kept.place, _by_contract(kept.value, trajectories.get(kept.trajectory_id), agent))
        return
    for candidate in CandidateStore.open(ingest_dir).iterate():
        trajectory = trajectories.get(candidate.trajectory_id)
        yield _row(trajectory, candidate.message_index, candidate.expert_action, candidate.id, None, agent)


def _row(trajectory: Trajectory, message_index: int, expert: Action, candidate_id: str, kept: KeptRow | None, agent: str | None) -> ExportRow:
    if kept is not None:
        return ExportRow(kept.place, _by_contract(kept.value, trajectory, agent))
    state = State(trajectory.messages[:message_index], trajectory.tools, trajectory.tool_origin)
    built = build_row(state, expert, domain=trajectory.domain, uuid=candidate_id, parallel_tool_calls=trajectory.parallel_tool_calls)
    return ExportRow(candidate_id, _with_agent(built, trajectory.domain, agent))


def _by_contract(row: Mapping[str, Any], trajectory: Trajectory, agent: str | None) -> dict[str, Any]:
    """The imported row with what the contract asks for and without what it forbids."""
    params = _without_forbidden(row["responses_create_params"])
    if isinstance(params.get("input"), str):
        params["input"] = [{"type": "message", "role": "user", "content": params["input"]}]
    if not isinstance(params.get("parallel_tool_calls"), bool):
        params["parallel_tool_calls"] = trajectory.parallel_tool_calls
    params.setdefault("tool_choice", "auto")
    if row.get("expected_action") and not params.get("tools"):
        state = State((), trajectory.tools, trajectory.tool_origin)
        # Tools given at import; a row that needs none still states so.
        params["tools"] = tools_of(state) if trajectory.tool_origin is ToolOrigin.FILE else []
    return _with_agent(_without_forbidden({**row, "responses_create_params": params}), trajectory.domain, agent)


def _without_forbidden(value: Mapping[str, Any]) -> dict[str, Any]:
    return {key: member for key, member in value.items() if key != "seed" and not (key == "metadata" and member is None)}


def _with_agent(row: dict[str, Any], domain: Domain, agent: str | None) -> dict[str, Any]:
    if agent is not None:
        return {**row, "agent_ref": {"type": "responses_api_agents", "name": agent}}
    return row if row.get("agent_ref") else {**row, "agent_ref": agent_ref(domain)}


def _provenance(pivot: Pivot, rewards_K: tuple[float, ...], row: Mapping[str, Any]) -> dict[str, Any]:
    mean, variance = exact_moments(rewards_K)
    return {
        "trajectory_id": row.get("trajectory_id") or pivot.trajectory_id,
        "pass_rate": pivot.successes / pivot.num_samples,
        "pass_rate_total": pivot.num_samples,
        "pass_rate_passed": pivot.successes,
        # Population standard deviation, as in Eq. 4.
        "profile_info": {"rewards": list(rewards_K), "reward_mean": mean, "reward_std": None if variance is None else math.sqrt(variance)},
    }
