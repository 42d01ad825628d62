"""Rows to Parquet and back, streaming: bounded memory both ways, the same rows always give the same bytes.

The one place of this package that touches pyarrow, which ships no types: everything past this file is typed records.
Called by `pivots/dataset.py` and the profile stage.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from importlib import import_module
from itertools import batched
from pathlib import Path
from typing import Any

from pivotrl.errors import UserError
from pivotrl.rundir import open_parquet

# Rows of a row group: what a reader holds in memory at once.
_ROWS_PER_GROUP = 1024


def write_rows(path: Path, columns: Mapping[str, str], rows: Iterable[Mapping[str, Any]]) -> int:
    """Writes a Parquet file (zstd) atomically and returns the number of rows.

    Args:
        columns: name to type; a type is an Arrow alias (``string``, ``int32``, ``float64``, ``bool``), or ``list:`` before one.
        rows: one value per column, read once.

    Raises:
        KeyError: for a row that lacks a column.
    """
    pa, pq = _pyarrow()
    schema = pa.schema([(name, _arrow_type(pa, kind)) for name, kind in columns.items()])
    temporary = path.with_name(f".{path.name}.tmp")
    num_rows = 0
    with temporary.open("wb") as stream:
        with pq.ParquetWriter(stream, schema, compression="zstd") as writer:
            for group in batched(rows, _ROWS_PER_GROUP):
                writer.write_table(pa.table({name: [row[name] for row in group] for name in columns}, schema=schema))
                num_rows += len(group)
        stream.flush()
        os.fsync(stream.fileno())
    temporary.replace(path)
    return num_rows


def read_rows(path: Path, columns: Sequence[str] | None = None, *, keep: tuple[str, Collection[str]] | None = None) -> Iterator[dict[str, Any]]:
    """Rows in file order, one row group in memory at a time; raises a UserError where a column is missing.

    Args:
        columns: read these alone; None reads all.
        keep: (column, values): only rows whose column holds one of the values, chosen before anything becomes a Python object.
    """
    pa, _ = _pyarrow()
    values = None if keep is None else pa.array(list(keep[1]), type=pa.string())
    with open_parquet(path) as file:
        needed = {*(columns or ()), *([keep[0]] if keep else ())}
        if absent := sorted(needed - set(file.schema_arrow.names)):
            raise UserError(
                f"{path} has no column {absent[0]!r}",
                rule=f"it has the columns {', '.join(sorted(needed))}",
                fix="restore the file, or remove its stage's directory to redo it",
            )
        for group in range(file.num_row_groups):
            table = file.read_row_group(group, columns=None if columns is None else list(columns))
            if keep is not None:
                table = table.filter(import_module("pyarrow.compute").is_in(table[keep[0]], value_set=values))
            yield from table.to_pylist()


def count_rows(path: Path) -> int:
    """Number of rows, from the footer alone."""
    with open_parquet(path) as file:
        return int(file.metadata.num_rows)


def _arrow_type(pa: Any, kind: str) -> Any:
    inner = kind.removeprefix("list:")
    return pa.list_(pa.type_for_alias(inner)) if inner != kind else pa.type_for_alias(kind)


def _pyarrow() -> tuple[Any, Any]:
    return import_module("pyarrow"), import_module("pyarrow.parquet")
