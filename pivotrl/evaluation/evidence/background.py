"""What stands behind the comparisons: the base and its three criteria, what each arm cost, and the settings that were chosen beforehand.

Reads manifests, metrics and timing of the runs; each number is a cell with its files.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pivotrl.config.tables import RunSource
from pivotrl.errors import UserError
from pivotrl.evaluation.evidence.findings import arm_runs
from pivotrl.evaluation.tables.cells import NOT_RUN, Cell, Table, TableRow, missing_cell, number_cell
from pivotrl.evaluation.tables.curves import SPANS, numbers_by_step
from pivotrl.evaluation.tables.estimates import TaskScore, Total
from pivotrl.evaluation.tables.sources import OWN, Results
from pivotrl.observability.fields import read_object
from pivotrl.observability.sinks import METRICS
from pivotrl.observability.sinks import TIMING as STEP_TIMING
from pivotrl.rundir import MANIFEST, TIMING

_MIN_READABLE = 97.0
_SUCCESS_RANGE, _SKILLS_RANGE = (20.0, 70.0), (75.0, 97.0)
_TOKENS, _TURNS = "rollout/response_tokens/sum", "perf/env_turns/sum"
_PERCENT = 100.0


def base_table(results: Results) -> Table | None:
    """The protocol's three criteria of the base, by domain; None where the base was not evaluated."""
    main = results.config.main
    if main is None or not any(arm == main.base for arm, _, _ in results.runs):
        return None
    rows: list[TableRow] = []
    for domain in results.config.domains:
        readable = _readable(results, main.base, domain.name)
        rows.append(_criterion(f"{domain.name}.readable", f"{domain.title}: turns with a readable action", readable, (_MIN_READABLE, 100.0)))
        success = _share(results, main.base, domain.name, [OWN])
        rows.append(_criterion(f"{domain.name}.success", f"{domain.title}: episodes that succeed", success, _SUCCESS_RANGE))
    apart = results.config.out_of_domain
    if apart is not None:
        skills = _share(results, main.base, results.config.domains[0].name, [one.name for one in apart.benchmarks])
        rows.append(_criterion("skills", "skill questions answered", skills, _SKILLS_RANGE))
    caption = "In percent, over all seeds. Readable: sampled turns of the base's profile that were not malformed. n: turns, episodes, questions."
    return Table("base", "Base", caption, "criterion", (("value", "base"), ("rule", "wanted"), ("met", "met")), tuple(rows))


def missed_criteria(table: Table) -> list[str]:
    """Labels of the criteria that the base does not meet."""
    return [row.label for row in table.rows if row.cells[2].text == "no"]


def base_hashes(results: Results) -> list[str]:
    """The hashes of the base's files that the runs' evaluations name; more than one would mean that arms had different bases."""
    found: set[str] = set()
    for _, run in sorted(results.runs.items()):
        manifest = run / "eval" / MANIFEST
        results.read(manifest)
        if (name := read_object(manifest, name=str(manifest)).child("inputs").text("reference")) is not None:
            found.add(name)
    return sorted(found)


def cost_table(results: Results) -> Table:
    """Turns and tokens sampled and seconds spent, mean over the runs of an arm on a domain; evaluation and validation are not counted."""
    rows: list[TableRow] = []
    for arm, domain, runs in _trained(results):
        costs = [_Costs(results, run) for run in runs]
        files = [file for cost in costs for file in cost.files]
        n = len(runs)

        def mean(name: str, unit: str, costs: Sequence[_Costs] = costs, files: Sequence[str] = files, n: int = n) -> Cell:
            values = [cost.values[name] for cost in costs if name in cost.values]
            if len(values) < n:
                return missing_cell("-")
            value = math.fsum(values) / n
            text = f"{value:,.1f} s" if unit == "s" else f"{value:,.0f}"
            return number_cell(f"{text} n={n}", value, unit=unit, n=n, sources=files)

        names = ("turns", "profile_turns", "all_turns", "tokens")
        cells = [*(mean(name, "tokens" if name == "tokens" else "turns") for name in names), *(mean(f"{stage}_s", "s") for stage in _STAGES)]
        rows.append(TableRow(f"{arm}.{domain}", f"{arm}, {results.domain(domain).title}", tuple(cells)))
    columns = (("turns", "turns of training"), ("profile_turns", "turns of profiling"), ("all_turns", "both"), ("tokens", "tokens sampled"))
    columns += tuple((f"{stage}_s", f"{stage}, wall") for stage in _STAGES)
    caption = (
        "Mean over runs; n: runs. A turn is one sampled assistant completion, whatever became of it. SFT samples none. Tokens sampled: training and "
        "profiling. Wall time: the stage's own; of training rollout, update and weight hand-over."
    )
    return Table("costs", "Costs", caption, "arm", columns, tuple(rows))


_STAGES = ("sft", "profile", "train")


class _Costs:
    """What one run cost: `values` by name, and the files they come from. A stage that the run lacks has no seconds and no turns."""

    def __init__(self, results: Results, run: Path) -> None:
        # A run without a stage has nothing to name for its zero but the run itself.
        self.files: list[str] = [results.read(run / "eval" / MANIFEST)]
        self.values: dict[str, float] = {}
        turns, tokens = numbers_by_step(run / "train" / METRICS, _TURNS), numbers_by_step(run / "train" / METRICS, _TOKENS)
        profile_turns = profile_tokens = profile_s = 0.0
        profiles = sorted(run.glob(f"**/profile/{MANIFEST}"))
        for manifest in profiles:
            timing = manifest.parent / TIMING
            cost = read_object(manifest, name=str(manifest)).child("summary").child("cost")
            profile_turns += cost.number("turns") or 0.0
            profile_tokens += cost.number("completion_tokens") or 0.0
            profile_s += read_object(timing, name=str(timing)).number("wall_s") or 0.0
            self.files += [results.read(path) for path in (manifest, timing) if path.exists()]
        trained = max((count for _, count in turns), default=0.0)
        self.values |= {"turns": trained, "profile_turns": profile_turns, "all_turns": trained + profile_turns}
        self.values["tokens"] = math.fsum(count for _, count in tokens) + profile_tokens
        if profiles:
            self.values["profile_s"] = profile_s
        for stage in ("sft", "train"):
            timing = run / stage / STEP_TIMING
            if timing.exists():
                self.values[f"{stage}_s"] = math.fsum(value for span in SPANS for _, value in numbers_by_step(timing, span))
            self.files += [results.read(path) for path in (timing, run / stage / METRICS) if path.exists()]


def _trained(results: Results) -> Iterator[tuple[str, str, list[Path]]]:
    """(arm, domain, runs) of trained checkpoints; a directory that two arms name is the first one's."""
    seen: set[Path] = set()
    for source in results.config.results:
        if not isinstance(source, RunSource) or source.checkpoint == "reference":
            continue
        for domain in source.domains:
            runs = [results.runs[source.arm, domain, seed] for seed in arm_runs(results, source.arm, domain) if seed in source.seeds]
            # A run that stopped for good has no stage of its own here.
            if fresh := [run for run in runs if run not in seen and any((run / stage).exists() for stage in ("sft", "train"))]:
                seen |= set(fresh)
                yield source.arm, domain, fresh


def settings_table(chosen: Mapping[str, Any] | None, file: str) -> Table | None:
    """What was chosen on the development seed, with every setting tried.

    Args:
        chosen: by arm: each chosen key with its value, and `grid`, rows {value, success, n} and, where measured, {skills, n_skills}.

    Raises:
        UserError: where an arm's entry is no object.
    """
    if chosen is None:
        return None
    rows: list[TableRow] = []
    for arm, entry in chosen.items():
        if not isinstance(entry, dict):
            raise UserError(f"{file}: {arm} is {str(entry)[:60]!r}", rule="an arm has an object of settings", fix="write {key: value, grid: [...]}")
        settings = {key: value for key, value in entry.items() if key != "grid"}
        rows.append(TableRow(arm, arm, (Cell(_shown(settings), "text", sources=(file,)), *[missing_cell("-")] * 3), is_total=True))
        for index, one in enumerate(entry.get("grid", [])):
            n = (
                number_cell(f"{int(one['n'])}", float(one["n"]), unit="attempts", n=int(one["n"]), sources=[file])
                if "n" in one
                else missing_cell("-")
            )
            success, skills = _grid_percent(one, "success", "n", file), _grid_percent(one, "skills", "n_skills", file, otherwise="-")
            rows.append(TableRow(f"{arm}.{index}", arm, (Cell(_shown(one["value"]), "text", sources=(file,)), success, n, skills)))
    columns = (("setting", "setting"), ("success", "success, percent"), ("n", "n"), ("skills", "skills, percent"))
    caption = "Bold: chosen on development seed 100, conversational world, whose runs enter no other table. Below: all that was tried. Success chose."
    return Table("settings", "Settings", caption, "arm", columns, tuple(rows))


def _grid_percent(row: Mapping[str, Any], key: str, n_key: str, file: str, *, otherwise: str = NOT_RUN) -> Cell:
    """A share of the grid in percent, or why there is none."""
    if row.get(key) is None:
        return missing_cell(otherwise)
    value = _PERCENT * float(row[key])
    return number_cell(f"{value:.1f}", value, unit="percent", n=int(row[n_key]), sources=[file])


def _shown(value: Any) -> str:
    """A setting as text: keys with their values, in the order of the file."""
    if isinstance(value, dict):
        return ", ".join(f"{key} = {_shown(part)}" for key, part in value.items())
    return ", ".join(map(_shown, value)) if isinstance(value, list) else f"{value}"


def _criterion(key: str, label: str, value: Cell, wanted: tuple[float, float]) -> TableRow:
    met = "-" if value.value is None else "yes" if wanted[0] <= value.value <= wanted[1] else "no"
    rule = f"at least {wanted[0]:.0f}" if wanted[1] == 100.0 else f"{wanted[0]:.0f} to {wanted[1]:.0f}"
    return TableRow(key, label, (value, Cell(rule, "text"), Cell(met, "text")))


def _share(results: Results, arm: str, domain: str, benchmarks: Sequence[str | None]) -> Cell:
    """Share of attempts that succeed, in percent: every question the same weight."""
    found = [results.of(arm, domain, benchmark) for benchmark in benchmarks]
    tasks: list[TaskScore] = [one for scores in found for part in scores.seeds.values() if not isinstance(part, Total) for one in part]
    files = dict.fromkeys(file for scores in found for file in scores.files)
    n = sum(one.num_attempts for one in tasks)
    return _percent(math.fsum(one.mean * one.num_attempts for one in tasks) / n, n, list(files)) if n else missing_cell()


def _readable(results: Results, arm: str, domain: str) -> Cell:
    readable, n, files = 0.0, 0, list[str]()
    for seed in arm_runs(results, arm, domain):
        manifest = results.runs[arm, domain, seed] / "profile" / MANIFEST
        malformed = read_object(manifest, name=str(manifest)).child("summary").child("malformed_frac").interval()
        if malformed is not None:
            readable, n = readable + (1 - malformed.value) * malformed.n, n + malformed.n
            files.append(results.read(manifest))
    return _percent(readable / n, n, files) if n else missing_cell()


def _percent(share: float, n: int, files: Sequence[str]) -> Cell:
    return number_cell(f"{_PERCENT * share:.1f} n={n:,}", _PERCENT * share, unit="percent", n=n, sources=files)
