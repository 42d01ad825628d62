"""The verbs `verify`, `import-gym` and `export-gym`, wired: what the command line names, what is printed, where results lie.

The work is in pivotrl/gym/. Called by cli.py.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

from rich.console import Console
from rich.table import Table

from pivotrl.build_verifiers import build_verifier
from pivotrl.config.gym_verifiers import GymTerminusVerifierConfig
from pivotrl.config.load import load_verifier
from pivotrl.config.verifiers import CascadeStage, ComposeVerifierConfig, VerifierConfig
from pivotrl.errors import UserError
from pivotrl.gym.agreement import Agreement, compare, recorded_responses, recorded_rollouts
from pivotrl.gym.rows import Recorded
from pivotrl.progress import progress_bar
from pivotrl.rundir import Stage, write_json
from pivotrl.verifiers.protocol import Verifier

_FILE_WIDTH = 160
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
    if not isinstance(config, ComposeVerifierConfig):
        config = ComposeVerifierConfig(type="compose", stages=(CascadeStage(verifier=config, decides="both"),), undecided="infra")
    return build_verifier(config, expand=Path)


def _print_tables(agreement: Agreement) -> None:
    console = Console(width=None if sys.stdout.isatty() else _FILE_WIDTH)
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
