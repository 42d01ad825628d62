"""Arms that were added after the comparison: what each gains in domain and loses out of it, against the base and against PivotRL. Pure."""

from __future__ import annotations

from pivotrl.config.tables import ExploratoryTable
from pivotrl.evaluation.evidence.findings import joined_cell
from pivotrl.evaluation.evidence.joined import Part, joined_change
from pivotrl.evaluation.tables.cells import Table, TableRow, missing_cell
from pivotrl.evaluation.tables.sources import OWN, Results

KEY = "exploratory_"
"""How the tables' keys begin."""
_COLUMNS = (
    ("own.base", "in domain, change against base"),
    ("apart.base", "out of domain, change against base"),
    ("own.pivotrl", "in domain, difference from PivotRL"),
    ("apart.pivotrl", "out of domain, difference from PivotRL"),
)
_CAPTION = (
    "Points; every domain the same weight, out of domain every skill too. Paired by task on the seeds that both arms have. Brackets: 95 % interval "
    "over tasks and seeds; p: permutation over tasks, not corrected."
)


def exploratory_table(results: Results, config: ExploratoryTable) -> Table:
    """One row per arm; PivotRL has no difference from itself."""
    main, apart = results.config.main, results.config.out_of_domain
    assert main is not None, "the schema demands it"
    assert apart is not None, "the schema demands it"
    own: list[Part] = [(domain, OWN) for domain in config.domains]
    skills: list[Part] = [(domain, benchmark.name) for domain in config.domains for benchmark in apart.benchmarks]
    rows: list[TableRow] = []
    for row in config.rows:
        cells = [
            missing_cell("-") if row.arm == before else joined_cell(joined_change(results, before, row.arm, parts))
            for before in (main.base, main.pivotrl)
            for parts in (own, skills)
        ]
        rows.append(TableRow(row.arm, row.title, tuple(cells)))
    return Table(f"{KEY}{config.name}", config.title, _CAPTION, "arm", _COLUMNS, tuple(rows))
