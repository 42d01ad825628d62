"""What one pass over the data says of each row: the work of one process, and which process does which rows.

A large file is shared by rows: each of its processes parses all of it and converts its own share, which is what takes the time. Called by data.py.
"""

from __future__ import annotations

import heapq
import os
from array import array
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from itertools import islice
from multiprocessing import get_context

from pivotrl.actions.terminus2 import TOOL_NAME
from pivotrl.config.schema import IngestConfig
from pivotrl.identity import canonical_json, derive_seed, running_id
from pivotrl.pivots.candidates import extract_candidates
from pivotrl.progress import ProgressBar
from pivotrl.trajectories.plan import ReadTask
from pivotrl.trajectories.prepare import LeftOut, Prepared, no_cycle_collection, shared_rows
from pivotrl.trajectories.source import RowQuarantined
from pivotrl.trajectories.store import encode_message
from pivotrl.trajectories.streams import MB, Meter, metered
from pivotrl.types import Candidate, Split, Tool, Trajectory

# Less than this is read before a second process has started.
_ALONE_BYTES = 32 << 20
# A login node is shared.
_MAX_PROCESSES = 8


def usual_processes() -> int:
    """As many as this process may use cores, up to a limit."""
    return min(_MAX_PROCESSES, len(os.sched_getaffinity(0)))


@dataclass(frozen=True, slots=True)
class Settings:
    """What every process needs."""

    config: IngestConfig
    tools: tuple[Tool, ...] | None
    run_seed: int
    sample_size: int
    num_processes: int
    """Of large data; small data are read by one."""


@dataclass(frozen=True, slots=True)
class Turns:
    """Turns of one row, one entry each. Ids are the first 64 bits of content ids, as `IdSet` compares them."""

    candidates: array[int] = field(default_factory=lambda: array("Q"))
    states: array[int] = field(default_factory=lambda: array("Q"))
    numbers: array[int] = field(default_factory=lambda: array("L"))
    is_held_out: bool = False


@dataclass(frozen=True, slots=True)
class Row:
    """One row; `broken` or `dropped` says why it gives no turns."""

    number: int
    """In its unit of reading, from 0."""
    where: str = ""
    trajectory_id: str = ""
    broken: str = ""
    dropped: str = ""
    turns: Turns = field(default_factory=Turns)
    unoffered: tuple[tuple[str, int], ...] = ()
    """Tools that the expert calls and is not offered, with the turn."""


type Drawn = tuple[int, int, Trajectory, Candidate]
"""A turn of the sample: its draw, the number of its row, and itself."""


def rows_of(tasks: Sequence[ReadTask], settings: Settings, bar: ProgressBar) -> Iterator[tuple[list[Row], list[Drawn]]]:
    """For each task in order its rows in order and the turns with the smallest draws; the same whatever the number of processes."""
    num_bytes = sum(task.num_bytes for task in tasks)
    num_processes = settings.num_processes if num_bytes > _ALONE_BYTES else 1
    if num_processes == 1:
        for task in tasks:
            meter = Meter(bar, task.num_bytes)
            with metered(meter.count):
                yield _read((task, 0, 1, settings))
            meter.finish()
        return
    counts = [min(num_processes, 1 + task.num_bytes // _ALONE_BYTES) for task in tasks]
    shares = [(task, index, count, settings) for task, count in zip(tasks, counts, strict=True) for index in range(count)]
    # Not forked: the caller may have threads of its own.
    with ProcessPoolExecutor(num_processes, mp_context=get_context("spawn")) as pool:
        results = pool.map(_read, shares)
        for task, count in zip(tasks, counts, strict=True):
            rows: list[Row] = []
            drawn: list[Drawn] = []
            for part, sample in islice(results, count):
                rows += part
                drawn += sample
                bar.advance(task.num_bytes / count / MB)
            yield sorted(rows, key=lambda row: row.number), drawn


def _read(share: tuple[ReadTask, int, int, Settings]) -> tuple[list[Row], list[Drawn]]:
    """The rows of one share: those whose number leaves `index` after division by `count`."""
    task, index, count, settings = share
    rows: list[Row] = []
    # A heap of negated draws: the largest draw of the sample is on top.
    heap: list[tuple[int, str, int, Trajectory, Candidate]] = []
    seen: set[str] = set()
    with no_cycle_collection():
        for number, item in shared_rows(task, settings.tools, domain=settings.config.domain, index=index, count=count):
            rows.append(_row(number, item, task.unit.name, settings, heap, seen))
    return rows, [(-draw, number, trajectory, candidate) for draw, _, number, trajectory, candidate in heap]


def _row(
    number: int,
    item: Prepared | LeftOut,
    unit_name: str,
    settings: Settings,
    heap: list[tuple[int, str, int, Trajectory, Candidate]],
    seen: set[str],
) -> Row:
    if isinstance(item, LeftOut):
        if isinstance(item.error, RowQuarantined):
            return Row(number, broken=f"{item.error.file or unit_name}{f':{item.line}' if item.line else ''}: {item.error.reason}")
        return Row(number, dropped=item.error.reason)
    trajectory = item.trajectory
    where = f"{trajectory.source_file} row {trajectory.source_index}"
    if trajectory.outcome.value not in settings.config.outcomes:
        seen.add(trajectory.id)
        return Row(number, where, trajectory.id, dropped=f"outcome {trajectory.outcome.value}")
    if trajectory.id in seen:
        return Row(number, where, trajectory.id)
    seen.add(trajectory.id)
    encoded = [encode_message(message) for message in trajectory.messages]
    extraction = extract_candidates(trajectory, encoded_messages=encoded, held_out_frac=settings.config.held_out_frac, run_seed=settings.run_seed)
    candidates = extraction.candidates
    turns = Turns(
        array("Q", (int(one.id[:16], 16) for one in candidates)),
        array("Q", (int(state[:16], 16) for state in _state_ids(trajectory, encoded, candidates))),
        array("L", (one.turn_index for one in candidates)),
        is_held_out=any(one.split is Split.HELD_OUT for one in candidates),
    )
    offered = {tool.name for tool in trajectory.tools}
    unoffered = tuple(
        (call.name, one.turn_index)
        for one in candidates
        for call in one.expert_action.tool_calls
        if offered and call.name not in offered and call.name != TOOL_NAME
    )
    for one in candidates:
        _draw(heap, settings.sample_size, number, trajectory, one)
    return Row(number, where, trajectory.id, turns=turns, unoffered=unoffered)


def _draw(heap: list[tuple[int, str, int, Trajectory, Candidate]], size: int, number: int, trajectory: Trajectory, candidate: Candidate) -> None:
    """Keeps a turn while its draw is among the smallest; of equal turns the first."""
    entry = (-derive_seed(0, "doctor sample", candidate.id), candidate.id, number, trajectory, candidate)
    if len(heap) >= size and entry[:2] <= heap[0][:2]:
        return
    if any(kept[1] == candidate.id for kept in heap):
        return
    if len(heap) < size:
        heapq.heappush(heap, entry)
    else:
        heapq.heapreplace(heap, entry)


def _state_ids(trajectory: Trajectory, encoded: Sequence[bytes], candidates: Sequence[Candidate]) -> Iterator[str]:
    """Content id of each candidate's state: tools and messages before the turn."""
    running, num_hashed = running_id(canonical_json(trajectory.tools)), 0
    for candidate in candidates:
        for message in encoded[num_hashed : candidate.message_index]:
            running.update(message)
        num_hashed = candidate.message_index
        yield running.copy().hexdigest()
