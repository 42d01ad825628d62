"""The five hypotheses and the two-sided comparisons of docs/evidence_protocol.md, from results to findings with their cells.

Pure but for reading reward std from the runs' metrics. Rules are in verdicts.py, changes over several parts in joined.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from pivotrl.config.tables import RunSource, TablesConfig
from pivotrl.evaluation.evidence.joined import Joined, Part, joined_change, quarter_differences
from pivotrl.evaluation.evidence.verdicts import Verdict, forgets_less, holm, improves, is_ordered, keeps_signal, needs_fewer_turns
from pivotrl.evaluation.tables.cells import Cell, change_cell, missing_cell, number_cell
from pivotrl.evaluation.tables.curves import REWARD_STD, numbers_by_step
from pivotrl.evaluation.tables.estimates import Resampling
from pivotrl.evaluation.tables.sources import OWN, Results
from pivotrl.observability.sinks import METRICS
from pivotrl.pivots.statistics import Interval

_QUARTERS = ("first quarter", "second quarter", "third quarter", "last quarter")
_PERCENT = 100.0


@dataclass(frozen=True, slots=True)
class Measured:
    """One number that a hypothesis looks at."""

    key: str
    label: str
    cell: Cell
    p_holm: float | None = None
    """Corrected over the numbers of H1, H2 and H4 that have a p; None: not part of them."""


@dataclass(frozen=True, slots=True)
class Finding:
    """A hypothesis with its numbers and its verdict."""

    key: str
    statement: str
    rule: str
    measured: tuple[Measured, ...]
    verdict: Verdict


def findings(results: Results, cells: Mapping[str, Cell]) -> list[Finding]:
    """H1 to H5, in order.

    Args:
        cells: of the tables, by TABLE/ROW/COLUMN; H3 is read from Figure 1's.
    """
    changes = _tested(results)
    corrected = holm({key: found.estimate.tests[0].p for key, found in changes.items() if found is not None and key != "H2/pivotrl"})
    measured = {key: _measured(key, found, corrected) for key, found in changes.items()}
    points = {key: _points(found) for key, found in changes.items()}
    turns = {kind: _ratio(results, cells, kind) for kind in ("turns", "turns_profiled")}
    quarters, std_cells = _quarters(results)
    spread = tuple(Measured(f"H5/quarter{i + 1}", label, cell) for i, (label, cell) in enumerate(zip(_QUARTERS, std_cells, strict=True)))
    ratios = (Measured("H3/turns", "profiling left out", turns["turns"]), Measured("H3/turns_profiled", "profiling counted", turns["turns_profiled"]))
    return [
        Finding(
            "H1",
            "PivotRL improves on the base in domain",
            "interval of the change above 0",
            (measured["H1/pivotrl"],),
            improves(points["H1/pivotrl"]),
        ),
        Finding(
            "H2",
            "SFT forgets, PivotRL does not",
            "SFT's interval below 0, PivotRL's within -1 to +1",
            (measured["H2/sft"], measured["H2/pivotrl"]),
            forgets_less(points["H2/sft"], points["H2/pivotrl"]),
        ),
        Finding(
            "H3",
            "PivotRL needs at most a quarter of end-to-end RL's turns",
            "ratio without profiling at most 0.25",
            ratios,
            needs_fewer_turns(_interval(turns["turns"])),
        ),
        Finding(
            "H4",
            "full > random + functional > naive local RL",
            "both intervals above 0",
            (measured["H4/pivots"], measured["H4/reward"]),
            is_ordered([points["H4/pivots"], points["H4/reward"]]),
        ),
        Finding("H5", "pivots keep their signal", "difference of reward std above 0 in all four quarters", spread, keeps_signal(quarters)),
    ]


_LABELS = {
    "H1/pivotrl": "PivotRL - base",
    "H2/sft": "SFT - base",
    "H2/pivotrl": "PivotRL - base",
    "H4/pivots": "full - random + functional",
    "H4/reward": "random + functional - naive local RL",
}


def _tested(results: Results) -> dict[str, Joined | None]:
    """The changes of H1, H2 and H4; None where an arm is missing."""
    config = results.config
    found: dict[str, Joined | None] = dict.fromkeys(_LABELS)
    own: list[Part] = [(one.name, OWN) for one in config.domains]
    if config.main is not None:
        found["H1/pivotrl"] = joined_change(results, config.main.base, config.main.pivotrl, own)
        if config.out_of_domain is not None:
            apart: list[Part] = [(domain.name, one.name) for domain in config.domains for one in config.out_of_domain.benchmarks]
            found["H2/sft"] = joined_change(results, config.main.base, config.main.sft, apart)
            found["H2/pivotrl"] = joined_change(results, config.main.base, config.main.pivotrl, apart)
    if (arms := config.hypotheses) is not None:
        part: list[Part] = [(arms.domain, OWN)]
        found["H4/pivots"] = joined_change(results, arms.random_functional, arms.full, part)
        found["H4/reward"] = joined_change(results, arms.random_strict, arms.random_functional, part)
    return found


def _measured(key: str, found: Joined | None, corrected: Mapping[str, float]) -> Measured:
    if found is None:
        return Measured(key, _LABELS[key], joined_cell(None))
    # The tests stand in columns of their own, with Holm's correction beside them.
    tests = [{"name": one.name, "p": one.p, "n": one.n} for one in found.estimate.tests]
    cell = change_cell(replace(found.estimate, tests=()), found.sources)
    return Measured(key, _LABELS[key], replace(cell, details={**cell.details, "tests": tests}), corrected.get(key))


def joined_cell(found: Joined | None) -> Cell:
    """A change over several parts in points, or that it was not run."""
    return change_cell(None, ()) if found is None else change_cell(found.estimate, found.sources)


def _points(found: Joined | None) -> Interval | None:
    if found is None:
        return None
    interval = found.estimate.interval()
    return Interval(_PERCENT * interval.value, _PERCENT * interval.low, _PERCENT * interval.high, interval.n)


def _interval(cell: Cell) -> Interval | None:
    if cell.value is None or cell.low is None or cell.high is None:
        return None
    return Interval(cell.value, cell.low, cell.high, cell.n)


def _ratio(results: Results, cells: Mapping[str, Cell], kind: str) -> Cell:
    """The mean over domains; of the one domain where the specification has one. None where a domain lacks the curves of an arm."""
    efficiency = results.config.efficiency
    if efficiency is None:
        return missing_cell()
    if without := [name for name in efficiency.domains if f"figure1/{name}.{kind}/ratio" not in cells]:
        return missing_cell(f"not run on {', '.join(without)}")
    row = f"mean.{kind}" if len(efficiency.domains) > 1 else f"{next(iter(efficiency.domains))}.{kind}"
    return cells.get(f"figure1/{row}/ratio", missing_cell())


def arm_runs(results: Results, arm: str, domain: str) -> list[int]:
    """Seeds that an arm's runs are there for."""
    return sorted(seed for of, where, seed in results.runs if (of, where) == (arm, domain))


def _quarters(results: Results) -> tuple[list[float] | None, list[Cell]]:
    spread = results.config.spread
    nothing: list[Cell] = [missing_cell() for _ in _QUARTERS]
    if spread is None:
        return None, nothing
    domain = spread.domains[0]
    files: list[str] = []

    def stds(arm: str) -> dict[int, dict[float, float]]:
        places = {seed: results.runs[arm, domain, seed] / "train" / METRICS for seed in arm_runs(results, arm, domain)}
        paths = {seed: path for seed, path in places.items() if path.exists()}
        files.extend(results.read(path) for path in paths.values())
        return {seed: dict(numbers_by_step(path, REWARD_STD)) for seed, path in paths.items()}

    draws = Resampling(results.config.seed, f"std {domain}", domain, results.config.num_resamples)
    found = quarter_differences(stds(spread.pivots), stds(spread.random), draws)
    if found is None:
        return None, nothing
    return [one.value for one in found], [_std_cell(one, files) for one in found]


def _std_cell(interval: Interval, files: Sequence[str]) -> Cell:
    text = f"{interval.value:+.3f} [{interval.low:+.3f}, {interval.high:+.3f}] n={interval.n}"
    return number_cell(text, interval.value, unit="reward std", n=interval.n, sources=files, bounds=(interval.low, interval.high))


@dataclass(frozen=True, slots=True)
class Comparison:
    """Two arms without an expected order; p values are not corrected."""

    key: str
    label: str
    cell: Cell
    p_tasks: Cell
    p_seeds: Cell


def comparisons(results: Results) -> list[Comparison]:
    """The protocol's two-sided comparisons, in its order."""
    config = results.config
    found: list[Comparison] = []
    pairs: list[tuple[str, str, str, str, Sequence[str]]] = []
    every = [one.name for one in config.domains]
    if config.main is not None:
        pairs.append(("sft", "PivotRL - SFT", config.main.sft, config.main.pivotrl, every))
        if config.efficiency is not None:
            pairs.append(("end_to_end", "PivotRL - end-to-end RL", config.efficiency.end_to_end, config.main.pivotrl, every))
    for key, label, before, after, domains in pairs:
        titles = {one.name: one.title for one in config.domains}
        found += [_comparison(results, f"{key}.{name}", f"{label}, {titles[name]}", before, after, [name]) for name in domains]
        if len(domains) > 1:
            found.append(_comparison(results, f"{key}.mean", f"{label}, mean over domains", before, after, domains))
    if (arms := config.hypotheses) is not None:
        neighbours = ((arms.full, "full"), (arms.random_strict, "random + strict"))
        found += [
            _comparison(results, f"pivots_strict.{arm}", f"pivots + strict - {title}", arm, arms.pivots_strict, [arms.domain])
            for arm, title in neighbours
        ]
    if config.ablation is not None:
        first = config.ablation.rows[0]
        taken = set(arms.arms()) if arms is not None else set[str]()
        rows = [row for row in config.ablation.rows[1:] if row.arm not in taken | _main_arms(config)]
        found += [
            _comparison(results, f"ablation.{row.arm}", f"{row.title} - {first.title}", first.arm, row.arm, [config.ablation.domain]) for row in rows
        ]
    for one in config.sensitivities:
        points = [point for point in one.points if point.arm != one.reference]
        found += [
            _comparison(results, f"{one.name}.{point.arm}", f"{one.title} {point.value} - PivotRL", one.reference, point.arm, [one.domain])
            for point in points
        ]
    return found


def _main_arms(config: TablesConfig) -> set[str]:
    """Base, SFT and PivotRL, and the names that stand for some of their seeds."""
    if config.main is None:
        return set()
    runs = {(source.path.replace("{arm}", source.arm), source.checkpoint): set[str]() for source in config.results if isinstance(source, RunSource)}
    for source in config.results:
        if isinstance(source, RunSource):
            runs[source.path.replace("{arm}", source.arm), source.checkpoint].add(source.arm)
    main = {config.main.base, config.main.sft, config.main.pivotrl}
    return {arm for names in runs.values() if names & main for arm in names}


def _comparison(results: Results, key: str, label: str, before: str, after: str, domains: Sequence[str]) -> Comparison:
    joined = joined_change(results, before, after, [(domain, OWN) for domain in domains])
    if joined is None:
        return Comparison(key, label, missing_cell(), missing_cell("-"), missing_cell("-"))
    by_name = {test.name: test for test in joined.estimate.tests}
    shown = [by_name.get(f"permutation over {what}") for what in ("tasks", "seeds")]
    cells = [missing_cell("-") if test is None else p_cell(test.p, test.n, joined.sources) for test in shown]
    return Comparison(key, label, change_cell(replace(joined.estimate, tests=()), joined.sources), cells[0], cells[1])


def p_cell(p: float, n: int, sources: Sequence[str]) -> Cell:
    """A p value in a column of its own."""
    return number_cell(p_text(p), p, unit="p", n=n, sources=sources)


def p_text(p: float) -> str:
    """A p value in words, one digit more than beside a change."""
    return "<0.001" if p < 0.001 else f"{p:.4f}"
