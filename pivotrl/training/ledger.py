"""Append-only JSONL files whose length a checkpoint can name: what a lost step wrote is cut off before it is written again.

One writer per file. Used for the ledger (which pivots each step learned from), the rollouts, the validations and the curve of a run.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import orjson

LEDGER = "ledger.jsonl"
ROLLOUTS = "rollouts.jsonl"
VALIDATIONS = "validation.jsonl"
CURVE = "curve.jsonl"


class Ledger:
    """One append-only file, created where it is missing.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     ledger = Ledger(Path(folder) / "ledger.jsonl")
    ...     ledger.append([{"step": 0}])
    ...     position = ledger.position()
    ...     ledger.append([{"step": 1}])
    ...     ledger.truncate(position)
    ...     ledger.path.read_text()
    '{"step":0}\\n'
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        path.touch()

    def append(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Adds one line per row; a kill leaves at most one partial line, which `truncate` cuts."""
        block = b"".join(orjson.dumps(row, option=orjson.OPT_APPEND_NEWLINE) for row in rows)
        with self.path.open("ab", buffering=0) as stream:
            stream.write(block)

    def position(self) -> int:
        """Size in bytes, after making the content durable: a checkpoint that names it can rely on it."""
        with self.path.open("rb") as stream:
            os.fsync(stream.fileno())
        return self.path.stat().st_size

    def truncate(self, position: int) -> None:
        """Cuts the file back to a position of a checkpoint.

        Raises:
            ValueError: where the file is shorter, so that rows the checkpoint counts are lost.
        """
        size = self.path.stat().st_size
        if size < position:
            raise ValueError(f"{self.path} has {size} bytes but the checkpoint was taken at {position}; the file was cut or replaced")
        os.truncate(self.path, position)
