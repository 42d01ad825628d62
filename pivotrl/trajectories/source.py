"""What an adapter is: one agent's file format turned into trajectories, row by row, with a reason for everything left out.

An adapter neither opens the network nor knows about deduplication, splits or storage; `ingest.py` calls it and keeps the audit.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from pivotrl.trajectories.encoded import Encoded
from pivotrl.types import Tool, Trajectory


class _RowLeftOut(ValueError):
    """Base of the two ways a row is left out: a countable reason, and where it lies."""

    def __init__(self, reason: str, *, file: str | None = None, line: int | None = None) -> None:
        place = "" if file is None else f"{file}: " if line is None else f"{file}:{line}: "
        super().__init__(place + reason)
        self.reason, self.file, self.line = reason, file, line


class RowQuarantined(_RowLeftOut):
    """A row that is broken (wrong schema, unreadable): kept out, recorded with file, line and this reason.

    `file` and `line` may be left out where a `RawRow` already carries them (raised from `convert`).
    """


class RowDropped(_RowLeftOut):
    """A row that is well-formed but holds no trajectory to learn from (no assistant turn, empty simulation): counted with this reason."""


@dataclass(frozen=True, slots=True)
class SourceUnit:
    """The files that make up one unit of reading: one file, or for formats that write a file per call, all files of one session."""

    paths: tuple[Path, ...]
    name: str
    """Path of the unit (its last file) relative to the ingested root, for audit and ids; never absolute."""


@dataclass(frozen=True, slots=True)
class Probe:
    """What format detection may look at: never more than the head of a file."""

    name: str
    suffix: str
    head: bytes
    """First 64 KiB (after decompression)."""
    first_row: Any
    """First JSON value where the head holds a whole one (a JSONL line, or a small document), else None."""


@dataclass(frozen=True, slots=True)
class RawRow:
    """One trajectory's raw data."""

    name: str
    index: int
    """Position in the unit, from 0."""
    line: int | None
    """Line number in a line-based file, from 1."""
    value: Any
    """Parsed JSON of the row."""
    shared: Any = None
    """Parsed JSON that the rows of a unit share (tau2's `info` and `tasks`), by reference."""
    repairs: tuple[str, ...] = ()
    """Names of the repairs that reading needed (see `files.parse_json`); `ingest.py` adds them to those of `convert`."""


@dataclass(frozen=True, slots=True)
class Converted:
    """One trajectory with the names of the repairs that were needed, for the audit."""

    trajectory: Trajectory
    repairs: tuple[str, ...]
    encoded: Encoded
    """Of the trajectory's messages and tools."""


class Adapter(Protocol):
    """One format. Stateless; registered by name in `trajectories/registry.py`."""

    name: str

    def sniff(self, probe: Probe) -> bool:
        """True where the file is surely of this format; at most one adapter says so for any file."""
        ...

    def group(self, paths: Sequence[Path], root: Path) -> Iterator[SourceUnit]:
        """Units of reading among files of this format, in a stable order."""
        ...

    def rows(self, unit: SourceUnit) -> Iterator[RawRow | RowQuarantined | RowDropped]:
        """Raw rows one at a time; a broken line is yielded as an exception value (with file and line in its text) and reading goes on."""
        ...

    def convert(self, row: RawRow, tools: Sequence[Tool] | None) -> Converted:
        """The trajectory of a row. `tools` come from `--tools FILE` and are used where the row carries none; where neither does, they are inferred.

        Raises:
            RowQuarantined: for a row of the wrong shape.
            RowDropped: for a row with nothing to learn from.
        """
        ...
