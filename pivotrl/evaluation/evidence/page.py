"""The page of evidence as text, and the record of where each of its numbers comes from. Pure: results in, files' content out.

Numbers stand in tables, or in sentences that repeat a cell's text; evidence.json lists all cells. Sentences are chosen by verdict.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from pivotrl.evaluation.evidence.background import missed_criteria
from pivotrl.evaluation.evidence.exploratory import KEY as EXPLORATORY_KEY
from pivotrl.evaluation.evidence.findings import Comparison, Finding, p_cell, p_text
from pivotrl.evaluation.evidence.verdicts import Verdict
from pivotrl.evaluation.tables.cells import Cell, Table, TableRow, missing_cell
from pivotrl.evaluation.tables.curves import Figure
from pivotrl.evaluation.tables.write import markdown_table

FIGURES = "evidence/figures"

# By verdict: shown, contradicted, not decided.
_ANSWERS: Mapping[str, Mapping[Verdict, str]] = {
    "H1": {
        Verdict.SHOWN: "In domain, PivotRL succeeds more often than the base it starts from",
        Verdict.CONTRADICTED: "In domain, PivotRL succeeds less often than the base it starts from",
        Verdict.NOT_DECIDED: "These runs do not decide whether PivotRL improves on the base in domain",
    },
    "H2": {
        Verdict.SHOWN: "SFT forgets skills that it was not trained on; PivotRL keeps them within one point",
        Verdict.CONTRADICTED: "It does not hold that SFT forgets and PivotRL keeps its skills within one point",
        Verdict.NOT_DECIDED: "These runs do not decide whether SFT forgets where PivotRL does not",
    },
    "H3": {
        Verdict.SHOWN: "PivotRL reaches the same success with at most a quarter of end-to-end RL's turns, profiling left out",
        Verdict.CONTRADICTED: "PivotRL needs more than a quarter of end-to-end RL's turns for the same success",
        Verdict.NOT_DECIDED: "These runs do not decide whether a quarter of end-to-end RL's turns is enough",
    },
    "H4": {
        Verdict.SHOWN: "Both the pivots and the functional reward add to success",
        Verdict.CONTRADICTED: "It does not hold that both the pivots and the functional reward add to success",
        Verdict.NOT_DECIDED: "These runs do not decide whether both the pivots and the functional reward add to success",
    },
    "H5": {
        Verdict.SHOWN: "Rewards vary more on pivots than on random turns, from the first quarter of training to the last",
        Verdict.CONTRADICTED: "Rewards do not vary more on pivots than on random turns in every quarter of training",
        Verdict.NOT_DECIDED: "These runs do not decide whether rewards vary more on pivots than on random turns throughout",
    },
}
_PLACES: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    ("In domain", "Success on test tasks of the world that the arm was trained on.", ("table1", "end_to_end", "table6")),
    ("Out of domain", "The eight skills that no arm was trained on.", ("table2", "table3")),
    ("Turns and time", "What the same success costs with PivotRL and with end-to-end RL.", ("figure1",)),
    ("Ablation and signal", "What pivots and the functional reward each add.", ("table4", "figure3")),
)
_OWN_TABLES = ("base", "costs", "settings")


@dataclass(frozen=True, slots=True)
class PageContent:
    """Everything that the page shows."""

    name: str
    paper_label: str
    tables: Mapping[str, Table]
    """By key, in order; base, costs and settings among them where there are any."""
    figures: Sequence[Figure]
    findings: Sequence[Finding]
    comparisons: Sequence[Comparison]
    missing: Sequence[tuple[str, str, int]]
    """(arm, domain, seed) of runs that are not there."""
    stopped: Mapping[str, str]
    """Error by run, of runs that failed twice and count as the base's scores."""
    base_hashes: Sequence[str]
    commits: Sequence[str]
    """Of the code that the runs were made with."""
    machine: str | None
    exploratory: str | None


def page(content: PageContent) -> str:
    """The page as markdown."""
    parts = [
        [f"# {content.name}", "", *_opening(content)],
        ["## Verdicts", "", *_shown(verdict_table(content.findings))],
        ["## In short", "", *_answers(content)],
        _missing(content),
        *(_section(content, heading, text, keys) for heading, text, keys in _PLACES),
        _sensitivities(content),
        ["## Hypotheses in detail", "", *(line for one in content.findings for line in _detail(one))],
        ["## Comparisons without an expected sign", "", *_shown(comparison_table(content.comparisons))],
        _base(content),
        _costs(content),
        ["## Settings", "", *_table_or(content, "settings", "No record of the settings chosen beforehand was given.")],
        _negative(content),
        _exploratory(content),
        _how(),
    ]
    return "\n".join(line for part in parts for line in part).rstrip("\n") + "\n"


def all_tables(content: PageContent) -> list[Table]:
    """Every table whose cells the page shows."""
    details = [_detail_table(one) for one in content.findings]
    return [verdict_table(content.findings), *details, comparison_table(content.comparisons), *content.tables.values()]


def verdict_table(findings: Sequence[Finding]) -> Table:
    """One row per hypothesis; what was measured repeats the cells of the details."""
    rows: list[TableRow] = []
    for one in findings:
        sources = tuple(dict.fromkeys(source for measured in one.measured for source in measured.cell.sources))
        numbers = Cell(_numbers(one), "text", details={"cells": [f"detail/{measured.key}/value" for measured in one.measured]}, sources=sources)
        verdict = Cell(one.verdict.value, "text", details={"rule": one.rule}, sources=sources)
        rows.append(TableRow(one.key, f"{one.key}: {one.statement}", (Cell(one.rule, "text"), numbers, verdict)))
    caption = "Changes in points of success or of skill accuracy; brackets: 95 % interval. No verdict is left out."
    return Table("verdicts", "Verdicts", caption, "hypothesis", (("rule", "shown if"), ("measured", "measured"), ("verdict", "verdict")), tuple(rows))


def comparison_table(found: Sequence[Comparison]) -> Table:
    """All two-sided comparisons with both p values."""
    rows = tuple(TableRow(one.key, one.label, (one.cell, one.p_tasks, one.p_seeds)) for one in found)
    columns = (("change", "difference, points"), ("p_tasks", "p over tasks"), ("p_seeds", "p over seeds"))
    caption = (
        "Success, paired by task within the seeds that both arms have. p over tasks asks about these checkpoints, p over seeds about the method. "
        "No p value here is corrected for the number of comparisons."
    )
    return Table("comparisons", "Comparisons", caption, "comparison", columns, rows)


def numbers_record(content: PageContent, hashes: Mapping[str, str]) -> dict[str, Any]:
    """evidence.json: every cell with its number and the files it was computed from, and the files' hashes.

    Lists of files that many cells share stand once, under `file_sets`. Numbers have nine significant digits.
    """
    sets: dict[tuple[str, ...], int] = {}
    cells: dict[str, Any] = {}
    for table in all_tables(content):
        for key, cell in table.as_dict().items():
            files = tuple(sorted(set(cell.pop("sources"))))
            cells[_detail_key(key)] = {**_rounded(cell), "files": sets.setdefault(files, len(sets)), "formula": _FORMULAS[cell["kind"]]}
    used = {file for files in sets for file in files}
    return {
        "cells": cells,
        "file_sets": [list(files) for files in sets],
        "files": {file: hashes[file] for file in sorted(used)},
        "figures": {figure.key: _rounded([[[list(line.points) for line in lines] for _, lines in figure.panels]]) for figure in content.figures},
    }


_FORMULAS = {
    "score": "100 x mean over tasks and seeds of the mean over attempts (tables/estimates.py: score, mean_of)",
    "change": "100 x mean of after - before over tasks paired within seeds (tables/estimates.py: change, mean_of)",
    "ratio": "cost of one arm over cost of the other at the matched success (tables/curves.py: first_reach)",
    "count": "as the table's caption says, from the files' own numbers",
    "paper": "published value (tables/paper.json)",
    "text": "words, or a repetition of the cells named",
    "missing": "no number",
}


def _opening(content: PageContent) -> list[str]:
    text = [
        "What PivotRL does in small worlds with policies of about a million parameters, against SFT and end-to-end RL on the same data. The rules",
        "were fixed beforehand in [evidence_protocol.md](evidence_protocol.md). This page is written by code; no number in it was typed. A small",
        "setting can contradict the paper's order of the methods; it cannot confirm the paper's numbers.",
        "",
        f"Columns headed *paper* are {_escaped(content.paper_label)}.",
        "",
    ]
    if content.missing:
        text += ["**Not all runs are there yet.** What follows is computed from those that are; its verdicts are preliminary.", ""]
    return text


def _numbers(one: Finding) -> str:
    return "; ".join(f"{measured.label}: {measured.cell.text}{_after_holm(measured.p_holm)}" for measured in one.measured)


def _after_holm(p: float | None) -> str:
    return "" if p is None else f", p after Holm {p_text(p)}"


def _answers(content: PageContent) -> list[str]:
    return [f"- {_ANSWERS[one.key][one.verdict]} ({_escaped(_numbers(one))})." for one in content.findings] + [""]


def _escaped(text: str) -> str:
    """Text inside a sentence."""
    return text.replace("<", "\\<").replace("_", "\\_").replace("*", "\\*")


def _missing(content: PageContent) -> list[str]:
    stopped = [f"- {_escaped(name)}: {_escaped(error)}" for name, error in sorted(content.stopped.items())]
    if stopped:
        stopped = ["## Runs that stopped", "", "These failed twice with the same settings and count as the base's scores:", "", *stopped, ""]
    if not content.missing:
        return stopped
    seeds: dict[tuple[str, str], list[int]] = {}
    for arm, domain, seed in content.missing:
        seeds.setdefault((arm, domain), []).append(seed)
    lines = [f"- {_escaped(arm)} on {domain}: seeds {', '.join(map(str, sorted(found)))}" for (arm, domain), found in seeds.items()]
    return [*stopped, "## What is missing", "", "These runs are not finished:", "", *lines, ""]


def _section(content: PageContent, heading: str, text: str, keys: Sequence[str]) -> list[str]:
    lines = [f"## {heading}", "", text, ""]
    shown = False
    for key in keys:
        if key in content.tables:
            lines += [f"### {content.tables[key].title}", "", *_shown(content.tables[key])]
            lines += _figures(content, key)
            shown = True
    return lines if shown else [*lines, "Not run.", ""]


def _shown(table: Table) -> list[str]:
    """A table's lines without columns in which the paper has nothing, with the numbers of tasks and seeds behind it."""
    kept = [index for index, (key, _) in enumerate(table.columns) if not key.startswith("paper") or _has_paper(table, index)]
    rows = tuple(replace(row, cells=tuple(row.cells[index] for index in kept)) for row in table.rows)
    notes = table.notes if len(kept) == len(table.columns) else ()
    cells = [cell for row in rows for cell in row.cells if "num_tasks" in cell.details]
    if cells:
        tasks, seeds = (_span([cell.details[key] for cell in cells]) for key in ("num_tasks", "num_seeds"))
        tested = " The p values in it are not corrected." if any(" p=" in cell.text for cell in cells) else ""
        notes = (*notes, f"Behind a number: {tasks} different tasks or questions, {seeds} seeds; n counts attempts.{tested}")
    return markdown_table(replace(table, columns=tuple(table.columns[index] for index in kept), rows=rows, notes=notes))


def _has_paper(table: Table, index: int) -> bool:
    return any(row.cells[index].kind == "paper" for row in table.rows)


def _span(values: Sequence[int]) -> str:
    return f"{min(values):,}" if min(values) == max(values) else f"{min(values):,} to {max(values):,}"


def _share_defined(one: Finding) -> list[str]:
    """For ratios that do not exist in every resample."""
    shares = {measured.cell.details["defined_frac"] for measured in one.measured if "defined_frac" in measured.cell.details}
    if not shares or min(shares) == 1:
        return []
    return [f"The ratio exists in {100 * min(shares):.1f} % of the resamples; its interval is of these.", ""]


def _figures(content: PageContent, key: str) -> list[str]:
    drawn = [figure for figure in content.figures if figure.key.startswith(f"{key}_")]
    return [line for figure in drawn for line in (f"![{figure.title}]({FIGURES}/{figure.key}.svg)", "", figure.caption, "")]


def _sensitivities(content: PageContent) -> list[str]:
    found = [table for key, table in content.tables.items() if key.startswith("sensitivity_")]
    lines = [line for table in found for line in (f"### {table.title}", "", *_shown(table))]
    return ["## Sensitivities", "", *(lines or ["Not run.", ""])]


def _detail(one: Finding) -> list[str]:
    return [
        f"### {one.key}: {one.statement}",
        "",
        f"Shown if: {one.rule}. Verdict: **{one.verdict.value}**.",
        "",
        *markdown_table(_detail_table(one)),
    ]


def _detail_table(one: Finding) -> Table:
    rows = tuple(TableRow(measured.key, measured.label, (measured.cell, *_tests(measured.cell, measured.p_holm))) for measured in one.measured)
    columns = (("value", "measured"), ("p_tasks", "p over tasks"), ("p_holm", "after Holm"), ("p_seeds", "p over seeds, not corrected"))
    return Table(f"detail_{one.key}", one.key, "", "number", columns, rows)


def _tests(cell: Cell, p_holm: float | None) -> tuple[Cell, Cell, Cell]:
    tests = {test["name"].removeprefix("permutation over "): test for test in cell.details.get("tests", [])}
    over = [p_cell(tests[name]["p"], tests[name]["n"], cell.sources) if name in tests else missing_cell("-") for name in ("tasks", "seeds")]
    return over[0], missing_cell("-") if p_holm is None else p_cell(p_holm, tests["tasks"]["n"], cell.sources), over[1]


def _table_or(content: PageContent, key: str, otherwise: str) -> list[str]:
    return markdown_table(content.tables[key]) if key in content.tables else [otherwise, ""]


def _base(content: PageContent) -> list[str]:
    lines = ["## Base", ""]
    if content.base_hashes:
        lines += [f"All arms start from one policy; hash of its files: {', '.join(f'`{one}`' for one in content.base_hashes)}.", ""]
    if len(content.base_hashes) > 1:
        lines += ["**The runs name more than one base.** The protocol asks for one.", ""]
    if (table := content.tables.get("base")) is not None:
        missed = missed_criteria(table)
        unknown = [row.label for row in table.rows if row.cells[2].text == "-"]
        said = f"Missed: {'; '.join(missed)}." if missed else "No criterion that was measured is missed."
        lines += [said + (f" Not measured: {'; '.join(unknown)}." if unknown else ""), ""]
    return lines + _table_or(content, "base", "Not run.")


def _costs(content: PageContent) -> list[str]:
    lines = ["## Costs", ""]
    if content.machine is not None:
        lines += [f"Machine: {content.machine}.", ""]
    if content.commits:
        lines += [f"Code of the runs: {', '.join(content.commits)}.", ""]
    return lines + _table_or(content, "costs", "Not run.")


def _negative(content: PageContent) -> list[str]:
    """Whatever speaks against the paper's order, or leaves it open."""
    lines = [f"- {one.key}, {one.statement}: {one.verdict.value}." for one in content.findings if one.verdict is not Verdict.SHOWN]
    worse = [one for one in content.comparisons if one.key.startswith(("sft.", "end_to_end.")) and one.cell.high is not None and one.cell.high < 0]
    lines += [f"- {one.label}: {_escaped(one.cell.text)}; the interval is below 0, so PivotRL does worse here." for one in worse]
    if (table := content.tables.get("base")) is not None:
        lines += [f"- The base misses a criterion: {label}." for label in missed_criteria(table)]
    if (table := content.tables.get("figure1")) is not None:
        rows = [row for row in table.rows if any(cell.text.startswith("not defined") for cell in row.cells)]
        lines += [f"- No ratio of costs: {row.label}." for row in rows]
    lines.append("- The other three worlds as a second out-of-domain measure are not on this page: the runs evaluate their own world and the skills.")
    return ["## What does not hold or is not known", "", *lines, ""]


def _exploratory(content: PageContent) -> list[str]:
    lines = ["## Exploratory", ""]
    found = [table for key, table in content.tables.items() if key.startswith(EXPLORATORY_KEY)]
    if content.exploratory is None and not found:
        return [*lines, "No exploratory run is reported.", ""]
    lines += ["Not part of the comparison; changes no verdict above.", ""]
    lines += [content.exploratory.strip(), ""] if content.exploratory is not None else []
    return lines + [line for table in found for line in (f"### {table.title}", "", *_shown(table))]


def _how() -> list[str]:
    return [
        "## How this page is made",
        "",
        "`make evidence` runs the arms and writes this page. [evidence/evidence.json](evidence/evidence.json) lists every number with the run",
        "files it was computed from and their content hashes. [evidence/runs.json.gz](evidence/runs.json.gz) holds what was read of these files,",
        "item scores and curves included; the page can be written from it again, byte for byte:",
        "",
        "    python -m pivotrl.evaluation.evidence --record docs/evidence/runs.json.gz --out docs",
        "",
    ]


def _detail_key(key: str) -> str:
    """``detail_H1/H1/pivotrl/value`` is ``detail/H1/pivotrl/value``: a measured number's key names its hypothesis already."""
    return f"detail/{key.partition('/')[2]}" if key.startswith("detail_") else key


def _rounded(value: Any) -> Any:
    """Floats at nine significant digits, so that machines whose sums differ in the last bit write the same file; no number for NaN."""
    if isinstance(value, float):
        return float(f"{value:.9g}") if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _rounded(part) for key, part in value.items()}
    return [_rounded(part) for part in value] if isinstance(value, list | tuple) else value
