"""Figure 1 (what the same accuracy costs in turns and in wall time) and Figure 3 (reward std per batch), from run directories.

Pure but for reading the runs' files. A curve is the mean over seeds; intervals draw seeds with replacement, and tasks where the points list attempts.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from pivotrl.config.tables import Efficiency, Spread
from pivotrl.errors import UserError
from pivotrl.evaluation.tables.cells import Cell, Table, TableRow, missing_cell, number_cell, paper_cell
from pivotrl.evaluation.tables.curve_items import PointItems, resampled_curves
from pivotrl.evaluation.tables.paper import paper_note, paper_value
from pivotrl.evaluation.tables.scores import draws_of
from pivotrl.evaluation.tables.sources import OWN, Results
from pivotrl.identity import derive_seed
from pivotrl.observability.fields import Fields, read_lines, read_object
from pivotrl.observability.sinks import METRICS
from pivotrl.observability.sinks import TIMING as STEP_TIMING
from pivotrl.pivots.statistics import BOUNDS, Interval, cluster_bootstrap_interval
from pivotrl.rundir import MANIFEST, TIMING

SPANS = ("time/rollout_s/sum", "time/train_s/sum", "time/sync_s/sum")
REWARD_STD = "rollout/reward/std"
_PARTS = 5

type Matrix = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class ArmCurve:
    """An arm on one domain: its runs on one grid of steps, and what profiling cost. A run that ended early stays where it ended."""

    accuracy_S_T: Matrix
    turns_S_T: Matrix
    """Turns sampled in training before the step."""
    wall_S_T: Matrix
    """Seconds of training before the step."""
    profile_turns: float
    """Mean over runs; 0 where the arm needs no profile."""
    profile_wall_s: float
    files: tuple[str, ...]
    items: tuple[tuple[PointItems, ...], ...] | None = None
    """Attempts by run and point; None where a point lists none."""

    def paid(self, kind: str) -> Matrix:
        """Turns or seconds by run and step, profiling included where the kind says so."""
        if kind.startswith("turns"):
            return self.turns_S_T + (self.profile_turns if kind.endswith("profiled") else 0.0)
        return self.wall_S_T + (self.profile_wall_s if kind.endswith("profiled") else 0.0)


@dataclass(frozen=True, slots=True)
class Line:
    """One line of a figure: the mean over seeds and its band."""

    name: str
    points: tuple[tuple[float, float], ...]
    band: tuple[tuple[float, float, float], ...]
    """(x, smallest, largest) over seeds; empty for one seed."""


@dataclass(frozen=True, slots=True)
class Figure:
    """One figure of one or two panels side by side."""

    key: str
    title: str
    y_label: str
    panels: tuple[tuple[str, tuple[Line, ...]], ...]
    """(x label, lines)."""
    caption: str


def efficiency_parts(results: Results, config: Efficiency) -> tuple[Table, list[Figure]]:
    """The table of costs at the matched accuracy, with profiling counted and not, and one figure per domain.

    Raises:
        UserError: where an arm has no run directory, or a run no curve.
    """
    rows: list[TableRow] = []
    figures: list[Figure] = []
    ratios: dict[str, list[tuple[float, Matrix, int, tuple[str, ...]]]] = {}
    has_items = True
    for name in config.domains:
        domain = results.domain(name)
        pivotrl = _arm_curve(results, config.pivotrl, name, config.curve, counts_profile=True)
        end_to_end = _arm_curve(results, config.end_to_end, name, config.curve, counts_profile=False)
        files = (*pivotrl.files, *end_to_end.files)
        arms = (pivotrl, end_to_end)
        has_items = has_items and all(arm.items is not None for arm in arms)
        even = [_weighted(arm, np.full((1, len(arm.turns_S_T)), 1 / len(arm.turns_S_T))) for arm in arms]
        target = float(_matched(even)[0])
        drawn = _resampled(results, arms, name)
        n = sum(len(arm.turns_S_T) for arm in arms)
        for kind, what, unit in _COSTS:
            costs = [float(cost[0]) for cost in _costs(arms, even, kind)]
            first_R, second_R = _costs(arms, drawn, kind)
            ratio, draws_R = float(_ratio(even, np.array(costs[:1]), np.array(costs[1:]))[0]), _ratio(drawn, first_R, second_R)
            ratios.setdefault(kind, []).append((ratio, draws_R, n, files))
            drawn_costs = zip(costs, (first_R, second_R), arms, strict=True)
            cells = [_cost_cell(cost, draws, unit, len(arm.turns_S_T), arm.files) for cost, draws, arm in drawn_costs]
            label = f"{domain.title}, {what} to {100 * target:.1f} %"
            rows.append(TableRow(f"{name}.{kind}", label, (*cells, _ratio_cell(ratio, draws_R, n, files), *_paper_cells(kind, domain.paper))))
        figures.append(_efficiency_figure(name, domain.title, {"PivotRL": pivotrl, "end-to-end RL": end_to_end}, target))
    if len(config.domains) > 1:
        rows += [_mean_ratio_row(kind, what, ratios[kind], config.domains) for kind, what, _ in _COSTS]
    columns = (("pivotrl", "PivotRL"), ("end_to_end", "end-to-end RL"), ("ratio", "PivotRL / end-to-end"))
    columns += (("paper.pivotrl", "paper: PivotRL"), ("paper.end_to_end", "paper: end-to-end"), ("paper.ratio", "paper: ratio"))
    caption = (
        "What the lower of the two final accuracies costs: the first point of the mean curve over seeds that reaches it, between measured points by "
        "a straight line. Turns: sampled assistant turns of training. Wall time: rollout, update and weight hand-over, without validation. "
        f"Brackets: 95 % interval over {'tasks and seeds' if has_items else 'seeds'}; n: runs."
    )
    return Table("figure1", "Figure 1: cost of the same accuracy", caption, "cost", columns, tuple(rows), (paper_note("figure1"),)), figures


def spread_parts(results: Results, config: Spread) -> tuple[Table, list[Figure]]:
    """The table of reward std early and late, and one figure per domain.

    Raises:
        UserError: where an arm has no run directory.
    """
    rows: list[TableRow] = []
    figures: list[Figure] = []
    for name in config.domains:
        domain = results.domain(name)
        pivots, random = (_std_runs(results, arm, name) for arm in (config.pivots, config.random))
        files = (*pivots[1], *random[1])
        cells = [_std_cell(results, name, runs, own, is_late=is_late) for runs, own in (pivots, random) for is_late in (False, True)]
        mean_of_pivots, mean_of_random = (dict(_mean_line(runs)) for runs, _ in (pivots, random))
        shared = sorted(mean_of_pivots.keys() & mean_of_random.keys())
        above = sum(mean_of_pivots[step] > mean_of_random[step] for step in shared)
        text = f"{above} of {len(shared)}"
        cells.append(number_cell(text, above / len(shared), unit="share", n=len(shared), sources=files) if shared else missing_cell())
        rows.append(TableRow(name, domain.title, tuple(cells)))
        lines = tuple(_line(label, runs) for label, (runs, _) in (("pivots", pivots), ("random turns", random)))
        caption = f"Mean within-group std of the reward, {domain.title}; band: smallest and largest over seeds."
        figures.append(Figure(f"figure3_{name}", f"Figure 3: reward spread, {domain.title}", "reward std", (("optimizer step", lines),), caption))
    columns = (
        ("pivots.early", "pivots, first fifth"),
        ("pivots.late", "pivots, last fifth"),
        ("random.early", "random turns, first fifth"),
        ("random.late", "random turns, last fifth"),
        ("above", "steps where pivots' is larger"),
    )
    caption = "Mean within-group std of the reward per batch. Brackets: 95 % interval over seeds (over steps where there is one seed); n: batches."
    return Table("figure3", "Figure 3: reward spread", caption, "domain", columns, tuple(rows)), figures


# (key, words, unit): what is compared at the matched accuracy.
_COSTS = (
    ("turns", "turns", "turns"),
    ("turns_profiled", "turns, profiling counted", "turns"),
    ("wall", "wall time", "s"),
    ("wall_profiled", "wall time, profiling counted", "s"),
)


def _arm_curve(results: Results, arm: str, domain: str, curve: str, *, counts_profile: bool) -> ArmCurve:
    runs = _runs(results, arm, domain, "figure 1")
    measured = [_measured(run, curve) for run in runs]
    profiled: list[tuple[float, float]] = []
    files: list[str] = []
    for run in runs:
        read = [run / curve, run / "train" / METRICS, run / "train" / STEP_TIMING]
        if counts_profile:
            manifest, timing = run / "profile" / MANIFEST, run / "profile" / TIMING
            spent = read_object(manifest, name=str(manifest)).child("summary").child("cost").number("turns")
            profiled.append((spent or 0.0, read_object(timing, name=str(timing)).number("wall_s") or 0.0))
            read += [manifest, timing]
        files += _read_all(results, read)
    start = max(points[0][0] for points in measured)
    steps = sorted({point[0] for points in measured for point in points if point[0] >= start})
    reached = [[max((point for point in points if point[0] <= step), key=lambda point: point[0]) for step in steps] for points in measured]
    accuracy = np.array([[point[1] for point in row] for row in reached])
    turns, wall = np.array([[point[2] for point in row] for row in reached]), np.array([[point[3] for point in row] for row in reached])
    means = [math.fsum(part) / len(profiled) for part in zip(*profiled, strict=True)] if profiled else [0.0, 0.0]
    rows = [[point[4] for point in row] for row in reached]
    items = tuple(map(tuple, rows)) if all(all(row) for row in rows) else None
    return ArmCurve(accuracy, turns, wall, means[0], means[1], tuple(files), items)


def _measured(run: Path, curve: str) -> list[tuple[float, float, float, float, PointItems]]:
    """(step, accuracy, turns before, seconds before, attempts) of one run, by step.

    Raises:
        UserError: where the run has no curve.
    """
    accuracies = [point for row in read_lines(run / curve, name=str(run / curve)) for point in _point(row)]
    if not accuracies:
        raise UserError(
            f"{run} has no accuracy curve in {curve}",
            rule="figure 1 reads rows {step, value} from it",
            fix="train with `validation`, or name another file as efficiency.curve",
        )
    turns = numbers_by_step(run / "train" / METRICS, "perf/env_turns/sum")
    spans = [(step, sum(row.number(span) or 0.0 for span in SPANS)) for step, row in _steps(run / "train" / STEP_TIMING)]
    return [
        (step, value, max((count for at, count in turns if at < step), default=0.0), math.fsum(seconds for at, seconds in spans if at < step), items)
        for step, value, items in sorted(accuracies, key=lambda point: point[0])
    ]


def _runs(results: Results, arm: str, domain: str, what: str) -> list[Path]:
    runs = [run for (of, where, _), run in sorted(results.runs.items()) if (of, where) == (arm, domain)]
    if not runs:
        raise UserError(
            f"{what} names the arm {arm!r} on {domain}, which has no run directory",
            rule="it reads metrics of training",
            fix="give that arm a source of type `run`, or drop the domain",
        )
    return runs


def _read_all(results: Results, files: Sequence[Path]) -> list[str]:
    return [results.read(file) for file in files if file.exists()]


def _point(row: Fields) -> list[tuple[float, float, PointItems]]:
    step, value = row.number("step"), row.number("value")
    return [] if step is None or value is None else [(step, value, [item.values for item in row.children("items")])]


def _steps(file: Path) -> list[tuple[float, Fields]]:
    return [(step, row) for row in read_lines(file, name=str(file)) if (step := row.number("step")) is not None]


def numbers_by_step(file: Path, metric: str) -> list[tuple[float, float]]:
    """(step, value) of one column of a run's metrics; empty where there is none."""
    return [(step, value) for step, row in _steps(file) if (value := row.number(metric)) is not None]


type _Drawn = list[tuple[Matrix, Matrix]]
"""Per arm the mean curves [R, T] and the weights of the runs [R, S] that they are means under."""


def _weighted(arm: ArmCurve, weights_R_S: Matrix) -> tuple[Matrix, Matrix]:
    return _mean_under(weights_R_S, arm.accuracy_S_T), weights_R_S


def _mean_under(weights_R_S: Matrix, values_S_T: Matrix) -> Matrix:
    """[R, T] of the seeds' mean under weights, added in the order of seeds: a matrix product's last bit, which can decide a printed digit where a
    mean lies between two, depends on the processor.
    """
    return (weights_R_S[:, :, None] * values_S_T).sum(axis=1)


def _resampled(results: Results, arms: Sequence[ArmCurve], domain: str) -> _Drawn:
    """Tasks and seeds are drawn where every point lists its attempts, else seeds alone, each arm's by themselves."""
    listed = [arm.items for arm in arms if arm.items is not None]
    if len(listed) == len(arms):
        return resampled_curves(listed, draws_of(results, domain, OWN))
    generator = np.random.Generator(np.random.PCG64(derive_seed(results.config.seed, "tables", "curves", domain)))
    sizes = [len(arm.turns_S_T) for arm in arms]
    drawn = [generator.multinomial(size, np.full(size, 1 / size), size=results.config.num_resamples) / size for size in sizes]
    return [_weighted(arm, weights_R_S) for arm, weights_R_S in zip(arms, drawn, strict=True)]


def _matched(drawn: _Drawn) -> Matrix:
    """[R] the lower of the arms' final accuracies."""
    return np.min([accuracy_R_T[:, -1] for accuracy_R_T, _ in drawn], axis=0)


def _costs(arms: Sequence[ArmCurve], drawn: _Drawn, kind: str) -> list[Matrix]:
    """[R] per arm: what its mean curve paid when it first reached the matched accuracy."""
    target_R = _matched(drawn)
    return [
        first_reach(accuracy_R_T, _mean_under(weights_R_S, arm.paid(kind)), target_R)
        for arm, (accuracy_R_T, weights_R_S) in zip(arms, drawn, strict=True)
    ]


def first_reach(accuracy_R_T: Matrix, paid_R_T: Matrix, target_R: Matrix) -> Matrix:
    """[R] the cost at which a curve first reaches its target, on the straight line between two points; infinite where it never does.

    >>> first_reach(np.array([[0.2, 0.6]]), np.array([[0.0, 100.0]]), np.array([0.4])).tolist()
    [50.0]
    """
    # A mean of equal numbers may differ from them in the last bit.
    reached_R_T = accuracy_R_T >= target_R[:, None] - 1e-12
    at_R = reached_R_T.argmax(axis=1)
    before_R, rows = np.maximum(at_R - 1, 0), np.arange(len(at_R))
    low_R, high_R = accuracy_R_T[rows, before_R], accuracy_R_T[rows, at_R]
    share_R = np.where(high_R > low_R, (target_R - low_R) / np.where(high_R > low_R, high_R - low_R, 1.0), 1.0)
    cost_R = paid_R_T[rows, before_R] + np.clip(share_R, 0.0, 1.0) * (paid_R_T[rows, at_R] - paid_R_T[rows, before_R])
    return np.where(reached_R_T.any(axis=1), cost_R, np.inf)


def _ratio(drawn: _Drawn, cost_R: Matrix, other_R: Matrix) -> Matrix:
    """NaN where an arm already starts at the matched accuracy: it costs that arm nothing."""
    starts_R = np.max([accuracy_R_T[:, 0] for accuracy_R_T, _ in drawn], axis=0)
    is_defined_R = (_matched(drawn) > starts_R + 1e-12) & (other_R > 0)
    return np.where(is_defined_R, cost_R / np.where(other_R > 0, other_R, 1.0), np.nan)


def _cost_cell(cost: float, draws_R: Matrix, unit: str, n: int, files: Sequence[str]) -> Cell:
    if not math.isfinite(cost):
        return missing_cell("never reached")
    low, high = _bounds(draws_R)
    shown = [f"{value:,.0f}" if unit == "turns" else f"{value:,.1f}" for value in (cost, low, high)]
    text = f"{shown[0]} [{shown[1]}, {shown[2]}]{'' if unit == 'turns' else ' s'} n={n}"
    return number_cell(text, cost, unit=unit, n=n, sources=files, bounds=(low, high))


def _ratio_cell(ratio: float, draws_R: Matrix, n: int, files: Sequence[str], undefined: str = "an arm starts there") -> Cell:
    if not math.isfinite(ratio):
        return missing_cell(f"not defined: {undefined}")
    low, high = _bounds(draws_R)
    cell = number_cell(f"{ratio:.2f} [{low:.2f}, {high:.2f}] n={n}", ratio, unit="ratio", n=n, sources=files, bounds=(low, high))
    return replace(cell, details={"defined_frac": float(np.mean(np.isfinite(draws_R)))})


def _bounds(draws_R: Matrix) -> tuple[float, float]:
    """95 % of the resamples in which the number exists."""
    finite = draws_R[np.isfinite(draws_R)]
    if not len(finite):
        return math.nan, math.nan
    low, high = np.quantile(finite, BOUNDS)
    return float(low), float(high)


def _mean_ratio_row(kind: str, what: str, found: Sequence[tuple[float, Matrix, int, tuple[str, ...]]], domains: Sequence[str]) -> TableRow:
    """The mean of the domains' ratios; not defined where one of them is not."""
    ratio, undefined = math.fsum(one[0] for one in found) / len(found), [name for name, one in zip(domains, found, strict=True) if math.isnan(one[0])]
    draws_R, n, files = np.mean([one[1] for one in found], axis=0), sum(one[2] for one in found), [file for one in found for file in one[3]]
    cell = _ratio_cell(ratio, draws_R, n, files, f"an arm starts there on {', '.join(undefined)}")
    return TableRow(f"mean.{kind}", f"mean over domains, {what}", (missing_cell("-"), missing_cell("-"), cell, *_paper_cells(kind, None)), True)


def _paper_cells(kind: str, benchmark: str | None) -> tuple[Cell, Cell, Cell]:
    """The paper's figure is of one benchmark, without profiling."""
    is_published = benchmark == "SWE-bench Verified" and not kind.endswith("profiled")
    turns = [paper_value("figure1", "turns" if is_published and kind == "turns" else None, name) for name in ("pivotrl", "end_to_end")]
    return paper_cell(turns[0]), paper_cell(turns[1]), paper_cell(paper_value("figure1_ratio", kind if is_published else None, "ratio"))


def _efficiency_figure(name: str, title: str, arms: Mapping[str, ArmCurve], target: float) -> Figure:
    panels: list[tuple[str, tuple[Line, ...]]] = []
    for label, kind in (("turns sampled in training", "turns"), ("wall time of training, s", "wall")):
        lines: list[Line] = []
        for arm, curve in arms.items():
            x_T, accuracy_T = curve.paid(kind).mean(axis=0), curve.accuracy_S_T.mean(axis=0)
            low_T, high_T = curve.accuracy_S_T.min(axis=0), curve.accuracy_S_T.max(axis=0)
            band = tuple(zip(x_T.tolist(), low_T.tolist(), high_T.tolist(), strict=True)) if len(curve.turns_S_T) > 1 else ()
            lines.append(Line(arm, tuple(zip(x_T.tolist(), accuracy_T.tolist(), strict=True)), band))
        panels.append((label, tuple(lines)))
    caption = f"Accuracy against cost, {title}; profiling not counted; both arms reach {100 * target:.1f} %. Band: smallest and largest over seeds."
    return Figure(f"figure1_{name}", f"Figure 1: accuracy and cost, {title}", "accuracy", tuple(panels), caption)


type _StdRuns = tuple[tuple[tuple[tuple[float, float], ...], ...], tuple[str, ...]]


def _std_runs(results: Results, arm: str, domain: str) -> _StdRuns:
    runs = _runs(results, arm, domain, "figure 3")
    files = [run / "train" / METRICS for run in runs]
    return tuple(tuple(numbers_by_step(file, REWARD_STD)) for file in files), tuple(_read_all(results, files))


def _mean_line(runs: Sequence[Sequence[tuple[float, float]]]) -> list[tuple[float, float]]:
    by_step: dict[float, list[float]] = {}
    for run in runs:
        for step, value in run:
            by_step.setdefault(step, []).append(value)
    return [(step, math.fsum(values) / len(values)) for step, values in sorted(by_step.items()) if len(values) == len(runs)]


def _line(name: str, runs: Sequence[Sequence[tuple[float, float]]]) -> Line:
    mean = _mean_line(runs)
    at = {step: [value for run in runs for where, value in run if where == step] for step, _ in mean}
    band = tuple((step, min(at[step]), max(at[step])) for step, _ in mean) if len(runs) > 1 else ()
    return Line(name, tuple(mean), band)


def _std_cell(results: Results, domain: str, runs: Sequence[Sequence[tuple[float, float]]], files: Sequence[str], *, is_late: bool) -> Cell:
    """Mean std of the first or last fifth of every run's batches."""
    rows: list[tuple[float, str]] = []
    for index, run in enumerate(runs):
        size = math.ceil(len(run) / _PARTS)
        part = run[len(run) - size :] if is_late else run[:size]
        rows += [(value, str(index) if len(runs) > 1 else str(step)) for step, value in part]
    if not rows:
        return missing_cell()
    seed = derive_seed(results.config.seed, "tables", "spread", domain)
    interval: Interval = cluster_bootstrap_interval([value for value, _ in rows], [cluster for _, cluster in rows], seed=seed)
    text = f"{interval.value:.3f} [{interval.low:.3f}, {interval.high:.3f}] n={interval.n}"
    return number_cell(text, interval.value, unit="reward std", n=interval.n, sources=files, bounds=(interval.low, interval.high))
