"""The parity gate in the report: what its checks measured, against the recipe's limit, and what failed ones found.

Pure: `Readings` in, rows and charts out. Checks are the rows of train/metrics.jsonl with parity metrics; a failed check stops the run before
such a row is written and leaves its finding in train/parity_findings.jsonl. Called by report.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pivotrl.observability.charts import Series, line_chart
from pivotrl.observability.fields import Fields
from pivotrl.observability.panels import Panel
from pivotrl.observability.readings import Readings

_NOUNS = (("parity_difference", "|log-prob difference|", "nats per token"), ("parity_ratio", "pi_trainer / pi_engine", "ratio"))
_REDUCTIONS = (("mean", "mean"), ("99th percentile", "p99/max"), ("largest", "max"))
# A limit far above everything measured would press the lines onto the axis; it stands in the caption alone then.
_DRAWN_LIMIT_FACTOR = 10.0


@dataclass(frozen=True, slots=True)
class ParityRow:
    """One quantity over all checks of a run that passed."""

    label: str
    mean: float
    """Mean of the checks' means."""
    p99: float
    """Largest of the checks' 99th percentiles."""
    largest: float


@dataclass(frozen=True, slots=True)
class ParityFinding:
    """Why one check failed."""

    step: int | None
    place: str
    what: str
    fix: str
    largest: float | None
    """Largest |log-prob difference|; None where nothing was scored."""


@dataclass(frozen=True, slots=True)
class ParityTable:
    """All that the gate left in a run directory."""

    num_checks: int
    """Checks that passed and were due; those of a resume leave no row."""
    limit: float | None
    """train.parity.max_logprob_difference, from the manifest or, of a run that ended early, from its last finding."""
    rows: tuple[ParityRow, ...]
    panels: tuple[Panel, ...]
    findings: tuple[ParityFinding, ...]


def parity_table(readings: Readings) -> ParityTable | None:
    """None where the run has no gate, or has not come to its first check.

    Raises:
        UserError: for a value of the wrong type, naming file and key.
    """
    checks = [row for row in readings.steps if row.number("sync/parity_difference/max") is not None]
    findings = readings.parity_findings
    if not checks and not findings:
        return None
    stated = readings.stages["train"].manifest.child("config").child("train").child("parity").number("max_logprob_difference")
    limit = findings[-1].number("limit") if stated is None and findings else stated
    return ParityTable(
        len(checks),
        limit,
        tuple(_row(noun, label, checks) for noun, label, _ in _NOUNS if checks),
        tuple(panel for noun, label, unit in _NOUNS if (panel := _panel(noun, label, unit, checks, limit)).svg),
        tuple(_finding(row) for row in findings),
    )


def _row(noun: str, label: str, checks: Sequence[Fields]) -> ParityRow:
    means, p99s, largest = (tuple(value for _, value in _points(noun, name, checks)) or (0.0,) for _, name in _REDUCTIONS)
    return ParityRow(label, sum(means) / len(means), max(p99s), max(largest))


def _panel(noun: str, label: str, unit: str, checks: Sequence[Fields], limit: float | None) -> Panel:
    series = [Series(words, _points(noun, name, checks)) for words, name in _REDUCTIONS]
    caption = f"{label} over a check's sampled tokens, at every step where one was due. n = {len(checks):,} checks"
    if noun == "parity_difference" and limit is not None and series[-1].points:
        steps, highest = [step for step, _ in series[-1].points], max(value for _, value in series[-1].points)
        caption += f"; limit {limit:g}, the largest difference is {100 * highest / limit:.2g} % of it" if limit > 0 else ""
        if 0 < limit <= _DRAWN_LIMIT_FACTOR * highest:
            series.append(Series("limit", ((min(steps), limit), (max(steps), limit))))
    title = f"Parity: {label}"
    floor = 0.0 if noun == "parity_difference" else None
    return Panel(title, line_chart(title, x_label="optimizer step", y_label=unit, series=series, y_floor=floor, y_ceiling=None), caption)


def _points(noun: str, name: str, checks: Sequence[Fields]) -> tuple[tuple[float, float], ...]:
    found = ((row.number("step"), row.number(f"sync/{noun}/{name}")) for row in checks)
    return tuple((step, value) for step, value in found if step is not None and value is not None)


def _finding(row: Fields) -> ParityFinding:
    return ParityFinding(row.count("step"), row.text("place") or "unnamed", row.text("what") or "", row.text("fix") or "", row.number("largest"))
