"""`pivotrl report RUN`: one self-contained HTML page about a run, for whatever stages exist.

No script, no network, no font: the page carries a content policy that forbids them, and all text is escaped, so that a
completion that holds markup is shown and not run. Holds no clock: the same run gives the same page.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from pivotrl.errors import UserError
from pivotrl.observability import sections
from pivotrl.observability.conversation import step_examples
from pivotrl.observability.panels import Panel, pass_rate_panel, sft_panel, training_panels
from pivotrl.observability.parity_table import parity_table
from pivotrl.observability.readings import Readings, read_run
from pivotrl.observability.sinks import NON_FINITE
from pivotrl.pivots.statistics import Interval
from pivotrl.rundir import STAGES, atomic_write

PAGE = "index.html"
_PROFILE_RATES = (
    ("mean reward", "mean_reward"),
    ("malformed actions", "malformed_frac"),
    ("no action in the format", "absent_frac"),
    ("truncated", "truncated_frac"),
    ("infrastructure failures", "infra_frac"),
)


@dataclass(frozen=True, slots=True)
class Tile:
    """One headline number at the top of the page."""

    value: str
    label: str


def write_report(run: Path, out: Path) -> Path:
    """Writes index.html to the directory `out`, which is made, and returns its path.

    Raises:
        UserError: where `run` holds no stage, or a stage's file has a value of the wrong type.
    """
    if not any((run / stage).is_dir() for stage in STAGES):
        raise UserError(
            f"{run} holds no stage of a run", rule="a run directory has ingest, profile, ... below it", fix="name the directory given as --run"
        )
    page = render_page(read_run(run))
    out.mkdir(parents=True, exist_ok=True)
    atomic_write(out / PAGE, page.encode("utf-8", "backslashreplace"))
    return out / PAGE


def render_page(readings: Readings) -> str:
    """The page as text."""
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent / "templates"), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    return environment.get_template("report.html.j2").render(_context(readings))


def _context(readings: Readings) -> dict[str, Any]:
    headlines, cost = sections.headlines(readings), sections.cost(readings)
    parity = parity_table(readings)
    return {
        "name": readings.run.resolve().name,
        "stages": readings.stages,
        "tiles": _tiles(readings, headlines, cost),
        "headlines": headlines,
        "diagnostics": sections.diagnostics(readings.diagnostics),
        "funnel": sections.funnel(readings),
        "pass_rates": _marked(pass_rate_panel(readings)),
        "profile_rates": _profile_rates(readings),
        "selection": sections.selection_tables(readings.selection),
        "uninformative": readings.selection.child("uninformative_frac").interval(),
        "panels": [_marked(panel) for panel in training_panels(readings)],
        "sft_panel": _marked(sft_panel(readings)),
        "parity": parity,
        "parity_panels": [_marked(panel) for panel in parity.panels] if parity else [],
        "num_non_finite": readings.total(NON_FINITE),
        "cost": cost,
        "judging": readings.judging,
        "examples": step_examples(readings.run),
        "manifests": sections.manifests(readings),
        "pivot_provenance": sections.pivot_provenance(readings.selection),
        "rendering_note": sections.rendering_note(readings.selection),
        "versions": sections.versions(readings),
    }


def _marked(panel: Panel) -> Panel:
    """Tells the template that charts.py has escaped this markup itself."""
    return replace(panel, svg=Markup(panel.svg))


def _profile_rates(readings: Readings) -> list[tuple[str, Interval]]:
    summary = readings.stages["profile"].summary
    rates = ((label, summary.child(key).interval()) for label, key in _PROFILE_RATES)
    return [(label, interval) for label, interval in rates if interval is not None]


def _tiles(readings: Readings, headlines: list[sections.Headline], cost: list[sections.CostRow]) -> list[Tile]:
    compared = [(row.label, row.before, row.after) for row in headlines[:1] if row.before and row.after]
    tiles = [Tile(f"{before.value:.3f} \u2192 {after.value:.3f}", f"{label}, before and after") for label, before, after in compared]
    num_pivots = readings.selection.count("num_pivots")
    if num_pivots is not None:
        tiles.append(Tile(f"{num_pivots:,}", "pivots"))
    uninformative = readings.selection.child("uninformative_frac").number("value")
    if uninformative is not None:
        tiles.append(Tile(f"{100 * uninformative:.1f} %", "of turns teach nothing"))
    train = cost[1]
    if train.turns is not None:
        tiles.append(Tile(f"{train.turns + (cost[0].turns or 0):,}", "turns sampled, profiling included"))
    if train.completion_tokens and train.wasted_tokens is not None:
        tiles.append(Tile(f"{100 * train.wasted_tokens / train.completion_tokens:.1f} %", "of training tokens in groups without signal"))
    return tiles
