"""The work units of ingest on disk: what one unit kept, its fingerprints and its counts, and their merger into the final files.

A unit's three files lie in INGEST/.parts; its .json is written last and marks it done, so a killed run redoes at most one unit. Called by
`ingest.py` only.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from pivotrl.rundir import read_json, write_json
from pivotrl.trajectories import store
from pivotrl.trajectories.audit import FormatCounts
from pivotrl.trajectories.dedupe import Fingerprint
from pivotrl.types import Candidate, Trajectory

PARTS = ".parts"
_RETIRED = ".parts.merged"
# Of encoded messages: what random access reads at once, and what a later stage holds while it streams.
_ROW_GROUP_BYTES = 8 << 20
_FINGERPRINT = "fingerprint"
_PART_SCHEMA = store.TRAJECTORY_SCHEMA.append(pa.field(_FINGERPRINT, pa.binary()))


class Part:
    """One work unit's files. Write: `add` any number of times, `finish` once. Read: `is_done`, `counts`, `kept`, `candidate_ids`."""

    def __init__(self, stage_dir: Path, number: int) -> None:
        base = stage_dir / PARTS / f"{number:06d}"
        self._trajectories_path = base.with_suffix(".trajectories.parquet")
        self._candidates_path = base.with_suffix(".candidates.parquet")
        self._counts_path = base.with_suffix(".json")
        self._trajectories: list[Trajectory] = []
        self._messages: list[bytes] = []
        self._marks: list[bytes | None] = []
        self._candidates: list[Candidate] = []
        self._num_bytes = 0
        self._writers: tuple[pq.ParquetWriter, pq.ParquetWriter] | None = None

    @property
    def is_done(self) -> bool:
        return self._counts_path.exists()

    def add(self, trajectory: Trajectory, messages: bytes, mark: Fingerprint | None, candidates: Sequence[Candidate]) -> None:
        """Adds a kept trajectory; `messages` is their encoded form."""
        self._trajectories.append(trajectory)
        self._messages.append(messages)
        self._marks.append(None if mark is None else mark.to_bytes())
        self._candidates += candidates
        self._num_bytes += len(messages)
        if self._num_bytes >= _ROW_GROUP_BYTES:
            self._flush()

    def finish(self, counts: Mapping[str, FormatCounts]) -> None:
        """Closes the data files and marks the unit done."""
        self._flush()
        if self._writers is not None:
            for writer in self._writers:
                writer.close()
        write_json(self._counts_path, {name: entry.as_json() for name, entry in counts.items()})

    def counts(self) -> dict[str, FormatCounts]:
        """The counts of a finished unit."""
        return {name: FormatCounts.from_json(value) for name, value in read_json(self._counts_path).items()}

    def kept(self) -> Iterator[tuple[str, str, Fingerprint | None]]:
        """Id, outcome and fingerprint of every trajectory of a finished unit."""
        for table in _row_groups(self._trajectories_path, ["id", "outcome", _FINGERPRINT]):
            for row in table.to_pylist():
                yield row["id"], row["outcome"], None if row[_FINGERPRINT] is None else Fingerprint.from_bytes(row[_FINGERPRINT])

    def candidate_ids(self) -> Iterator[list[str]]:
        """Ids of every candidate of a finished unit."""
        for table in _row_groups(self._candidates_path, ["id"]):
            yield table.column("id").to_pylist()

    def copy_into(self, trajectories: pq.ParquetWriter, candidates: pq.ParquetWriter) -> None:
        """Appends a finished unit's rows to the final files, row group by row group."""
        for table in _row_groups(self._trajectories_path, store.TRAJECTORY_SCHEMA.names):
            trajectories.write_table(table)
        for table in _row_groups(self._candidates_path, store.CANDIDATE_SCHEMA.names):
            candidates.write_table(table)

    def _flush(self) -> None:
        if not self._trajectories:
            return
        if self._writers is None:
            self._trajectories_path.parent.mkdir(exist_ok=True)
            self._writers = (
                store.parquet_writer(self._trajectories_path, _PART_SCHEMA, compression="lz4"),
                store.parquet_writer(self._candidates_path, store.CANDIDATE_SCHEMA, compression="lz4"),
            )
        trajectories = {**store.trajectory_columns(self._trajectories, self._messages), _FINGERPRINT: self._marks}
        self._writers[0].write_table(pa.Table.from_pydict(trajectories, _PART_SCHEMA))
        self._writers[1].write_table(pa.Table.from_pydict(store.candidate_columns(self._candidates), store.CANDIDATE_SCHEMA))
        self._trajectories, self._messages, self._marks, self._candidates, self._num_bytes = [], [], [], [], 0


def merge(stage_dir: Path, parts: Sequence[Part]) -> None:
    """Writes trajectories.parquet and candidates.parquet from finished units; each appears whole or not at all."""
    temporary = [stage_dir / f".{name}.tmp" for name in (store.TRAJECTORIES, store.CANDIDATES)]
    with (
        store.parquet_writer(temporary[0], store.TRAJECTORY_SCHEMA, compression="zstd") as trajectories,
        store.parquet_writer(temporary[1], store.CANDIDATE_SCHEMA, compression="zstd") as candidates,
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


def _row_groups(path: Path, columns: Sequence[str]) -> Iterator[pa.Table]:
    if not path.exists():
        return
    with pq.ParquetFile(path) as file:
        for group in range(file.num_row_groups):
            yield file.read_row_group(group, columns=list(columns))
