"""The rows behind ingested trajectories, kept whole, so that export can give back every field, known or not.

`import-gym` writes DIR/gym/rows.parquet beside DIR/ingest: one row per kept trajectory, as JSON. A row in which a secret is found is not kept
(ingest stores its trajectory redacted); export then builds it anew, from what is left.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from pivotrl.gym.rows import GymRow, read_rows
from pivotrl.pivots.parquet import read_rows as read_parquet
from pivotrl.pivots.parquet import write_rows
from pivotrl.rundir import Stage
from pivotrl.trajectories.files import printable_name
from pivotrl.trajectories.secrets import redact_text
from pivotrl.trajectories.store import TRAJECTORIES, encode

STAGE = "gym"
ROWS = "rows.parquet"

_COLUMNS = {"trajectory_id": "string", "place": "string", "row": "string"}


@dataclass(frozen=True, slots=True)
class KeptRow:
    """One imported row."""

    trajectory_id: str
    place: str
    """File and line it was read from."""
    value: dict[str, Any]


def keep_rows(stage: Stage, paths: Sequence[Path], ingest_dir: Path) -> dict[str, int]:
    """Writes and finishes the stage; returns how many rows were kept, and left out by reason."""
    ids = {
        (row["source_file"], row["source_index"]): row["id"] for row in read_parquet(ingest_dir / TRAJECTORIES, ("id", "source_file", "source_index"))
    }
    left_out: Counter[str] = Counter()
    num_kept = write_rows(stage.path / ROWS, _COLUMNS, _rows(paths, ids, left_out))
    summary = {"kept": num_kept, **dict(sorted(left_out.items()))}
    stage.finish(outputs=[ROWS], summary=summary)
    return summary


def kept_rows(run: Path, trajectory_ids: Collection[str] | None = None) -> Iterator[KeptRow]:
    """The kept rows in the order they were read; those of the named trajectories where given. None where nothing was imported."""
    if not Stage.is_done(run, STAGE):
        return
    keep = None if trajectory_ids is None else ("trajectory_id", trajectory_ids)
    for row in read_parquet(run / STAGE / ROWS, keep=keep):
        yield KeptRow(row["trajectory_id"], row["place"], orjson.loads(row["row"]))


def _rows(paths: Sequence[Path], ids: Mapping[tuple[str, int], str], left_out: Counter[str]) -> Iterator[dict[str, str]]:
    for row in read_rows(paths):
        trajectory_id = ids.get((printable_name(row.file), row.index)) if isinstance(row, GymRow) else None
        if trajectory_id is None or not isinstance(row, GymRow):
            left_out["not kept by ingest"] += 1
            continue
        text = encode(row.value).decode()
        if _holds_secret(text):
            left_out["holds a secret"] += 1
            continue
        yield {"trajectory_id": trajectory_id, "place": row.place, "row": text}


def _holds_secret(text: str) -> bool:
    found: Counter[str] = Counter()
    redact_text(text, found)
    return bool(found)
