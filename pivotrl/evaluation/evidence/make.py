"""From run directories to the record, and from the record to the page's files: the two halves of `python -m pivotrl.evaluation.evidence`.

The page is always made from the record, which is unpacked into a temporary directory; runs that are missing are named, not refused.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import orjson

from pivotrl.config.tables import RunSource, TablesConfig
from pivotrl.evaluation.evidence import page as pages
from pivotrl.evaluation.evidence.background import base_hashes, base_table, cost_table, settings_table
from pivotrl.evaluation.evidence.exploratory import exploratory_table
from pivotrl.evaluation.evidence.findings import arm_runs, comparisons, findings, joined_cell
from pivotrl.evaluation.evidence.joined import joined_change
from pivotrl.evaluation.evidence.record import Record, collect, unpack
from pivotrl.evaluation.tables.build import tables_and_figures
from pivotrl.evaluation.tables.cells import Cell, Table, TableRow, score_cell
from pivotrl.evaluation.tables.estimates import score
from pivotrl.evaluation.tables.figures import figure_bytes
from pivotrl.evaluation.tables.paper import paper_label
from pivotrl.evaluation.tables.scores import draws_of
from pivotrl.evaluation.tables.sources import OWN, Results, read_results, run_directory
from pivotrl.identity import bytes_id, file_id
from pivotrl.observability.fields import read_object
from pivotrl.rundir import MANIFEST, Stage, read_json

PAGE, RECORD, NUMBERS = "evidence.md", "evidence/runs.json.gz", "evidence/evidence.json"
CHOSEN, EXPLORATORY = "chosen.json", "exploratory.md"
_CPU_INFO, _GIB = Path("/proc/cpuinfo"), 1 << 30


def make_record(config: TablesConfig, spec: Path) -> Record:
    """The record of the runs that the specification names, with the files beside it: chosen.json and exploratory.md, where they are.

    Raises:
        UserError: for a file that is damaged or a source that is no run directory.
    """
    record = collect(config, Path(config.root.replace("{spec}", str(spec.parent))))
    chosen, exploratory = spec.parent / CHOSEN, spec.parent / EXPLORATORY
    record["chosen"] = {"hash": file_id(chosen), "content": read_json(chosen)} if chosen.exists() else None
    record["exploratory"] = exploratory.read_text() if exploratory.exists() else None
    record["machine"] = _machine()
    # Where the runs lie is this machine's matter and changes no number.
    record["spec"]["root"] = "."
    return record


def page_files(record: Mapping[str, Any]) -> dict[str, bytes]:
    """Every file of the page but the record, by name below docs/: the same record gives the same bytes.

    Raises:
        UserError: for a record that is not what `make_record` wrote.
    """
    with tempfile.TemporaryDirectory() as directory:
        root = Path(directory)
        hashes = unpack(record, root)
        config = TablesConfig.model_validate({**record["spec"], "root": directory})
        content = _content(read_results(config, spec=root, allows_missing=True), record)
    if record["chosen"] is not None:
        hashes[CHOSEN] = record["chosen"]["hash"]
    if record["exploratory"] is not None:
        hashes[EXPLORATORY] = bytes_id(record["exploratory"].encode())
    numbers = orjson.dumps(pages.numbers_record(content, hashes), option=orjson.OPT_INDENT_2 | orjson.OPT_SORT_KEYS | orjson.OPT_APPEND_NEWLINE)
    drawn = {f"{pages.FIGURES}/{figure.key}.svg": figure_bytes(figure, ("svg",))["svg"] for figure in content.figures}
    return {PAGE: pages.page(content).encode(), NUMBERS: numbers, **drawn}


def _content(results: Results, record: Mapping[str, Any]) -> pages.PageContent:
    tables, figures = tables_and_figures(replace(results, config=_of_what_is_there(results)))
    by_key = {table.key: table for table in tables}
    cells: dict[str, Cell] = {
        f"{table.key}/{row.key}/{name}": cell
        for table in tables
        for row in table.rows
        for (name, _), cell in zip(table.columns, row.cells, strict=True)
    }
    own = (
        _end_to_end_table(results),
        base_table(results),
        cost_table(results),
        settings_table(record["chosen"] and record["chosen"]["content"], CHOSEN),
    )
    by_key |= {table.key: table for table in own if table is not None}
    by_key |= {table.key: table for table in (exploratory_table(results, one) for one in results.config.exploratory)}
    return pages.PageContent(
        name=results.config.name,
        paper_label=paper_label(),
        tables=by_key,
        figures=figures,
        findings=findings(results, cells),
        comparisons=comparisons(results),
        missing=_missing(results),
        stopped=record["stopped"],
        base_hashes=base_hashes(results),
        commits=_commits(results),
        machine=record["machine"],
        exploratory=record["exploratory"],
    )


def _of_what_is_there(results: Results) -> TablesConfig:
    """The specification without the figures' domains of which an arm is missing."""
    config, changed = results.config, dict[str, Any]()
    if (efficiency := config.efficiency) is not None:
        arms = (efficiency.pivotrl, efficiency.end_to_end)
        kept = tuple(name for name in efficiency.domains if all(_has_curves(results, arm, name, efficiency.curve) for arm in arms))
        changed["efficiency"] = efficiency.model_copy(update={"domains": kept}) if kept else None
    if (spread := config.spread) is not None:
        kept = tuple(name for name in spread.domains if all(arm_runs(results, arm, name) for arm in (spread.pivots, spread.random)))
        changed["spread"] = spread.model_copy(update={"domains": kept}) if kept else None
    return config.model_copy(update=changed)


def _has_curves(results: Results, arm: str, domain: str, curve: str) -> bool:
    runs = [results.runs[arm, domain, seed] for seed in arm_runs(results, arm, domain)]
    return bool(runs) and all((run / curve).exists() for run in runs)


def _end_to_end_table(results: Results) -> Table | None:
    """Table 1 has no column for end-to-end RL: its scores, and its change against the base."""
    efficiency, main = results.config.efficiency, results.config.main
    if efficiency is None or main is None:
        return None
    arm, rows = efficiency.end_to_end, list[TableRow]()
    for domain in results.config.domains:
        found = results.of(arm, domain.name, OWN)
        change = joined_cell(joined_change(results, main.base, arm, [(domain.name, OWN)]))
        rows.append(TableRow(domain.name, domain.title, (score_cell(score(found.seeds, draws_of(results, domain.name, OWN)), found.files), change)))
    caption = (
        "Scores in percent, changes in points; brackets: 95 % interval over tasks and seeds; n: attempts. p: permutation over tasks, not corrected."
    )
    return Table(
        "end_to_end", "End-to-end RL in domain", caption, "domain", (("score", "end-to-end RL"), ("change", "change against base")), tuple(rows)
    )


def _missing(results: Results) -> list[tuple[str, str, int]]:
    """(arm, domain, seed) of the runs that are not there, each once and under its first name."""
    first: dict[Path, tuple[str, str, int]] = {}
    sources = [source for source in results.config.results if isinstance(source, RunSource)]
    for source in sorted(sources, key=lambda source: source.checkpoint == "reference"):
        for domain in source.domains:
            for seed in source.seeds:
                first.setdefault(run_directory(results.root, source, domain, seed), (source.arm, domain, seed))
    return [name for run, name in first.items() if not Stage.is_done(run, "eval")]


def _commits(results: Results) -> list[str]:
    manifests = [run / "eval" / MANIFEST for _, run in sorted(results.runs.items())]
    found = {read_object(manifest, name=str(manifest)).text("commit") for manifest in manifests}
    return sorted(commit for commit in found if commit is not None)


def _machine() -> str:
    """Processor, cores that this process may use, and memory of the machine that makes the record."""
    lines = _CPU_INFO.read_text().splitlines() if _CPU_INFO.exists() else []
    model = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown processor")
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / _GIB
    return f"{model}, {len(os.sched_getaffinity(0))} cores, {memory:.0f} GiB"
