"""Tables 1, 2, 3, 4 and 6 and the sensitivities: scores of arms, changes against an arm, the paper's values beside them.

Pure: `Results` in, `Table`s out. A cell without a result says so.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from pivotrl.config.tables import ArmTable, Benchmark, MainArms, OutOfDomain, Sensitivity
from pivotrl.evaluation.tables.cells import Cell, Table, TableRow, change_cell, missing_cell, paper_cell, score_cell
from pivotrl.evaluation.tables.estimates import Estimate, Resampling, Seeds, TaskScore, Total, change, mean_of, on_shared_seeds, score
from pivotrl.evaluation.tables.paper import paper_note, paper_value
from pivotrl.evaluation.tables.sources import OWN, Results, Scores

_PAPER_FAMILIES = ("airline", "retail", "telecom", "mean")
_SCORES_NOTE = "Scores in percent, changes in points; brackets: 95 % interval over tasks and seeds; n: attempts."
_NONE = missing_cell("-")


def main_tables(results: Results, arms: MainArms) -> list[Table]:
    """Table 1."""
    names, columns = (arms.base, arms.sft, arms.pivotrl), ("base", "sft", "pivotrl")
    rows: list[TableRow] = []
    for domain in results.config.domains:
        ours = [score_cell(_score(results, arm, domain.name, OWN), results.of(arm, domain.name, OWN).files) for arm in names]
        difference = _change_cell(results, arms.sft, arms.pivotrl, [domain.name], [OWN])
        paper = [paper_cell(paper_value("table1", domain.paper, name)) for name in columns]
        gain = paper_cell(paper_value("table1_gain", domain.paper, "difference"))
        rows.append(TableRow(domain.name, domain.title, (*ours, difference, *paper, gain)))
    every = [domain.name for domain in results.config.domains]
    pairs = ((arms.base, arms.sft), (arms.base, arms.pivotrl), (arms.sft, arms.pivotrl))
    gains = [_change_cell(results, before, after, every, [OWN]) for before, after in pairs]
    published = "mean gain over base" if any(domain.paper for domain in results.config.domains) else None
    paper = [paper_cell(paper_value("table1_gain", published, name)) for name in ("sft", "pivotrl", "difference")]
    rows.append(TableRow("gain", "mean gain over base", (_NONE, *gains, _NONE, *paper), is_total=True))
    headings = (("base", "base"), ("sft", "SFT"), ("pivotrl", "PivotRL"), ("difference", "PivotRL - SFT"))
    caption = f"{_SCORES_NOTE} p: paired test of PivotRL against SFT."
    return [Table("table1", "Table 1: in domain", caption, "domain", (*headings, *_paper_headings(headings)), tuple(rows))]


def out_of_domain_tables(results: Results, arms: MainArms, apart: OutOfDomain) -> list[Table]:
    """Tables 2 and 3: by benchmark over all training domains, and by training domain."""
    every = [domain.name for domain in results.config.domains]
    by_benchmark = [_apart_row(results, arms, every, [one], one.name, one.title, one.paper) for one in apart.benchmarks]
    published = "average" if any(one.paper for one in apart.benchmarks) else None
    by_benchmark.append(_apart_row(results, arms, every, apart.benchmarks, "average", "average", published))
    headings = (("base", "base"), ("sft", "SFT, change"), ("pivotrl", "PivotRL, change"))
    caption = f"{_SCORES_NOTE} Mean over the checkpoints of {len(every)} training domains, every domain the same weight."
    columns = (*headings, *_paper_headings(headings))
    tables = [
        Table("table2", "Table 2: out of domain", caption, "benchmark", columns, tuple(by_benchmark), tuple(filter(None, [paper_note("table2")])))
    ]
    by_domain: list[TableRow] = []
    for domain in results.config.domains:
        for one in apart.benchmarks:
            row = _apart_row(results, arms, [domain.name], [one], f"{domain.name}.{one.name}", f"{domain.title}: {one.title}", None)
            by_domain.append(replace(row, cells=row.cells[: len(headings)]))
        row = _apart_row(results, arms, [domain.name], apart.benchmarks, f"{domain.name}.average", f"{domain.title}: average", None)
        by_domain.append(replace(row, cells=row.cells[: len(headings)]))
    notes = (paper_note("table3"),) if published else ()
    tables.append(
        Table("table3", "Table 3: out of domain by training domain", _SCORES_NOTE, "trained on: benchmark", headings, tuple(by_domain), notes)
    )
    return tables


def ablation_table(results: Results, table: ArmTable) -> Table:
    """Table 4: every arm and its difference from the first."""
    first, domain = table.rows[0], results.domain(table.domain)
    rows: list[TableRow] = []
    for row in table.rows:
        ours = score_cell(_score(results, row.arm, domain.name, OWN), results.of(row.arm, domain.name, OWN).files)
        difference = _NONE if row is first else _change_cell(results, first.arm, row.arm, [domain.name], [OWN])
        rows.append(TableRow(row.arm, row.title, (ours, difference, paper_cell(paper_value("table4", row.paper, "score")))))
    columns = (("score", domain.title), ("difference", f"difference from {first.title}"), ("paper", "paper"))
    caption = f"{_SCORES_NOTE} p: paired test against {first.title}."
    return Table("table4", f"Table 4: ablation on {domain.title}", caption, "arm", columns, tuple(rows), (paper_note("table4"),))


def family_table(results: Results, table: ArmTable) -> Table:
    """Table 6: the arms by task family."""
    domain = results.domain(table.domain)
    families = sorted({one.family for row in table.rows for one in _tasks(results.of(row.arm, domain.name, OWN).seeds)} - {""})
    rows: list[TableRow] = []
    has_paper = any(row.paper for row in table.rows)
    for row in table.rows:
        found = results.of(row.arm, domain.name, OWN)
        ours = [score_cell(score(_family(found.seeds, name), _family_draws(results, domain.name, name)), found.files) for name in families]
        ours.append(score_cell(_score(results, row.arm, domain.name, OWN), found.files))
        paper = [paper_cell(paper_value("table6", row.paper, name)) for name in _PAPER_FAMILIES] if has_paper else []
        rows.append(TableRow(row.arm, row.title, (*ours, *paper)))
    columns = [*((name, name) for name in families), ("mean", "mean")]
    columns += [(f"paper.{name}", f"paper: {name}") for name in _PAPER_FAMILIES] if has_paper else []
    return Table("table6", f"Table 6: {domain.title} by task family", _SCORES_NOTE, "arm", tuple(columns), tuple(rows))


def sensitivity_table(results: Results, table: Sensitivity) -> Table:
    """The in-domain score at every value of a setting."""
    domain = results.domain(table.domain)
    rows: list[TableRow] = []
    for point in table.points:
        ours = score_cell(_score(results, point.arm, domain.name, OWN), results.of(point.arm, domain.name, OWN).files)
        is_reference = point.arm == table.reference
        difference = missing_cell("reference") if is_reference else _change_cell(results, table.reference, point.arm, [domain.name], [OWN])
        rows.append(TableRow(point.value, point.value, (ours, difference)))
    columns = (("score", domain.title), ("difference", "difference from the reference"))
    return Table(f"sensitivity_{table.name}", f"Sensitivity to {table.title}", _SCORES_NOTE, table.title, columns, tuple(rows))


def _apart_row(
    results: Results, arms: MainArms, domains: Sequence[str], benchmarks: Sequence[Benchmark], key: str, label: str, paper: str | None
) -> TableRow:
    names = [one.name for one in benchmarks]
    parts = [_mean_over_domains(results, [arms.base], domains, name) for name in names]
    base = score_cell(mean_of(parts), _files(results, [arms.base], domains, names))
    changes = [_change_cell(results, arms.base, after, domains, names) for after in (arms.sft, arms.pivotrl)]
    published = [paper_cell(paper_value("table2", paper, name)) for name in ("base", "sft", "pivotrl")]
    return TableRow(key, label, (base, *changes, *published), is_total=len(names) > 1)


def _change_cell(results: Results, before: str, after: str, domains: Sequence[str], benchmarks: Sequence[str | None]) -> Cell:
    """The mean change over domains and benchmarks."""
    parts = [_mean_over_domains(results, [before, after], domains, benchmark) for benchmark in benchmarks]
    estimate = parts[0] if len(parts) == 1 else mean_of(parts)
    return change_cell(estimate, _files(results, [before, after], domains, benchmarks))


def _mean_over_domains(results: Results, arms: Sequence[str], domains: Sequence[str], benchmark: str | None) -> Estimate | None:
    """A score (one arm) or a change (two) over domains. A checkpoint that stands for all of them is counted once."""
    parts: dict[tuple[tuple[str, ...], ...], Estimate | None] = {}
    for domain in domains:
        found = [results.of(arm, domain, benchmark) for arm in arms]
        is_shared = benchmark is not OWN and all(one.files for one in found)
        key = tuple(one.files for one in found) if is_shared else ((domain,),)
        if key not in parts:
            parts[key] = _score(results, arms[0], domain, benchmark) if len(arms) == 1 else _change(results, found[0], found[1], domain, benchmark)
    estimates = list(parts.values())
    return estimates[0] if len(estimates) == 1 else mean_of(estimates)


def _score(results: Results, arm: str, domain: str, benchmark: str | None) -> Estimate | None:
    seeds = results.of(arm, domain, benchmark).seeds
    families = _averaged_families(results, domain, benchmark, [seeds])
    if families:
        return mean_of([score(_family(seeds, name), _family_draws(results, domain, name)) for name in families])
    return score(seeds, draws_of(results, domain, benchmark))


def _change(results: Results, before: Scores, after: Scores, domain: str, benchmark: str | None) -> Estimate | None:
    early, late = (before.seeds, after.seeds) if results.config.pairs == "mean" else on_shared_seeds(before.seeds, after.seeds)
    whole = change(early, late, draws_of(results, domain, benchmark))
    families = _averaged_families(results, domain, benchmark, [early, late])
    if not families or whole is None:
        return whole
    parts = [change(_family(early, name), _family(late, name), _family_draws(results, domain, name)) for name in families]
    mean = mean_of(parts)
    return mean and replace(mean, tests=whole.tests)


def _averaged_families(results: Results, domain: str, benchmark: str | None, sides: Sequence[Seeds]) -> list[str]:
    """Families that weigh the same in the domain's own score; none where tasks do."""
    if benchmark is not OWN or results.domain(domain).average == "tasks":
        return []
    return sorted({one.family for seeds in sides for one in _tasks(seeds)})


def _tasks(seeds: Seeds) -> list[TaskScore]:
    return [one for tasks in seeds.values() if not isinstance(tasks, Total) for one in tasks]


def _family(seeds: Seeds, family: str) -> Seeds:
    parts: Mapping[int, list[TaskScore]] = {
        seed: [one for one in tasks if one.family == family] for seed, tasks in seeds.items() if not isinstance(tasks, Total)
    }
    return {seed: tasks for seed, tasks in parts.items() if tasks}


def draws_of(results: Results, domain: str, benchmark: str | None) -> Resampling:
    """Where the draws of a domain's own benchmark, or of one out of domain, come from."""
    return Resampling(results.config.seed, domain, benchmark or f"own {domain}", results.config.num_resamples)


def _family_draws(results: Results, domain: str, family: str) -> Resampling:
    return Resampling(results.config.seed, domain, f"own {domain} {family}", results.config.num_resamples)


def _files(results: Results, arms: Sequence[str], domains: Sequence[str], benchmarks: Sequence[str | None]) -> list[str]:
    found = (results.of(arm, domain, benchmark).files for arm in arms for domain in domains for benchmark in benchmarks)
    return list(dict.fromkeys(file for files in found for file in files))


def _paper_headings(headings: Sequence[tuple[str, str]]) -> tuple[tuple[str, str], ...]:
    return tuple((f"paper.{key}", f"paper: {heading}") for key, heading in headings)
