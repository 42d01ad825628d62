"""Cells, rows and tables before they are written: every number with its n, interval, tests and the files that it was computed from.

Scores are shown in percent and changes in points, as in the paper. A cell's id is TABLE/ROW/COLUMN and names it in tables.json.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from pivotrl.evaluation.tables.estimates import Estimate
from pivotrl.evaluation.tables.paper import PaperValue

NOT_RUN = "not run"
_PERCENT = 100.0


@dataclass(frozen=True, slots=True)
class Cell:
    """One number, or the statement that there is none."""

    text: str
    """As all formats show it."""
    kind: str
    """``score``, ``change``, ``ratio``, ``count``, ``paper`` or ``missing``."""
    value: float | None = None
    """In `unit`."""
    low: float | None = None
    high: float | None = None
    unit: str = ""
    n: int = 0
    """Attempts behind the number."""
    details: dict[str, Any] = field(default_factory=dict[str, Any])
    """JSON-ready: tasks, seeds, tests, whether paired, the paper's place."""
    sources: tuple[str, ...] = ()
    """Files that the number was computed from, as tables.json names them."""


@dataclass(frozen=True, slots=True)
class TableRow:
    """One row; `key` is unique in its table."""

    key: str
    label: str
    cells: tuple[Cell, ...]
    is_total: bool = False


@dataclass(frozen=True, slots=True)
class Table:
    """One table; every row has a cell per column."""

    key: str
    title: str
    caption: str
    first_column: str
    columns: tuple[tuple[str, str], ...]
    """(key, heading)."""
    rows: tuple[TableRow, ...]
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        assert all(len(row.cells) == len(self.columns) for row in self.rows), f"{self.key}: a row has another number of cells than columns"
        assert len({row.key for row in self.rows}) == len(self.rows), f"{self.key}: two rows share a key"

    def as_dict(self) -> dict[str, Any]:
        """JSON-ready: cells by id."""
        cells = {f"{self.key}/{row.key}/{name}": cell for row in self.rows for (name, _), cell in zip(self.columns, row.cells, strict=True)}
        return {name: _cell_dict(cell) for name, cell in cells.items()}


def score_cell(estimate: Estimate | None, sources: Sequence[str]) -> Cell:
    """A share as percent: ``63.8 [61.0, 66.5] n=360``."""
    return _estimate_cell("score", "percent", "", estimate, sources)


def change_cell(estimate: Estimate | None, sources: Sequence[str]) -> Cell:
    """A difference of shares in points, signed, with the first test's p where there is one."""
    return _estimate_cell("change", "points", "+", estimate, sources)


def paper_cell(value: PaperValue | None) -> Cell:
    """A published number, which has neither n nor interval; a dash where there is none."""
    if value is None:
        return Cell("-", "missing")
    sign = "+" if value.unit == "points" and not value.place.endswith("base") else ""
    text = f"{value.value:,.0f}" if value.unit == "turns" and value.value > 1 else f"{value.value:{sign}.2f}"
    return Cell(text, "paper", value.value, unit=value.unit, details={"paper": value.place})


def number_cell(text: str, value: float, *, unit: str, n: int, sources: Sequence[str], bounds: tuple[float, float] | None = None) -> Cell:
    """A number that is no mean of scores: turns, seconds, ratios."""
    finite = bounds if bounds is not None and all(map(math.isfinite, bounds)) else (None, None)
    return Cell(text, "ratio" if unit == "ratio" else "count", value, *finite, unit=unit, n=n, sources=tuple(sources))


def missing_cell(text: str = NOT_RUN) -> Cell:
    """No number, and why."""
    return Cell(text, "missing")


def _estimate_cell(kind: str, unit: str, sign: str, estimate: Estimate | None, sources: Sequence[str]) -> Cell:
    if estimate is None:
        return missing_cell()
    interval = estimate.interval()
    value, low, high = (_PERCENT * number for number in (interval.value, interval.low, interval.high))
    span = "[no interval]" if math.isnan(low) else f"[{_fixed(low, sign)}, {_fixed(high, sign)}]"
    test = f" p={_p_text(estimate.tests[0].p)}" if estimate.tests else ""
    n = f"n={estimate.num_attempts:,}" if estimate.num_attempts else "n not stated"
    details: dict[str, Any] = {"num_tasks": estimate.num_tasks, "num_seeds": estimate.num_seeds}
    if kind == "change":
        details["is_paired"] = estimate.is_paired
        details["tests"] = [{"name": one.name, "p": one.p, "n": one.n} for one in estimate.tests]
    bounds = (None, None) if math.isnan(low) else (low, high)
    text = f"{_fixed(value, sign)} {span} {n}{test}"
    return Cell(text, kind, value, *bounds, unit=unit, n=estimate.num_attempts, details=details, sources=tuple(sources))


def _fixed(value: float, sign: str) -> str:
    """One decimal; a zero has no minus."""
    return f"{round(value, 1) + 0.0:{sign}.1f}"


def _p_text(p: float) -> str:
    return "<0.001" if p < 0.001 else f"{p:.3f}" if p < 0.1 else f"{p:.2f}"


def _cell_dict(cell: Cell) -> dict[str, Any]:
    numbers = {"value": cell.value, "low": cell.low, "high": cell.high, "unit": cell.unit, "n": cell.n}
    return {"text": cell.text, "kind": cell.kind, **numbers, **cell.details, "sources": list(cell.sources)}
