"""The `pivotrl` command: `pivotrl VERB RECIPE [--run RUN] [key=value ...]`.

Parses words and prints results; the work is in pipeline.py, imported only when a verb runs, so that `pivotrl --help` is
quick and loads no torch. User errors exit 2 on one line; a stage stopped by its infrastructure limit exits 3, one that was asked to stop 75;
`doctor` exits 1 where a recipe must not be submitted, `audit` where a verifier rejects an expert's action, `verify` where a compatibility
verifier disagrees with its grader.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from pivotrl.cli_arguments import OverridesArgument, RecipeArgument, RunOption
from pivotrl.cli_exchange import EXIT_DISAGREES, exchange
from pivotrl.errors import EXIT_INFRA, EXIT_STOPPED, InfraLimitError, StopRequestedError, fail, user_errors_end

_PROGRAM = "pivotrl"
EXIT_BUG = 1
EXIT_UNFIT = 1
EXIT_INTERRUPTED = 130

app = typer.Typer(
    name=_PROGRAM,
    help="PivotRL: mine pivots from expert trajectories, score them by function, train with GRPO on megatron-core.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)


LaunchedArgument = Annotated[Path, typer.Argument(metavar="RUN", help="Run directory of `pivotrl launch`.", show_default=False)]


def _stage(name: str, recipe: Path, run: Path | None, overrides: list[str] | None) -> None:
    from pivotrl import pipeline

    loaded = pipeline.load(recipe, overrides or [])
    pipeline.run_stage(name, loaded, run or pipeline.default_run(loaded))


@app.command()
def ingest(
    paths: Annotated[list[str], typer.Argument(metavar="RECIPE|PATHS...", help="A recipe folder, or files and folders of trajectories.")],
    run: RunOption = None,
    out: Annotated[Path | None, typer.Option(metavar="DIR", help="Output directory; with it, the words are paths rather than a recipe.")] = None,
    format: Annotated[str, typer.Option(metavar="auto|NAME", help="Adapter name, or auto to detect it per file.")] = "auto",  # noqa: A002
    tools: Annotated[Path | None, typer.Option(metavar="FILE", help="Tool list for sources that carry none.")] = None,
) -> None:
    """Trajectories in any supported format to trajectories.parquet, candidates.parquet and audit.json."""
    if out is None:
        _stage("ingest", Path(paths[0]), run, paths[1:])
        return
    from pivotrl import pipeline

    pipeline.ingest_paths([Path(path) for path in paths], out, format_name=format, tools=tools)


@app.command()
def profile(
    recipe: RecipeArgument,
    overrides: OverridesArgument = None,
    run: RunOption = None,
    shard: Annotated[str | None, typer.Option(metavar="I/N", help="Profile part I (from 0) of N alone; a call without it merges.")] = None,
    estimate: Annotated[int | None, typer.Option(metavar="N", min=1, help="Print what it would take, from N candidates; write nothing.")] = None,
) -> None:
    """K local rollouts of the frozen reference policy per candidate (Eq. 4)."""
    if shard is None and estimate is None:
        _stage("profile", recipe, run, overrides)
        return
    from pivotrl import pipeline
    from pivotrl.verbs.profile import print_estimate, run_shard

    loaded = pipeline.load(recipe, overrides or [])
    run = run or pipeline.default_run(loaded)
    if estimate is not None:
        print_estimate(estimate, loaded, run)
    elif shard is not None:
        run_shard(shard, loaded, run)


@app.command()
def select(recipe: RecipeArgument, overrides: OverridesArgument = None, run: RunOption = None) -> None:
    """Keep the turns whose outcome varies and is still hard (Eq. 5)."""
    _stage("select", recipe, run, overrides)


@app.command()
def sft(recipe: RecipeArgument, overrides: OverridesArgument = None, run: RunOption = None) -> None:
    """Supervised training on expert turns (Eq. 1): makes the reference policy."""
    _stage("sft", recipe, run, overrides)


@app.command()
def train(recipe: RecipeArgument, overrides: OverridesArgument = None, run: RunOption = None) -> None:
    """GRPO on the selected pivots (Eq. 7)."""
    _stage("train", recipe, run, overrides)


@app.command()
def reprofile(recipe: RecipeArgument, overrides: OverridesArgument = None, run: RunOption = None) -> None:
    """Profile and select again with the policy of an interrupted train's last checkpoint; train goes on with the new pivots."""
    from pivotrl import pipeline
    from pivotrl.verbs.reprofile import run_reprofile

    loaded = pipeline.load(recipe, overrides or [])
    run_reprofile(loaded, run or pipeline.default_run(loaded))


@app.command()
def lineage(run: Annotated[Path, typer.Argument(metavar="RUN", help="A run directory.", show_default=False)]) -> None:
    """Every pivot set of a run: the policy that made it, and the steps that learned from it."""
    from pivotrl.verbs.reprofile import print_lineage

    print_lineage(run)


@app.command(name="eval")
def evaluate(recipe: RecipeArgument, overrides: OverridesArgument = None, run: RunOption = None) -> None:
    """Scores of the reference and the trained checkpoint, with intervals."""
    _stage("eval", recipe, run, overrides)


@app.command()
def report(
    run_or_recipe: Annotated[Path, typer.Argument(metavar="RUN|RECIPE", help="A run directory, or a recipe folder.")], run: RunOption = None
) -> None:
    """One self-contained HTML page about a run."""
    from pivotrl import pipeline

    pipeline.report(run_or_recipe, run)


@app.command(name="run")
def run_all(recipe: RecipeArgument, overrides: OverridesArgument = None, run: RunOption = None) -> None:
    """All stages in order; finished ones are not repeated."""
    from pivotrl import pipeline

    loaded = pipeline.load(recipe, overrides or [])
    pipeline.run_all(loaded, run or pipeline.default_run(loaded))


@app.command()
def plan(
    model: Annotated[Path, typer.Option(metavar="DIR|FILE", help="A checkpoint directory, or a YAML file with the keys of its config.json.")],
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="[key=value]...", help="Options of the plan, see docs/planning.md, and of the recipe.")
    ] = None,
    cluster: Annotated[
        Path | None, typer.Option(metavar="FILE", help="For example configs/clusters/h100_80gb.yaml. None: nothing is judged.", show_default=False)
    ] = None,
    recipe: Annotated[
        Path | None, typer.Option(metavar="RECIPE", help="Takes nodes, step, layout and engine from a recipe.", show_default=False)
    ] = None,
    plan_file: Annotated[Path | None, typer.Option("--plan", metavar="FILE", help="A YAML file with options of the plan.")] = None,
    top: Annotated[int, typer.Option(metavar="N", help="Layouts shown where none is given.")] = 8,
) -> None:
    """Memory, time and cost of a model on a cluster: of one layout, or of the best ones."""
    from pivotrl.verbs.plan import run_plan

    if not run_plan(model, cluster, plan_file, overrides or [], num_shown=top, recipe=recipe):
        sys.exit(EXIT_UNFIT)


@app.command()
def launch(
    recipe: RecipeArgument,
    cluster: Annotated[Path, typer.Option(metavar="FILE", help="A cluster file, see launch/clusters/example.yaml.", show_default=False)],
    overrides: OverridesArgument = None,
    run: RunOption = None,
    model: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Describes the model for the estimate where its checkpoint is elsewhere.")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Write the scripts and print their cost; submit nothing.")] = False,
    nemo_run: Annotated[
        Path | None, typer.Option("--export-nemo-run", metavar="OUT.py", help="Submit nothing; write a nemo-run program that does.")
    ] = None,
) -> None:
    """A recipe's stages as SLURM jobs that wait for each other, with everything they need below RUN/launch."""
    from pivotrl import pipeline
    from pivotrl.verbs.launch import run_launch

    loaded = pipeline.load(recipe, overrides or [])
    run_launch(loaded, cluster, run or pipeline.default_run(loaded), model=model, dry_run=dry_run, nemo_run=nemo_run)


@app.command()
def doctor(
    recipe: RecipeArgument,
    overrides: OverridesArgument = None,
    run: RunOption = None,
    cluster: Annotated[Path | None, typer.Option(metavar="FILE", help="A file of launch/clusters or configs/clusters: memory and cost.")] = None,
    model: Annotated[Path | None, typer.Option(metavar="FILE", help="Describes the model where its checkpoint is elsewhere.")] = None,
    static: Annotated[bool, typer.Option("--static", help="Check only what the recipe's own files tell.")] = False,
    out: Annotated[Path | None, typer.Option("--json", metavar="OUT", help="Write the findings to this file as well.")] = None,
) -> None:
    """Find a recipe's errors before the queue does. Exits 0 where it may be submitted, 1 where it must not."""
    from pivotrl.verbs.doctor import Request, run_doctor

    request = Request(recipe, overrides or [], run, cluster, model, static)
    if not run_doctor(request, out):
        sys.exit(EXIT_UNFIT)


@app.command()
def engine(
    recipe: RecipeArgument,
    run: RunOption = None,
    connect: Annotated[str | None, typer.Option(metavar="HOST:PORT", help="The trainer's process; read from RUN/engines where not given.")] = None,
    patience: Annotated[float, typer.Option(metavar="SECONDS", min=1, help="End where no trainer is there for so long.")] = 900.0,
) -> None:
    """One rollout engine for a run with `placement.type: remote`, on this machine; serves stage after stage."""
    from pivotrl import pipeline
    from pivotrl.errors import UserError
    from pivotrl.verbs.engine import run_engine

    try:
        loaded = pipeline.load(recipe, [])
    except UserError:
        # A recipe may need words that the trainer alone was given; all that is read here is which packages to import early.
        if run is None:
            raise
        run_engine(run, None, connect=connect, patience_s=patience)
    else:
        run_engine(run or pipeline.default_run(loaded), loaded.recipe.engine, connect=connect, patience_s=patience)


@app.command()
def tables(
    spec: Annotated[Path, typer.Argument(metavar="SPEC", help="A YAML file: arms, domains, seeds and where their results lie.", show_default=False)],
    out: Annotated[Path, typer.Option(metavar="DIR", help="Directory to write.", show_default=False)],
    overrides: Annotated[list[str] | None, typer.Argument(metavar="[key=value]...", help="Overrides of the file's keys.")] = None,
) -> None:
    """The paper's tables and figures from run directories or result files of public harnesses, with n and intervals."""
    from pivotrl.verbs.tables import run_tables

    run_tables(spec, out, overrides or [])


@app.command()
def sweep(
    spec: Annotated[Path, typer.Argument(metavar="SPEC", help="A YAML file: a base, domains, arms and seeds.", show_default=False)],
    root: Annotated[Path, typer.Option(metavar="DIR", help="Directory of all run directories.", show_default=False)],
    overrides: Annotated[list[str] | None, typer.Argument(metavar="[key=value]...", help="Overrides of the file's keys.")] = None,
    workers: Annotated[int | None, typer.Option(metavar="N", min=1, help="Processes; one per core where not given.", show_default=False)] = None,
    only: Annotated[list[str] | None, typer.Option(metavar="KEY=NAME,...", help="Runs of these arms, domains or seeds alone.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the runs with every override; run nothing.")] = False,
    retry_failed: Annotated[bool, typer.Option("--retry-failed", help="Try again what an earlier call gave up.")] = False,
) -> None:
    """Many recipes in many domains with many seeds, each an ordinary run; resumes. Exits 1 where a run failed twice."""
    from pivotrl.verbs.sweep import SweepRequest, print_runs, run_sweep

    request = SweepRequest(spec, root, overrides or [], only or [], workers, retry_failed)
    if dry_run:
        print_runs(request)
    elif not run_sweep(request):
        sys.exit(EXIT_UNFIT)


@app.command()
def status(run: LaunchedArgument) -> None:
    """Jobs of a launched run: state, nodes, progress."""
    from pivotrl.verbs.launch import print_status

    print_status(run)


@app.command()
def logs(
    run: LaunchedArgument,
    stage: Annotated[str | None, typer.Argument(metavar="[STAGE]", help="A job's name; the newest job that has started where not given.")] = None,
) -> None:
    """The log of a launched run's job; where it failed, the first error of any process stands at its top."""
    from pivotrl.verbs.launch import print_logs

    print_logs(run, stage)


@app.command()
def cancel(run: LaunchedArgument) -> None:
    """End all jobs of a launched run; the same `launch` goes on from their checkpoints."""
    from pivotrl.verbs.launch import run_cancel

    run_cancel(run)


@app.command()
def config(recipe: RecipeArgument, overrides: OverridesArgument = None) -> None:
    """Print every value of a recipe and where it came from."""
    from pivotrl import pipeline

    pipeline.print_config(pipeline.load(recipe, overrides or []))


@app.command()
def audit(
    data: Annotated[Path, typer.Argument(metavar="DATA", help="Ingest directory, run, labelled pairs, or trajectories.", show_default=False)],
    verifier: Annotated[str, typer.Option(metavar="V", help="Type of the verifier, as in a recipe.", show_default=False)],
    overrides: Annotated[list[str] | None, typer.Argument(metavar="[key=value]...", help="Settings of the verifier, values in YAML.")] = None,
    against: Annotated[str | None, typer.Option(metavar='"V [key=value]..."', help="A second verifier: what would it judge otherwise?")] = None,
    labelled: Annotated[Path | None, typer.Option(metavar="FILE", help="Labelled pairs for precision and recall.")] = None,
    out: Annotated[Path | None, typer.Option(metavar="DIR", help="Output directory; runs/audit-V where not given.", show_default=False)] = None,
    limit: Annotated[int | None, typer.Option(metavar="N", min=1, help="Audit a sample of N turns.")] = None,
    domain: Annotated[str | None, typer.Option(metavar="D", help="Audit turns and pairs of one domain alone.")] = None,
) -> None:
    """What a verifier accepts: the expert, rewritings that mean the same, corruptions. Exits 1 where it rejects an expert."""
    from pivotrl.verbs.audit import AuditRequest, run_audit

    request = AuditRequest(data, verifier, overrides or [], against, labelled, limit, domain)
    if run_audit(request, out or Path("runs") / f"audit-{verifier}"):
        sys.exit(EXIT_DISAGREES)


app.add_typer(exchange)


def main() -> None:
    """Runs the command line; where a launcher started several processes, in the first of them, whose trainer the others follow."""
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        _run()
        return
    from pivotrl.megatron import processes

    if processes.is_follower():
        sys.exit(processes.follow())
    try:
        _run()
    except SystemExit as end:
        processes.dismiss(int(end.code or 0))
        raise
    except BaseException:
        processes.dismiss(EXIT_BUG)
        raise


def _run() -> None:
    """Every end of a verb that is no bug becomes a line and an exit code."""
    try:
        with user_errors_end(_PROGRAM):
            app()
    except InfraLimitError as error:
        fail(_PROGRAM, str(error), EXIT_INFRA)
    except StopRequestedError as stop:
        sys.stderr.write(f"{_PROGRAM}: {stop}\n")
        sys.exit(EXIT_STOPPED)
    except KeyboardInterrupt:
        fail(_PROGRAM, "interrupted; the same command resumes", EXIT_INTERRUPTED)
