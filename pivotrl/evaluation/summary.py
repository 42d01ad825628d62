"""The table that closes a run: each suite before and after with its interval, what it cost in turns, where the report lies."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.table import Table

from pivotrl.evaluation.runner import REFERENCE, SCORES, TRAINED
from pivotrl.rundir import MANIFEST, Stage, read_json, read_jsonl

_TITLES = {"world": "In-domain success, whole episodes", "held_out": "In-domain reward, single turns", "skills": "Out-of-domain skills"}
_ORDER = ("world", "held_out", "skills")


def final_table(run: Path) -> Table:
    """The table of a finished run.

    Raises:
        UserError: where `eval` was not run.
    """
    scores = read_json(Stage.require(run, "eval") / SCORES)
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
    for name in sorted({suite for suite, _ in rows}, key=_ORDER.index):
        before, after = rows.get((name, REFERENCE)), rows.get((name, TRAINED))
        n = max(row["n"] for row in (before, after) if row is not None)
        table.add_row(_TITLES[name], _score(before), _score(after), _change(differences.get(name)), str(n))
    return table


def turns_used(run: Path) -> dict[str, int]:
    """Assistant turns sampled to make the checkpoint: profiling and training. Validation and evaluation are not in it."""
    manifest = run / "profile" / MANIFEST
    profile = read_json(manifest)["summary"]["cost"]["turns"] if manifest.exists() else 0
    metrics = run / "train" / "metrics.jsonl"
    steps = [row["perf/env_turns/sum"] for row in (read_jsonl(metrics) if metrics.exists() else ()) if "perf/env_turns/sum" in row]
    return {"profiling": int(profile), "training": int(max(steps, default=0))}


def _caption(run: Path) -> str:
    turns = turns_used(run)
    used = f"Turns used: {sum(turns.values()):,} ({turns['profiling']:,} profiling + {turns['training']:,} training)"
    return f"{used}\nReport: {run / 'report' / 'index.html'}"


def _gains(differences: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """One line per suite of single turns: its change as format and decision."""
    return [
        f"{_TITLES[name]}: {row['gain']['format']['value']:+.3f} from readable actions, {row['gain']['decision']['value']:+.3f} from better ones"
        for name, row in differences.items()
        if "gain" in row
    ]


def _score(row: Mapping[str, Any] | None) -> str:
    if row is None:
        return "not scored"
    return "none" if row["score"] is None else f"{row['score']:.3f}"


def _change(row: Mapping[str, Any] | None) -> str:
    return "none" if row is None or row["difference"] is None else f"{row['difference']:+.3f} ({row['low']:+.3f} to {row['high']:+.3f})"
