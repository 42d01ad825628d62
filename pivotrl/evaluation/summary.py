"""The table that closes a run: each suite before and after with its interval, what it cost in turns, where the report lies."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from rich.table import Table

from pivotrl.artifacts import CostManifest, DifferenceRow, Scores, SuiteRow, TurnsRow, read_artifact, read_artifact_lines
from pivotrl.evaluation.runner import REFERENCE, SCORES, TRAINED
from pivotrl.rundir import MANIFEST, Stage

_TITLES = {
    "world": "In-domain success, whole episodes",
    "environment": "In-domain reward, whole episodes",
    "held_out": "In-domain reward, single turns",
    "skills": "Out-of-domain skills",
}
_ORDER = ("world", "environment", "held_out", "skills")


def final_table(run: Path) -> Table:
    """The table of a finished run.

    Raises:
        UserError: where `eval` was not run.
    """
    scores = read_artifact(Stage.require(run, "eval") / SCORES, Scores)
    rows = {(row["name"], row["checkpoint"]): row for row in scores["suites"]}
    differences = {row["name"]: row for row in scores["differences"]}
    table = Table(
        "",
        "before",
        "after",
        "change (95 % interval)",
        "n",
        title="Result",
        title_justify="left",
        caption="\n".join([*_gains(differences), _caption(run)]),
        caption_justify="left",
    )
    for name in sorted({suite for suite, _ in rows}, key=lambda suite: (_ORDER.index(suite) if suite in _ORDER else len(_ORDER), suite)):
        before, after = rows.get((name, REFERENCE)), rows.get((name, TRAINED))
        n = max(row["n"] for row in (before, after) if row is not None)
        table.add_row(_TITLES.get(name, name), _score(before), _score(after), _change(differences.get(name)), str(n))
    return table


def turns_used(run: Path) -> dict[str, int]:
    """Assistant turns sampled to make the checkpoint: profiling and training. Validation and evaluation are not in it."""
    manifest = run / "profile" / MANIFEST
    profile = read_artifact(manifest, CostManifest)["summary"]["cost"]["turns"] if manifest.exists() else 0
    metrics = run / "train" / "metrics.jsonl"
    rows = read_artifact_lines(metrics, TurnsRow) if metrics.exists() else ()
    steps = [row["perf/env_turns/sum"] for row in rows if "perf/env_turns/sum" in row]
    return {"profiling": int(profile), "training": int(max(steps, default=0))}


def _caption(run: Path) -> str:
    turns = turns_used(run)
    used = f"Turns used: {sum(turns.values()):,} ({turns['profiling']:,} profiling + {turns['training']:,} training)"
    return f"{used}\nReport: {run / 'report' / 'index.html'}"


def _gains(differences: Mapping[str, DifferenceRow]) -> list[str]:
    """One line per suite of single turns: its change as format and decision."""
    return [
        f"{_TITLES.get(name, name)}: {gain['format']['value']:+.3f} from readable actions, {gain['decision']['value']:+.3f} from better ones"
        for name, row in differences.items()
        if (gain := row.get("gain")) is not None
    ]


def _score(row: SuiteRow | None) -> str:
    if row is None:
        return "not scored"
    return "none" if row["score"] is None else f"{row['score']:.3f}"


def _change(row: DifferenceRow | None) -> str:
    if row is None or row["difference"] is None:
        return "none"
    return f"{row['difference']:+.3f} ({_signed(row.get('low'))} to {_signed(row.get('high'))})"


def _signed(bound: float | None) -> str:
    return "none" if bound is None else f"{bound:+.3f}"
