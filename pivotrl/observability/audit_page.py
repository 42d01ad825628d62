"""The page and the tables of `pivotrl audit`: what a verifier accepts, from audit.json's content alone.

Same rules as the report: one self-contained page without script or network, all text escaped, n and 95 % intervals at every share.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from rich.table import Table

from pivotrl.console import results_console
from pivotrl.rundir import atomic_write

PAGE = "index.html"
_FILE_WIDTH = 140
_MAX_TOOLS = 60


def write_page(out: Path, result: Mapping[str, Any]) -> Path:
    """Writes index.html to the existing directory `out` and returns its path.

    Args:
        result: what `Audit.result` gives, with `verifier`, `against`, `data`, `limit` and `domain`.
    """
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent / "templates"), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    page = environment.get_template("audit.html.j2").render(
        audit=result,
        equivalents=_of(result, "equivalent"),
        corruptions=_of(result, "corruption"),
        tools=result["tools"][:_MAX_TOOLS],
        num_more_tools=max(0, len(result["tools"]) - _MAX_TOOLS),
        num_turns=sum(row["n"] for row in result["turns"]),
        settings=_settings(result),
        tiles=_tiles(result),
    )
    atomic_write(out / PAGE, page.encode("utf-8", "backslashreplace"))
    return out / PAGE


def print_audit(result: Mapping[str, Any]) -> None:
    """The audit as tables on stdout; the last line states the expert's acceptance."""
    console = results_console(file_width=_FILE_WIDTH)
    console.print(_mutation_table("Equivalents: to be accepted", _of(result, "equivalent")))
    console.print(_mutation_table("Corruptions: to be rejected", _of(result, "corruption")))
    if result["labelled"] is not None:
        console.print(_labelled_table(result["labelled"]))
    if result["agreement"] is not None:
        console.print(_agreement_table(result["agreement"]))
    latency = result["latency"]
    if latency["n"]:
        for name in ("processor", "wall"):
            one = latency[name]
            console.print(f"{name} time: p50 {_ms(one['p50_s'])}, p99 {_ms(one['p99_s'])}, slowest {_ms(one['max_s'])}")
    for reason, count in result["expert"]["quarantined"].items():
        console.print(f"quarantined: {count:,} ({reason})", markup=False)
    for row in result["expert"]["rejected"][:10]:
        console.print(f"expert rejected: {row['id']} of {row['source']}: {row['reason']}", markup=False)
    console.print(f"expert actions accepted: {_share(result['expert']['accepted'])}, rejected: {result['expert']['num_rejected']:,}")


def _of(result: Mapping[str, Any], label: str) -> list[Mapping[str, Any]]:
    return [row for row in result["mutations"] if row["label"] == label]


def _mutation_table(title: str, rows: Iterable[Mapping[str, Any]]) -> Table:
    table = Table("mutation", "accepted", "infra", "most frequent reason", title=title, title_justify="left")
    for row in rows:
        reason = next(iter(row["reasons"]), "")
        table.add_row(row["name"], _share(row["accepted"]), f"{row['infra']:,}", reason)
    return table


def _labelled_table(labelled: Mapping[str, Any]) -> Table:
    table = Table("pairs", "precision", "recall", "false accepts", "false rejects", title="Labelled pairs", title_justify="left")
    rows = [*labelled["by_domain"].items(), ("all", labelled["all"]), ("needs a judge (not in all)", labelled["needs_judge"])]
    for name, row in rows:
        table.add_row(name, _share(row["precision"]), _share(row["recall"]), f"{row['false_accepts']:,}", f"{row['false_rejects']:,}")
    return table


def _agreement_table(rows: Iterable[Mapping[str, Any]]) -> Table:
    table = Table("actions", "same verdict", "only this accepts", "only the other accepts", title="Against the second verifier", title_justify="left")
    for row in rows:
        table.add_row(row["kind"], _share(row["same"]), f"{row['only_this']:,}", f"{row['only_against']:,}")
    return table


def _share(interval: Mapping[str, Any]) -> str:
    if interval["value"] is None:
        return "-"
    return f"{100 * interval['value']:.2f} % [{100 * interval['low']:.1f}, {100 * interval['high']:.1f}] n={interval['n']:,}"


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:.3f} ms"


def _settings(result: Mapping[str, Any]) -> list[tuple[str, str]]:
    rows = [("data", str(result["data"])), *[(f"verifier.{key}", str(value)) for key, value in result["verifier"].items()]]
    rows += [(f"against.{key}", str(value)) for key, value in (result["against"] or {}).items()]
    return rows + [(key, str(result[key])) for key in ("limit", "domain") if result[key] is not None]


def _tiles(result: Mapping[str, Any]) -> list[tuple[str, str]]:
    tiles = [(_percent(result["expert"]["accepted"]), "of expert actions accepted")]
    tiles += [
        (_percent(_pooled(_of(result, label))), meaning)
        for label, meaning in (("equivalent", "of equivalent rewritings accepted"), ("corruption", "of corruptions accepted"))
    ]
    if result["labelled"] is not None:
        tiles += [(_percent(result["labelled"]["all"][name]), f"{name} on labelled pairs") for name in ("precision", "recall")]
    if result["latency"]["n"]:
        tiles.append((_ms(result["latency"]["processor"]["p99_s"]), "99th percentile of a verdict's processor time"))
    return tiles


def _pooled(rows: Iterable[Mapping[str, Any]]) -> Mapping[str, Any]:
    """All rows of a table as one share, without an interval: mutations of one turn are not independent."""
    shares = [row["accepted"] for row in rows if row["accepted"]["value"] is not None]
    n = sum(share["n"] for share in shares)
    return {"value": sum(share["value"] * share["n"] for share in shares) / n if n else None}


def _percent(interval: Mapping[str, Any]) -> str:
    return "-" if interval["value"] is None else f"{100 * interval['value']:.2f} %"
