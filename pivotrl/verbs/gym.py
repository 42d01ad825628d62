"""The verbs `verify`, `import-gym` and `export-gym`, wired: what the command line names, what is printed, where results lie.

The work is in pivotrl/gym/. Called by cli.py.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from pivotrl.artifacts import Selection, read_artifact
from pivotrl.build_verifiers import build_verifier
from pivotrl.config.gym_verifiers import GymTerminusVerifierConfig
from pivotrl.config.load import load_verifier
from pivotrl.config.schema import IngestConfig
from pivotrl.config.verifiers import CascadeStage, ComposeVerifierConfig, FlippedVerifierConfig, VerifierConfig
from pivotrl.console import results_console
from pivotrl.errors import UserError
from pivotrl.gym.agreement import Agreement, compare, recorded_responses, recorded_rollouts
from pivotrl.gym.export import ExportRow, ingested_rows, selected_rows, write_export
from pivotrl.gym.kept_rows import STAGE, keep_rows
from pivotrl.gym.rows import Recorded
from pivotrl.identity import file_id
from pivotrl.pivots.dataset import SELECTION
from pivotrl.progress import progress_bar
from pivotrl.rundir import SUCCESS, Stage, output_hash, package_versions, source_commit, write_json
from pivotrl.trajectories.store import CANDIDATES
from pivotrl.verifiers.protocol import Verifier

_SHOWN_KINDS = 10


def run_verify(rows: Path, verifier: str, overrides: list[str], *, expected: Path | None, out: Path | None) -> bool:
    """Judges recorded actions again and prints the agreement, on its last line in one sentence.

    Args:
        rows: NeMo-Gym rollouts (JSONL), or a run that was profiled.
        out: file for the result as JSON.

    Returns:
        False where the verifier reproduces a public grader and gave another reward than the recorded one.

    Raises:
        UserError: where nothing could be compared, or the verifier's settings are wrong.
    """
    config = load_verifier(verifier, overrides)
    actions = recorded_rollouts(rows) if Stage.is_done(rows, "profile") else recorded_responses(rows, expected)
    with progress_bar("verify", None, "actions") as bar:
        agreement = compare(actions, _verifier_for(config), bar.advance)
    if out is not None:
        write_json(out, {"verifier": config.model_dump(mode="json"), "rows": rows.name, **agreement.result()})
    _print_tables(agreement)
    if not agreement.num_scored:
        reasons = ", ".join(f"{reason} ({count})" for reason, count in agreement.unscored.most_common(3)) or "there is no row"
        raise UserError(
            f"nothing of {rows} could be compared: {reasons}",
            rule="a row needs response, reward and the expert's action, and a verifier that decides",
            fix="name rollouts, join the expert's actions with --expected FILE, or set enable_llm_judge=false where a judge would decide",
        )
    interval = agreement.interval
    left_out = f", {agreement.unscored.total():,} not compared" if agreement.unscored else ""
    sys.stdout.write(
        f"agreement {interval.value:.4f} [{interval.low:.4f}, {interval.high:.4f}] of {verifier} with {interval.n:,} recorded rewards{left_out}\n"
    )
    return agreement.num_agreed == agreement.num_scored or not verifier.startswith("gym_")


def _verifier_for(config: VerifierConfig) -> Callable[[Recorded], Verifier]:
    """The verifier of one action: a terminal row's own threshold and harness override the settings."""
    built: dict[tuple[float | None, str | None], Verifier] = {}

    def verifier_for(one: Recorded) -> Verifier:
        key = (one.threshold, one.harness) if isinstance(config, GymTerminusVerifierConfig) else (None, None)
        if key not in built:
            own = {name: value for name, value in zip(("string_similarity_threshold", "harness"), key, strict=True) if value is not None}
            built[key] = _build(config.model_copy(update=own) if own else config)
        return built[key]

    return verifier_for


def _build(config: VerifierConfig) -> Verifier:
    """Unlike in a recipe, what a single verifier does not decide is left out, not given 0."""
    if not isinstance(config, ComposeVerifierConfig | FlippedVerifierConfig):
        config = ComposeVerifierConfig(type="compose", stages=(CascadeStage(verifier=config, decides="both"),), undecided="infra")
    return build_verifier(config, expand=Path)


def _print_tables(agreement: Agreement) -> None:
    console = results_console()
    if agreement.kinds:
        table = Table("recorded", "given", "reason", "actions", "first", title="disagreements", title_justify="left", box=None)
        for kind, count in agreement.kinds.most_common(_SHOWN_KINDS):
            table.add_row(f"{kind[0]:g}", f"{kind[1]:g}", kind[2], f"{count:,}", agreement.first[kind])
        console.print(table)
        if len(agreement.kinds) > _SHOWN_KINDS:
            console.print(f"and {len(agreement.kinds) - _SHOWN_KINDS} more kinds")
    if agreement.unscored:
        table = Table("reason", "actions", title="not compared", title_justify="left", box=None)
        for reason, count in agreement.unscored.most_common():
            table.add_row(reason, f"{count:,}")
        console.print(table)


def run_import(paths: Sequence[Path], out: Path, *, tools: Path | None, held_out_frac: float) -> None:
    """Ingests NeMo-Gym rows into OUT/ingest, as a recipe would, and keeps the rows themselves in OUT/gym.

    OUT is then a run directory: `profile` and `select` go on in it, `export-gym` gives the rows back.

    Raises:
        UserError: for a path that does not exist, or where no row was kept.
    """
    from pivotrl.trajectories.audit import audit_table
    from pivotrl.trajectories.ingest import ingest_inputs, run_ingest

    config = IngestConfig(
        paths=tuple(map(str, paths)),
        format="nemo_gym",
        tools=str(tools) if tools else None,
        held_out_frac=held_out_frac,
        # Rows of one trajectory share all but their last turns.
        near_duplicate_threshold=1.0,
    )
    inputs = ingest_inputs(config, paths)
    stage = Stage.open(out, "ingest", config=config.model_dump(mode="json"), inputs=inputs, seed=0)
    if not Stage.is_done(out, "ingest"):
        results_console().print(audit_table(run_ingest(stage, config, paths=paths, run_seed=0)))
    rows = Stage.open(out, STAGE, config={}, inputs={**inputs, "ingest": output_hash(stage.path)}, seed=0)
    if Stage.is_done(out, STAGE):
        sys.stderr.write(f"import-gym: finished before, kept ({out})\n")
        return
    summary = keep_rows(rows, paths, stage.path)
    sys.stdout.write(f"imported {', '.join(f'{count:,} rows {reason}' for reason, count in summary.items())}; {out}\n")


def run_export(source: Path, out: Path, *, agent: str | None) -> None:
    """Writes the selected pivots of a run, or all that was imported or ingested, as NeMo-Gym rows, with OUT.manifest.json beside them.

    Raises:
        UserError: where the source is neither, or no row keeps the contract.
    """
    rows, inputs, provenance = _export_source(source, agent)
    with progress_bar("export", None, "rows") as bar:
        counts = write_export(out, rows, bar.advance)
    if not counts.written:
        first = (
            counts.rows[0] if counts.rows else {"place": str(source), "what": "there is no row", "rule": "a row must be left", "fix": "import rows"}
        )
        raise UserError(f"no row of {source} can be exported; first, {first['place']}: {first['what']}", rule=first["rule"], fix=first["fix"])
    write_json(
        out.with_name(f"{out.name}.manifest.json"),
        {
            "output": {"file": out.name, "hash": file_id(out), "rows": counts.written},
            "inputs": inputs,
            "provenance": provenance,
            "left_out": dict(sorted(counts.left_out.items())),
            "rows_left_out": counts.rows,
            "commit": source_commit(),
            "versions": package_versions(),
        },
    )
    if counts.left_out:
        table = Table("what", "rows", "first", title="left out", title_justify="left", box=None)
        for what, count in counts.left_out.most_common(_SHOWN_KINDS):
            table.add_row(what, f"{count:,}", next((row["place"] for row in counts.rows if row["what"] == what), ""))
        results_console().print(table)
    sys.stdout.write(f"exported {counts.written:,} rows, {counts.left_out.total():,} left out; {out}\n")


def _export_source(source: Path, agent: str | None) -> tuple[Iterator[ExportRow], dict[str, str], Mapping[str, Any]]:
    """The rows to write, the hash of what they come from, and what profiled them."""
    if Stage.is_done(source, "select"):
        selection = read_artifact(source / "select" / SELECTION, Selection)
        return selected_rows(source, agent), {"select": output_hash(source / "select")}, selection["provenance"]
    ingest_dir = source / "ingest" if Stage.is_done(source, "ingest") else source
    if not (ingest_dir / SUCCESS).exists() or not (ingest_dir / CANDIDATES).exists():
        raise UserError(
            f"{source} is neither a run nor an ingest directory",
            rule="export-gym reads a run whose `select` is finished, an import-gym directory, or an ingest directory",
            fix="correct the path, or run `pivotrl select` first",
        )
    return ingested_rows(ingest_dir, source, agent), {"ingest": output_hash(ingest_dir)}, {}
