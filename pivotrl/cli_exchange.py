"""Verbs of the command line that exchange data with other stacks: NeMo-Gym rows and their verdicts, NeMo-RL configurations, checkpoints.

Parses words; the work is imported when a verb runs. Part of cli.py's application.
"""

from __future__ import annotations

import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from pivotrl.cli_arguments import OverridesArgument, RecipeArgument, RunOption
from pivotrl.errors import UserError

EXIT_DISAGREES = 1

exchange = typer.Typer()


class Form(StrEnum):
    """A checkpoint's form."""

    hf = "hf"
    megatron = "megatron"


@exchange.command()
def verify(
    rows: Annotated[Path, typer.Argument(metavar="ROWS|RUN", help="NeMo-Gym rollouts (JSONL), or a profiled run.", show_default=False)],
    verifier: Annotated[str, typer.Option(metavar="V", help="Type of the verifier, as in a recipe.", show_default=False)],
    overrides: Annotated[list[str] | None, typer.Argument(metavar="[key=value]...", help="Settings of the verifier, values in YAML.")] = None,
    expected: Annotated[Path | None, typer.Option(metavar="FILE", help="Rows with the expert's actions, joined by uuid.")] = None,
    out: Annotated[Path | None, typer.Option("--json", metavar="OUT", help="Write the result to this file as well.")] = None,
) -> None:
    """Judge recorded actions again: agreement with their rewards. Exits 1 where a gym_* verifier differs from its grader."""
    from pivotrl.verbs.gym import run_verify

    if not run_verify(rows, verifier, overrides or [], expected=expected, out=out):
        sys.exit(EXIT_DISAGREES)


@exchange.command(name="import-gym")
def import_gym(
    files: Annotated[list[Path], typer.Argument(metavar="FILE...", help="Files or folders of NeMo-Gym rows (JSONL).", show_default=False)],
    out: Annotated[Path, typer.Option(metavar="DIR", help="Run directory to import into.", show_default=False)],
    tools: Annotated[Path | None, typer.Option(metavar="FILE", help="Tool list for rows that carry none.")] = None,
    held_out: Annotated[float, typer.Option("--held-out", metavar="FRAC", min=0, max=1, help="Share of tasks kept for validation.")] = 0.0,
) -> None:
    """NeMo-Gym pivot rows into DIR/ingest, every field kept in DIR/gym for export-gym."""
    from pivotrl.verbs.gym import run_import

    run_import(files, out, tools=tools, held_out_frac=held_out)


@exchange.command(name="export-gym")
def export_gym(
    source: Annotated[Path, typer.Argument(metavar="RUN|DIR", help="A run with selected pivots, or imported rows.", show_default=False)],
    out: Annotated[Path, typer.Option(metavar="FILE", help="JSONL file to write.", show_default=False)],
    agent: Annotated[str | None, typer.Option(metavar="NAME", help="Name for agent_ref; the row's or the domain's where not given.")] = None,
) -> None:
    """Selected pivots, or all imported rows, as NeMo-Gym rows that keep the published contract."""
    from pivotrl.verbs.gym import run_export

    run_export(source, out, agent=agent)


@exchange.command(name="export-nemo-rl")
def export_nemo_rl(
    recipe: RecipeArgument,
    out: Annotated[Path, typer.Option(metavar="DIR", help="Directory to write.", show_default=False)],
    overrides: OverridesArgument = None,
    run: RunOption = None,
) -> None:
    """The recipe as a NeMo-RL configuration, its pivots as NeMo-Gym rows, and what has no equivalent there."""
    from pivotrl import pipeline
    from pivotrl.verbs.nemo_rl import run_export_nemo_rl

    loaded = pipeline.load(recipe, overrides or [])
    run_export_nemo_rl(loaded, run or pipeline.default_run(loaded), out)


@exchange.command()
def convert(
    source: Annotated[Path, typer.Argument(metavar="SOURCE", help="Checkpoint directory.", show_default=False)],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="Directory to write; must not exist.", show_default=False)],
    source_form: Annotated[Form, typer.Option("--from", help="Form of SOURCE.", show_default=False)],
    out_form: Annotated[Form, typer.Option("--to", help="Form of OUT.", show_default=False)],
    verify: Annotated[bool, typer.Option("--verify", help="Read back, compare every tensor's bits, and logits with transformers' model.")] = False,
    config: Annotated[Path | None, typer.Option(metavar="DIR", help="Hugging Face directory that describes Megatron weights of elsewhere.")] = None,
    max_shard_gb: Annotated[float, typer.Option(metavar="GB", help="Largest safetensors file, 10**9 bytes.")] = 5.0,
) -> None:
    """A checkpoint between Hugging Face and megatron-core's distributed form, whole or not at all."""
    if source_form == out_form:
        raise UserError(f"--from and --to are both {source_form}", rule="a conversion changes the form", fix="give hf and megatron")
    from pivotrl.megatron import conversion

    request = conversion.Request(source, out, "hf" if out_form is Form.hf else "megatron", verify, config, round(max_shard_gb * 10**9))
    typer.echo(conversion.convert(request).summary())
