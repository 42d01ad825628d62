"""The verb `tables`: a specification to the paper's tables and figures. The work is in pivotrl/evaluation/tables/. Called by cli.py."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from rich.table import Table as RichTable

from pivotrl.config.load import load_section
from pivotrl.config.tables import TablesConfig
from pivotrl.console import results_console
from pivotrl.evaluation.tables.build import build_tables
from pivotrl.evaluation.tables.write import PAGE


def run_tables(spec: Path, out: Path, overrides: Sequence[str]) -> None:
    """Writes the tables and prints their scores.

    Raises:
        UserError: for a specification or a result that cannot be read, before anything is written.
    """
    config = load_section(TablesConfig, file=spec, overrides=overrides)
    for table in build_tables(config, spec=spec, out=out):
        shown = [index for index, (key, _) in enumerate(table.columns) if not key.startswith("paper")]
        printed = RichTable(table.first_column, *(table.columns[index][1] for index in shown), title=table.title, title_justify="left", box=None)
        for row in table.rows:
            printed.add_row(row.label, *(row.cells[index].text for index in shown))
        results_console().print(printed)
    sys.stderr.write(f"tables: {out / PAGE}\n")
