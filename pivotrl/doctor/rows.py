"""What one pass over the data says of each row: the work of one process, and which process does which rows.

A large file is shared by rows: each of its processes looks at all of it and converts its own share, which is what takes the time. Millions of turns
come back, so they come as columns. Called by data.py. R = rows that hold a trajectory, T = turns of theirs that count; one after the other.
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
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pivotrl.actions.terminus2 import TOOL_NAME
from pivotrl.config.schema import IngestConfig
from pivotrl.identity import derive_seed
from pivotrl.pivots.candidates import HashedTurn, candidate_of, eligible_turns, hashed_turns, split_of
from pivotrl.progress import ProgressBar
from pivotrl.trajectories.plan import ReadTask
from pivotrl.trajectories.prepare import Prepared, no_cycle_collection, shared_rows
from pivotrl.trajectories.shingles import Hashes
from pivotrl.trajectories.source import RowQuarantined
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


type Drawn = tuple[int, int, Trajectory, Candidate]
"""A turn of the sample: its draw, the number of its row, and itself."""

# Of an id's 16 bytes those that `IdSet` compares.
_KEY_BYTES = 8
_KEY = ">u8"


@dataclass(frozen=True, slots=True)
class Rows:
    """The rows of one task in order. Rows are known by their number in the unit of reading, from 0."""

    num_rows: int
    broken: Sequence[tuple[int, str]]
    """Rows that cannot be read: where and why."""
    dropped: Sequence[tuple[int, str]]
    """Rows whose turns do not count, and why; some of them hold a trajectory."""
    numbers_R: NDArray[np.int64]
    ids_R: Hashes
    """First 64 bits of each trajectory's id, as for `IdSet`."""
    places_R: Sequence[str]
    """Where each lies, for a reader."""
    is_counted_R: NDArray[np.bool_]
    is_held_out_R: NDArray[np.bool_]
    rows_T: NDArray[np.int64]
    """Position of each turn's row among the R."""
    turns_T: NDArray[np.int64]
    ids_T: Hashes
    """Of the candidates."""
    states_T: Hashes
    """Of their states."""
    unoffered: Sequence[tuple[int, str, int]]
    """Calls of a tool that the row does not offer: row, name and turn."""


@dataclass(slots=True)
class _Share:
    """What one process read, in order; the columns of `Rows` as they grow."""

    num_rows: int = 0
    broken: list[tuple[int, str]] = field(default_factory=list[tuple[int, str]])
    dropped: list[tuple[int, str]] = field(default_factory=list[tuple[int, str]])
    numbers: array[int] = field(default_factory=lambda: array("q"))
    ids: bytearray = field(default_factory=bytearray)
    places: list[str] = field(default_factory=list[str])
    is_counted: bytearray = field(default_factory=bytearray)
    is_held_out: bytearray = field(default_factory=bytearray)
    num_turns: array[int] = field(default_factory=lambda: array("q"))
    turns: array[int] = field(default_factory=lambda: array("q"))
    turn_ids: bytearray = field(default_factory=bytearray)
    states: bytearray = field(default_factory=bytearray)
    unoffered: list[tuple[int, str, int]] = field(default_factory=list[tuple[int, str, int]])
    drawn: list[Drawn] = field(default_factory=list[Drawn])


def rows_of(tasks: Sequence[ReadTask], settings: Settings, bar: ProgressBar) -> Iterator[tuple[Rows, list[Drawn]]]:
    """For each task in order its rows and the turns with the smallest draws; the same whatever the number of processes."""
    num_bytes = sum(task.num_bytes for task in tasks)
    num_processes = settings.num_processes if num_bytes > _ALONE_BYTES else 1
    if num_processes == 1:
        for task in tasks:
            meter = Meter(bar, task.num_bytes)
            with metered(meter.count):
                share = _read((task, 0, 1, settings))
            yield _joined([share]), share.drawn
            meter.finish()
        return
    counts = [min(num_processes, 1 + task.num_bytes // _ALONE_BYTES) for task in tasks]
    wanted = [(task, index, count, settings) for task, count in zip(tasks, counts, strict=True) for index in range(count)]
    # Not forked: the caller may have threads of its own.
    with ProcessPoolExecutor(num_processes, mp_context=get_context("spawn")) as pool:
        results = pool.map(_read, wanted)
        for task, count in zip(tasks, counts, strict=True):
            shares: list[_Share] = []
            for share in islice(results, count):
                shares.append(share)
                bar.advance(task.num_bytes / count / MB)
            yield _joined(shares), [turn for share in shares for turn in share.drawn]


def _joined(shares: Sequence[_Share]) -> Rows:
    numbers_R = np.concatenate([np.array(share.numbers, np.int64) for share in shares])
    order_R = np.argsort(numbers_R)
    rows_T = np.repeat(np.argsort(order_R), np.concatenate([np.array(share.num_turns, np.int64) for share in shares]))
    # Turns of a row stay in order.
    order_T = np.argsort(rows_T, kind="stable")
    places = [place for share in shares for place in share.places]

    def column(parts: Sequence[Any], dtype: str, order: NDArray[np.int64]) -> NDArray[Any]:
        return np.concatenate([np.frombuffer(part, dtype) for part in parts])[order]

    return Rows(
        num_rows=sum(share.num_rows for share in shares),
        broken=sorted(row for share in shares for row in share.broken),
        dropped=sorted(row for share in shares for row in share.dropped),
        numbers_R=numbers_R[order_R],
        ids_R=column([share.ids for share in shares], _KEY, order_R).astype(np.uint64),
        places_R=[places[position] for position in order_R.tolist()],
        is_counted_R=column([share.is_counted for share in shares], "?", order_R),
        is_held_out_R=column([share.is_held_out for share in shares], "?", order_R),
        rows_T=rows_T[order_T],
        turns_T=column([share.turns for share in shares], "q", order_T),
        ids_T=column([share.turn_ids for share in shares], _KEY, order_T).astype(np.uint64),
        states_T=column([share.states for share in shares], _KEY, order_T).astype(np.uint64),
        unoffered=sorted((call for share in shares for call in share.unoffered), key=lambda call: call[0]),
    )


def _read(wanted: tuple[ReadTask, int, int, Settings]) -> _Share:
    """The rows of one share: those whose number leaves `index` after division by `count`."""
    task, index, count, settings = wanted
    reader = _Reader(settings)
    with no_cycle_collection():
        for number, item in shared_rows(task, settings.tools, domain=settings.config.domain, index=index, count=count):
            reader.share.num_rows += 1
            if isinstance(item, Prepared):
                reader.take(number, item)
            elif isinstance(item.error, RowQuarantined):
                place = f"{item.error.file or task.unit.name}{f':{item.line}' if item.line else ''}"
                reader.share.broken.append((number, f"{place}: {item.error.reason}"))
            else:
                reader.share.dropped.append((number, item.error.reason))
    return reader.finish()


class _Reader:
    """Rows of one share, one after the other."""

    def __init__(self, settings: Settings) -> None:
        self.share = _Share()
        self._config, self._run_seed, self._sample_size = settings.config, settings.run_seed, settings.sample_size
        self._seen: set[str] = set()
        # A heap of negated draws: the largest draw of the sample is on top.
        self._heap: list[tuple[int, str, int, Trajectory, Candidate]] = []

    def finish(self) -> _Share:
        self.share.drawn = [(-draw, number, trajectory, candidate) for draw, _, number, trajectory, candidate in self._heap]
        return self.share

    def take(self, number: int, item: Prepared) -> None:
        trajectory, share = item.trajectory, self.share
        share.numbers.append(number)
        share.ids += bytes.fromhex(trajectory.id)[:_KEY_BYTES]
        share.places.append(f"{trajectory.source_file} row {trajectory.source_index}")
        is_counted = trajectory.outcome.value in self._config.outcomes
        if not is_counted:
            share.dropped.append((number, f"outcome {trajectory.outcome.value}"))
        # Turns of a copy are none of this share; those of a copy in another share data.py leaves out.
        is_hashed = is_counted and trajectory.id not in self._seen
        self._seen.add(trajectory.id)
        turns = hashed_turns(trajectory, item.encoded, eligible_turns(trajectory)[0]) if is_hashed else []
        split = split_of(trajectory.task_id, held_out_frac=self._config.held_out_frac, run_seed=self._run_seed) if turns else Split.TRAIN
        share.is_counted.append(is_counted)
        share.is_held_out.append(split is Split.HELD_OUT)
        share.num_turns.append(len(turns))
        offered = {tool.name for tool in trajectory.tools}
        for turn in turns:
            share.turns.append(turn.turn_index)
            share.turn_ids += turn.id[:_KEY_BYTES]
            share.states += turn.state[:_KEY_BYTES]
            for call in trajectory.messages[turn.message_index].tool_calls:
                if offered and call.name not in offered and call.name != TOOL_NAME:
                    share.unoffered.append((number, call.name, turn.turn_index))
            self._draw(number, trajectory, turn, split)

    def _draw(self, number: int, trajectory: Trajectory, turn: HashedTurn, split: Split) -> None:
        """Keeps a turn while its draw is among the smallest; of equal turns the first."""
        turn_id = turn.id.hex()
        order = (-derive_seed(0, "doctor sample", turn_id), turn_id)
        is_full = len(self._heap) >= self._sample_size
        if (is_full and order <= self._heap[0][:2]) or any(kept[1] == turn_id for kept in self._heap):
            return
        entry = (*order, number, trajectory, candidate_of(trajectory, turn, split))
        if is_full:
            heapq.heapreplace(self._heap, entry)
        else:
            heapq.heappush(self._heap, entry)
