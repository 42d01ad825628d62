"""The work units of ingest on disk: what one unit kept, its fingerprints and its counts, and their merger into the final files.

A unit's files lie in INGEST/.parts; its .json is written last and marks it done, so a killed run redoes at most one unit. Data files are
uncompressed Arrow streams. Called by `ingest.py` only.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa

from pivotrl.rundir import read_json, write_json
from pivotrl.trajectories import store
from pivotrl.trajectories.audit import FormatCounts
from pivotrl.trajectories.dedupe import Fingerprint
from pivotrl.types import Candidate, Trajectory

PARTS = ".parts"
_RETIRED = ".parts.merged"
# Of encoded messages: what random access reads at once, and what a later stage holds while it streams.
_ROW_GROUP_BYTES = 2 << 20
_FINGERPRINT = "fingerprint"
_PART_SCHEMA = store.TRAJECTORY_SCHEMA.append(pa.field(_FINGERPRINT, pa.binary()))


class Part:
    """One work unit's files. Write: `add` any number of times, `finish` once. Read: `is_done`, `counts`, `kept`, `candidate_ids`."""

    def __init__(self, stage_dir: Path, number: int) -> None:
        base = stage_dir / PARTS / f"{number:06d}"
        self._paths = base.with_suffix(".trajectories.arrow"), base.with_suffix(".candidates.arrow")
        self._counts_path = base.with_suffix(".json")
        self._rows = _Rows()
        self._streams: tuple[_Stream, _Stream] | None = None

    @property
    def is_done(self) -> bool:
        return self._counts_path.exists()

    def add(self, trajectory: Trajectory, messages: bytes, mark: Fingerprint | None) -> None:
        """Adds a kept trajectory; `messages` is their encoded form."""
        if self._rows.num_bytes >= _ROW_GROUP_BYTES:
            self._flush()
        self._rows.trajectories.append(trajectory)
        self._rows.messages.append(messages)
        self._rows.marks.append(None if mark is None else mark.to_bytes())
        self._rows.num_bytes += len(messages)

    def add_candidate(self, candidate: Candidate, action: bytes) -> None:
        """Adds a candidate of the trajectory that was added last; `action` is the expert action's encoded form."""
        self._rows.candidates.append(candidate)
        self._rows.actions.append(action)

    def finish(self, counts: Mapping[str, FormatCounts]) -> None:
        """Closes the data files and marks the unit done."""
        self._flush()
        for stream in self._streams or ():
            stream.close()
        write_json(self._counts_path, {name: entry.as_json() for name, entry in counts.items()})

    def counts(self) -> dict[str, FormatCounts]:
        """The counts of a finished unit."""
        return {name: FormatCounts.from_json(value) for name, value in read_json(self._counts_path).items()}

    def kept(self) -> Iterator[tuple[str, str, Fingerprint | None]]:
        """Id, outcome and fingerprint of every trajectory of a finished unit."""
        for batch in _batches(self._paths[0]):
            for row in batch.select(["id", "outcome", _FINGERPRINT]).to_pylist():
                yield row["id"], row["outcome"], None if row[_FINGERPRINT] is None else Fingerprint.from_bytes(row[_FINGERPRINT])

    def candidate_ids(self) -> Iterator[list[str]]:
        """Ids of every candidate of a finished unit."""
        for batch in _batches(self._paths[1]):
            yield batch.column("id").to_pylist()

    def copy_into(self, trajectories: Any, candidates: Any) -> None:
        """Appends a finished unit's rows to the two parquet writers, row group by row group."""
        for batch in _batches(self._paths[0]):
            trajectories.write_batch(batch.select(store.TRAJECTORY_SCHEMA.names))
        for batch in _batches(self._paths[1]):
            candidates.write_batch(batch)

    def _flush(self) -> None:
        rows = self._rows
        if not rows.trajectories:
            return
        if self._streams is None:
            self._streams = _Stream(self._paths[0], _PART_SCHEMA), _Stream(self._paths[1], store.CANDIDATE_SCHEMA)
        self._streams[0].write({**store.trajectory_columns(rows.trajectories, rows.messages), _FINGERPRINT: rows.marks})
        self._streams[1].write(store.candidate_columns(rows.candidates, rows.actions))
        self._rows = _Rows()


class _Rows:
    """The rows of the row group being filled."""

    def __init__(self) -> None:
        self.trajectories: list[Trajectory] = []
        self.messages: list[bytes] = []
        self.marks: list[bytes | None] = []
        self.candidates: list[Candidate] = []
        self.actions: list[bytes] = []
        self.num_bytes = 0


class _Stream:
    """One Arrow stream file being written."""

    def __init__(self, path: Path, schema: pa.Schema) -> None:
        self._sink = pa.OSFile(str(path), "wb")
        self._writer = pa.ipc.new_stream(self._sink, schema)
        self._schema = schema

    def write(self, columns: Mapping[str, Sequence[Any]]) -> None:
        arrays = [pa.array(columns[field.name], field.type) for field in self._schema]
        self._writer.write_batch(pa.RecordBatch.from_arrays(arrays, schema=self._schema))

    def close(self) -> None:
        self._writer.close()
        self._sink.close()


def merge(stage_dir: Path, parts: Sequence[Part]) -> None:
    """Writes trajectories.parquet and candidates.parquet from finished units; each appears whole or not at all."""
    temporary = [stage_dir / f".{name}.tmp" for name in (store.TRAJECTORIES, store.CANDIDATES)]
    with (
        store.parquet_writer(temporary[0], store.TRAJECTORY_SCHEMA) as trajectories,
        store.parquet_writer(temporary[1], store.CANDIDATE_SCHEMA) as candidates,
    ):
        for part in parts:
            part.copy_into(trajectories, candidates)
    for path, name in zip(temporary, (store.TRAJECTORIES, store.CANDIDATES), strict=True):
        with path.open("rb") as stream:
            os.fsync(stream.fileno())
        path.replace(stage_dir / name)


def retire_parts(stage_dir: Path) -> None:
    """Declares the units merged, in one step: a half-removed unit would look done and empty."""
    (stage_dir / PARTS).replace(stage_dir / _RETIRED)


def clean_up(stage_dir: Path) -> None:
    """Removes what `retire_parts` left."""
    shutil.rmtree(stage_dir / _RETIRED, ignore_errors=True)


def _batches(path: Path) -> Iterator[pa.RecordBatch]:
    if not path.exists():
        return
    # Not mapped: pages of a file of any size would count as memory of the process.
    with pa.OSFile(str(path)) as source, pa.ipc.open_stream(source) as reader:
        yield from reader
