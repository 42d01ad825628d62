"""What a check found: the record, and the list that checks add to.

A refusal of an existing check (`UserError`) becomes a finding through `refused_by`, so that no rule is written twice.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any

from pivotrl.errors import UserError


class Severity(StrEnum):
    """Whether a job may be submitted in spite of a finding."""

    ERROR = "error"
    """It would fail, or its numbers would mean nothing."""
    WARNING = "warning"
    """It would run; look at it first."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that is wrong.

    >>> Finding("disk", Severity.ERROR, "2 GB are free", "runs/a", "40 GB are written", "choose another --run").check
    'disk'
    """

    check: str
    """Name of the check; docs/doctor.md lists them."""
    severity: Severity
    what: str
    where: str
    """A recipe key and its file, a file and line, a turn, or a place of the machine."""
    rule: str
    fix: str


@dataclass(slots=True)
class Findings:
    """What all checks found, what could not be checked and why, and the figures that a reader needs beside them."""

    found: list[Finding] = field(default_factory=list[Finding])
    not_checked: dict[str, str] = field(default_factory=dict[str, str])
    """What, and why not."""
    figures: dict[str, Any] = field(default_factory=dict[str, Any])
    """By name, JSON-ready."""

    @property
    def may_submit(self) -> bool:
        """Whether nothing found is an error."""
        return all(one.severity is Severity.WARNING for one in self.found)

    def error(self, check: str, what: str, *, where: str, rule: str, fix: str) -> None:
        """Adds an error."""
        self.found.append(Finding(check, Severity.ERROR, what, where, rule, fix))

    def warn(self, check: str, what: str, *, where: str, rule: str, fix: str) -> None:
        """Adds a warning."""
        self.found.append(Finding(check, Severity.WARNING, what, where, rule, fix))

    @contextmanager
    def refused_by(self, check: str, where: str) -> Iterator[None]:
        """Within the block, a refusal of the product's own checks, or a path that cannot be read, becomes an error of `check` and ends the block."""
        try:
            yield
        except UserError as error:
            self.error(check, error.problem, where=where, rule=error.rule, fix=error.fix)
        except OSError as error:
            if error.filename is None:
                raise
            self.error(
                check, f"{error.filename}: {error.strerror}", where=where, rule="it must be readable", fix="correct the path or its permissions"
            )

    def as_json(self) -> dict[str, Any]:
        """JSON-ready: findings, what was not checked, figures, and whether to submit."""
        return {
            "submit": self.may_submit,
            "findings": [asdict(one) for one in self.found],
            "not_checked": self.not_checked,
            "figures": self.figures,
        }
