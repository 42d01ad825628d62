"""From a specification to all its tables and figures, in the paper's order."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pivotrl.config.tables import TablesConfig
from pivotrl.evaluation.tables import scores
from pivotrl.evaluation.tables.cells import Table
from pivotrl.evaluation.tables.curves import Figure, efficiency_parts, spread_parts
from pivotrl.evaluation.tables.paper import paper_label
from pivotrl.evaluation.tables.sources import Results, read_results
from pivotrl.evaluation.tables.write import write_tables
from pivotrl.progress import progress_bar
from pivotrl.rundir import source_commit


def build_tables(config: TablesConfig, *, spec: Path, out: Path) -> list[Table]:
    """Reads the results, writes every file into `out` and returns the tables.

    Raises:
        UserError: for a result that is missing, unfinished or not of its format, before anything is written.
    """
    results = read_results(config, spec=spec)
    tables, figures = tables_and_figures(results)
    record: dict[str, Any] = {"spec": config.model_dump(mode="json"), "files": dict(sorted(results.hashes.items())), "commit": source_commit()}
    with progress_bar("tables", len(figures), "figures") as bar:
        write_tables(out, name=config.name, label=paper_label(), tables=tables, figures=figures, record=record, advance=bar.advance)
    return tables


def tables_and_figures(results: Results) -> tuple[list[Table], list[Figure]]:
    """Every table and figure that the specification asks for."""
    config = results.config
    tables: list[Table] = []
    figures: list[Figure] = []
    if config.main is not None:
        tables += scores.main_tables(results, config.main)
        if config.out_of_domain is not None:
            tables += scores.out_of_domain_tables(results, config.main, config.out_of_domain)
    if config.ablation is not None:
        tables.append(scores.ablation_table(results, config.ablation))
    if config.families is not None:
        tables.append(scores.family_table(results, config.families))
    drawn = [efficiency_parts(results, config.efficiency)] if config.efficiency is not None else []
    drawn += [spread_parts(results, config.spread)] if config.spread is not None else []
    for table, own in drawn:
        tables.append(table)
        figures += own
    tables += [scores.sensitivity_table(results, one) for one in config.sensitivities]
    return tables, figures
