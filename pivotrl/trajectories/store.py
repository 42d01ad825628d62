"""The ingested data on disk: trajectories.parquet and candidates.parquet, written in row groups, read one row group at a time.

`TrajectoryStore` and `CandidateStore` are how every later stage reads them; the `*_table` functions and schemas are for `ingest.py`. Messages,
tools and actions are JSON of the records in one binary column each. Text that UTF-8 cannot hold (a lone surrogate) is written as a ``\\udXXX``
escape, which is legal JSON in ASCII, and read back as it was.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import orjson
import pyarrow as pa
import pyarrow.parquet as pq

from pivotrl.rundir import open_parquet
from pivotrl.types import Action, Candidate, Domain, Message, Origin, Outcome, ParseOutcome, Role, Split, Tool, ToolCall, ToolOrigin, Trajectory

TRAJECTORIES = "trajectories.parquet"
CANDIDATES = "candidates.parquet"
_CACHED_ROW_GROUPS = 16
_CACHED_TRAJECTORIES = 32

TRAJECTORY_SCHEMA = pa.schema(
    [
        pa.field("id", pa.string(), nullable=False),
        pa.field("source_format", pa.string(), nullable=False),
        pa.field("source_file", pa.string(), nullable=False),
        pa.field("source_index", pa.int64(), nullable=False),
        pa.field("task_id", pa.string(), nullable=False),
        pa.field("domain", pa.string(), nullable=False),
        pa.field("outcome", pa.string(), nullable=False),
        pa.field("reward", pa.float64()),
        pa.field("messages", pa.binary(), nullable=False),
        pa.field("tools", pa.binary(), nullable=False),
        pa.field("tool_origin", pa.string(), nullable=False),
        pa.field("parallel_tool_calls", pa.bool_(), nullable=False),
    ]
)
CANDIDATE_SCHEMA = pa.schema(
    [
        pa.field("id", pa.string(), nullable=False),
        pa.field("trajectory_id", pa.string(), nullable=False),
        pa.field("task_id", pa.string(), nullable=False),
        pa.field("domain", pa.string(), nullable=False),
        pa.field("message_index", pa.int32(), nullable=False),
        pa.field("turn_index", pa.int32(), nullable=False),
        pa.field("split", pa.string(), nullable=False),
        pa.field("expert_action", pa.binary(), nullable=False),
    ]
)
# Columns whose few values repeat; the others are not worth a dictionary.
_DICTIONARY_COLUMNS = ("source_format", "source_file", "task_id", "domain", "outcome", "tool_origin", "split", "trajectory_id")


def parquet_writer(path: Path, schema: pa.Schema) -> pq.ParquetWriter:
    """A writer with the settings of all ingested data; the bytes depend on the rows, their grouping and pyarrow's version only."""
    columns = [name for name in schema.names if name in _DICTIONARY_COLUMNS]
    return pq.ParquetWriter(path, schema, compression="zstd", use_dictionary=columns, write_statistics=False)  # pyright: ignore[reportArgumentType] - the stub knows bool only


def encode(records: Any) -> bytes:
    """JSON of a record or a sequence of records; ASCII with escapes where the text is not valid Unicode or an integer exceeds 64 bits."""
    try:
        return orjson.dumps(records)
    except TypeError:
        return json.dumps(records, default=_as_plain, separators=(",", ":")).encode()


def decode_messages(data: bytes) -> tuple[Message, ...]:
    """Messages written by `encode`."""
    return tuple(_message(value) for value in _loads(data))


def decode_tools(data: bytes) -> tuple[Tool, ...]:
    """Tools written by `encode`."""
    return tuple(Tool(**value) for value in _loads(data))


def decode_action(data: bytes) -> Action:
    """An action written by `encode`."""
    value = _loads(data)
    return Action(value["content"], _tool_calls(value["tool_calls"]), value["reasoning"], ParseOutcome(value["parse"]))


def trajectory_columns(trajectories: Sequence[Trajectory], messages: Sequence[bytes]) -> dict[str, list[Any]]:
    """Columns of `TRAJECTORY_SCHEMA`; `messages` are their encoded forms, which the caller has at hand."""
    return {
        "id": [trajectory.id for trajectory in trajectories],
        "source_format": [trajectory.source_format for trajectory in trajectories],
        "source_file": [trajectory.source_file for trajectory in trajectories],
        "source_index": [trajectory.source_index for trajectory in trajectories],
        "task_id": [trajectory.task_id for trajectory in trajectories],
        "domain": [trajectory.domain.value for trajectory in trajectories],
        "outcome": [trajectory.outcome.value for trajectory in trajectories],
        "reward": [trajectory.reward for trajectory in trajectories],
        "messages": list(messages),
        "tools": [encode(trajectory.tools) for trajectory in trajectories],
        "tool_origin": [trajectory.tool_origin.value for trajectory in trajectories],
        "parallel_tool_calls": [trajectory.parallel_tool_calls for trajectory in trajectories],
    }


def candidate_columns(candidates: Sequence[Candidate], actions: Sequence[bytes]) -> dict[str, list[Any]]:
    """Columns of `CANDIDATE_SCHEMA`; `actions` are the expert actions' encoded forms."""
    return {
        "id": [candidate.id for candidate in candidates],
        "trajectory_id": [candidate.trajectory_id for candidate in candidates],
        "task_id": [candidate.task_id for candidate in candidates],
        "domain": [candidate.domain.value for candidate in candidates],
        "message_index": [candidate.message_index for candidate in candidates],
        "turn_index": [candidate.turn_index for candidate in candidates],
        "split": [candidate.split.value for candidate in candidates],
        "expert_action": list(actions),
    }


class TrajectoryStore:
    """Random access by id and streaming over trajectories.parquet. Memory: the ids, and the last few row groups read."""

    def __init__(self, path: Path) -> None:
        self._file: pq.ParquetFile = open_parquet(path)
        self._places: dict[str, tuple[int, int]] = {}
        for group in range(self._file.num_row_groups):
            for row, trajectory_id in enumerate(self._file.read_row_group(group, columns=["id"]).column("id").to_pylist()):
                self._places[trajectory_id] = (group, row)
        # A later stage asks for the trajectory of each candidate, and candidates of one trajectory follow each other.
        self._decoded = functools.lru_cache(maxsize=_CACHED_TRAJECTORIES)(self._decode)
        self._row_group = functools.lru_cache(maxsize=_CACHED_ROW_GROUPS)(self._file.read_row_group)

    @staticmethod
    def open(ingest_dir: Path) -> TrajectoryStore:
        """The store of a finished ingest stage."""
        return TrajectoryStore(ingest_dir / TRAJECTORIES)

    def __len__(self) -> int:
        return len(self._places)

    def get(self, trajectory_id: str) -> Trajectory:
        """One trajectory.

        Raises:
            KeyError: for an id that is not in the store.
        """
        return self._decoded(trajectory_id)

    def _decode(self, trajectory_id: str) -> Trajectory:
        group, row = self._places[trajectory_id]
        return _trajectory(self._row_group(group).slice(row, 1).to_pylist()[0])

    def iterate(self) -> Iterator[Trajectory]:
        """All trajectories in stored order, one row group in memory."""
        for row in _rows(self._file):
            yield _trajectory(row)


class CandidateStore:
    """Streaming over candidates.parquet."""

    def __init__(self, path: Path) -> None:
        self._file: pq.ParquetFile = open_parquet(path)

    @staticmethod
    def open(ingest_dir: Path) -> CandidateStore:
        """The store of a finished ingest stage."""
        return CandidateStore(ingest_dir / CANDIDATES)

    def __len__(self) -> int:
        return self._file.metadata.num_rows

    def iterate(self) -> Iterator[Candidate]:
        """All candidates in stored order (by trajectory, then turn), one row group in memory."""
        for row in _rows(self._file):
            yield Candidate(
                **{
                    **row,
                    "domain": Domain(row["domain"]),
                    "split": Split(row["split"]),
                    "expert_action": decode_action(row["expert_action"]),
                }
            )


def _rows(file: pq.ParquetFile) -> Iterator[dict[str, Any]]:
    for group in range(file.num_row_groups):
        for batch in file.read_row_group(group).to_batches(max_chunksize=64):
            yield from batch.to_pylist()


def _trajectory(row: Mapping[str, Any]) -> Trajectory:
    return Trajectory(
        **{
            **row,
            "domain": Domain(row["domain"]),
            "outcome": Outcome(row["outcome"]),
            "messages": decode_messages(row["messages"]),
            "tools": decode_tools(row["tools"]),
            "tool_origin": ToolOrigin(row["tool_origin"]),
        }
    )


def _message(value: dict[str, Any]) -> Message:
    value["role"], value["origin"], value["parse"] = Role(value["role"]), Origin(value["origin"]), ParseOutcome(value["parse"])
    value["tool_calls"] = _tool_calls(value["tool_calls"])
    return Message(**value)


def _tool_calls(values: Sequence[dict[str, Any]]) -> tuple[ToolCall, ...]:
    return tuple(ToolCall(**value) for value in values)


def _loads(data: bytes) -> Any:
    try:
        return orjson.loads(data)
    except orjson.JSONDecodeError:
        return json.loads(data)


def _as_plain(value: Any) -> Any:
    # Not dataclasses.asdict, which copies deeply and recurses through mappings of its own accord.
    return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
