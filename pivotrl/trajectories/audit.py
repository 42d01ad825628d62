"""What happened to everything that was read: counts and reasons per format, summed over work units, and their table.

`FormatCounts` is filled by `ingest.py`, stored beside each work unit, and added up in order, so a resumed run ends with the same audit.json.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import RenderableType

UNKNOWN_FORMAT = "unknown"
"""Where files are counted that no adapter could be found for."""
LISTED_PER_FORMAT = 50
"""Quarantined rows named one by one for each format; the others are only counted."""


@dataclass(slots=True)
class FormatCounts:
    """The counts of one format. Trajectories present = kept + dropped + quarantined, always."""

    files: int = 0
    rows: int = 0
    """Rows, or whole files where they could not be read: the trajectories present."""
    kept: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    """By reason: nothing to learn from, duplicates, decontamination."""
    quarantined: Counter[str] = field(default_factory=Counter)
    """By reason: broken."""
    repairs: Counter[str] = field(default_factory=Counter)
    """Trajectories by what had to be repaired; one trajectory may count several times."""
    secrets: Counter[str] = field(default_factory=Counter)
    """Secrets redacted, by kind."""
    assistant_turns: int = 0
    """Assistant messages that a model wrote, in every trajectory that could be read, duplicates included."""
    harness_turns: int = 0
    """Assistant messages that the harness wrote, likewise."""
    kept_assistant_turns: int = 0
    """Assistant messages that a model wrote, in the kept trajectories."""
    outcomes: Counter[str] = field(default_factory=Counter)
    """Kept trajectories by outcome."""
    domains: Counter[str] = field(default_factory=Counter)
    """Kept trajectories by domain."""
    tool_origins: Counter[str] = field(default_factory=Counter)
    """Kept trajectories by where their tools came from."""
    candidates: Counter[str] = field(default_factory=Counter)
    """Candidates written, by split."""
    turns_excluded: Counter[str] = field(default_factory=Counter)
    """Model turns of kept trajectories that gave no candidate, by reason."""
    listed: list[dict[str, Any]] = field(default_factory=list)
    """The first quarantined rows: file, line, reason."""

    def quarantine(self, reason: str, *, file: str, line: int | None) -> None:
        """Counts and, while there is room, lists one quarantined row or file."""
        self.quarantined[reason_class(reason)] += 1
        if len(self.listed) < LISTED_PER_FORMAT:
            self.listed.append({"file": file, "line": line, "reason": reason})

    def add(self, other: FormatCounts) -> None:
        """Adds the counts of a later work unit."""
        for entry in dataclasses.fields(self):
            setattr(self, entry.name, getattr(self, entry.name) + getattr(other, entry.name))
        del self.listed[LISTED_PER_FORMAT:]

    def as_json(self) -> dict[str, Any]:
        return {entry.name: getattr(self, entry.name) for entry in dataclasses.fields(self)}

    @staticmethod
    def from_json(value: Mapping[str, Any]) -> FormatCounts:
        fields: dict[str, Any] = {key: Counter(entry) if isinstance(entry, dict) else entry for key, entry in value.items()}
        return FormatCounts(**fields)


def reason_class(reason: str) -> str:
    """The countable part of a reason: what stands before the first colon, where that is a class of reasons, not a detail.

    >>> reason_class("invalid JSON: unexpected end of data: line 1 column 5 (char 4)")
    'invalid JSON'
    >>> reason_class("wrong schema: no messages")
    'wrong schema: no messages'
    """
    for prefix in ("invalid JSON", "unknown format", "ambiguous format", "not UTF-8", "adapter failed"):
        if reason.startswith(prefix):
            return prefix
    return "NUL byte" if reason.startswith("NUL byte") else reason


def sum_counts(parts: Iterable[Mapping[str, FormatCounts]], order: Iterable[str]) -> dict[str, FormatCounts]:
    """Counts per format over all work units, formats in the given order."""
    total: dict[str, FormatCounts] = {}
    for part in parts:
        for name, counts in part.items():
            total.setdefault(name, FormatCounts()).add(counts)
    return {name: total[name] for name in order if name in total}


def audit_json(formats: Mapping[str, FormatCounts], *, skipped: Mapping[str, int], num_unread_files: int) -> dict[str, Any]:
    """The content of audit.json.

    Args:
        skipped: entries below the named paths that are no data files, by reason.
        num_unread_files: files left unread because `max_trajectories` were kept.
    """
    per_format: dict[str, Any] = {}
    quarantine: list[dict[str, Any]] = []
    for name, counts in formats.items():
        num_dropped, num_quarantined = counts.dropped.total(), counts.quarantined.total()
        assert counts.rows == counts.kept + num_dropped + num_quarantined, f"{name}: the audit does not add up"
        body = counts.as_json()
        quarantine += [{"format": name, **entry} for entry in body.pop("listed")]
        present = {"present": counts.rows, "kept": counts.kept, "dropped": num_dropped, "quarantined": num_quarantined}
        del body["rows"], body["kept"]
        per_format[name] = {**body, "trajectories": present}
    num_quarantined = sum(counts.quarantined.total() for counts in formats.values())
    return {
        "schema_version": 1,
        "skipped": dict(skipped),
        "num_unread_files": num_unread_files,
        "formats": per_format,
        "quarantine": quarantine,
        "num_quarantined_not_listed": num_quarantined - len(quarantine),
    }


def audit_table(audit: Mapping[str, Any]) -> RenderableType:
    """audit.json as tables for the terminal: one line per format, then every reason with its count."""
    from rich.console import Group
    from rich.table import Table

    counts = Table(title="Ingested", title_justify="left")
    for column in (
        "format",
        "files",
        "present",
        "kept",
        "dropped",
        "quarantined",
        "model turns",
        "harness turns",
        "candidates",
        "held out",
        "outcomes",
    ):
        counts.add_column(column, justify="left" if column in ("format", "outcomes") else "right")
    reasons = Table(title="Why", title_justify="left")
    for column in ("format", "what", "reason"):
        reasons.add_column(column)
    reasons.add_column("count", justify="right")
    for name, entry in audit["formats"].items():
        present, candidates = entry["trajectories"], entry["candidates"]
        numbers = [
            entry["files"],
            *(present[key] for key in ("present", "kept", "dropped", "quarantined")),
            entry["assistant_turns"],
            entry["harness_turns"],
            sum(candidates.values()),
            candidates.get("held_out", 0),
        ]
        counts.add_row(
            name, *(f"{number:,}" for number in numbers), ", ".join(f"{key} {count:,}" for key, count in sorted(entry["outcomes"].items()))
        )
        for what, key in (
            ("dropped", "dropped"),
            ("quarantined", "quarantined"),
            ("repaired", "repairs"),
            ("redacted", "secrets"),
            ("no candidate", "turns_excluded"),
        ):
            for reason, count in sorted(entry[key].items()):
                reasons.add_row(name, what, reason, f"{count:,}")
    for reason, count in audit["skipped"].items():
        reasons.add_row("", "skipped", reason, f"{count:,}")
    return Group(counts, reasons) if reasons.row_count else counts
