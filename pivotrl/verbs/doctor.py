"""The verb `doctor`: every check of a recipe, then one table and, where asked for, JSON. The checks are in pivotrl/doctor/. Called by cli.py."""

from __future__ import annotations

import sys
from pathlib import Path

from rich.console import Console
from rich.table import Table

from pivotrl.console import results_console
from pivotrl.doctor.examine import Request, examine
from pivotrl.doctor.findings import Findings
from pivotrl.rundir import write_json


def run_doctor(request: Request, out: Path | None) -> bool:
    """Examines a recipe and prints what was found; returns whether it may be submitted.

    Args:
        out: file for the result as JSON, or None.

    Raises:
        UserError: for a cluster or model file that cannot be read.
    """
    findings = examine(request)
    if out is not None:
        write_json(out, findings.as_json())
    _print(results_console(), findings)
    return findings.may_submit


def _print(console: Console, findings: Findings) -> None:
    if findings.found:
        table = Table("", "check", "what", "where", "rule", "fix", title="findings", title_justify="left", show_lines=True)
        for one in sorted(findings.found, key=lambda one: one.severity):
            table.add_row(one.severity.value, one.check, one.what, one.where, one.rule, one.fix)
        console.print(table)
    for name, figure in findings.figures.items():
        values = figure if isinstance(figure, dict) else {"": figure}
        shown = ", ".join(f"{key} {value:,}".strip() if not isinstance(value, str) else f"{key} {value}".strip() for key, value in values.items())
        console.print(f"{name.replace('_', ' ')}: {shown}", highlight=False)
    for what, reason in findings.not_checked.items():
        console.print(f"not checked: {what}: {reason}", highlight=False)
    num_errors = sum(one.severity == "error" for one in findings.found)
    verdict = "submit" if findings.may_submit else "do not submit"
    sys.stdout.write(f"{verdict}: {num_errors} errors, {len(findings.found) - num_errors} warnings\n")
