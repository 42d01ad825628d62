"""The paper's published numbers, for a column beside ours: paper.json, each value named by table, row and column.

They are another model's on other benchmarks and say what was reported, not what ours should be.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from pivotrl.errors import UserError
from pivotrl.rundir import read_json

_FILE = Path(__file__).with_name("paper.json")


@dataclass(frozen=True, slots=True)
class PaperValue:
    """One published number."""

    value: float
    unit: str
    place: str
    """Table, row and column, for example ``Table 1, in domain; tau2-bench; sft``."""


def paper_value(table: str, row: str | None, column: str) -> PaperValue | None:
    """The number at a place; None where the specification names no row, or the paper printed none in that column.

    >>> paper_value("table1", "tau2-bench", "sft").value
    58.44

    Raises:
        UserError: for a row that the table does not have.
    """
    if row is None:
        return None
    found = _document()["tables"][table]
    if row not in found["rows"]:
        raise UserError(
            f"the specification names the paper's row {row!r}",
            rule=f"{found['title']} has the rows {', '.join(found['rows'])}",
            fix="use one of these names, or leave `paper` out",
        )
    if column not in found["columns"]:
        return None
    value = found["rows"][row][found["columns"].index(column)]
    return None if value is None else PaperValue(value, found["unit"], f"{found['title']}; {row}; {column}")


def paper_note(table: str) -> str:
    """What must be known about a table's published numbers, or ""."""
    return _document()["notes"].get(table, "")


def paper_label() -> str:
    """One sentence that says what the published numbers are."""
    document = _document()
    return f"{document['label']}: {document['source']}; {document['model']}"


@cache
def _document() -> dict[str, Any]:
    return read_json(_FILE)
