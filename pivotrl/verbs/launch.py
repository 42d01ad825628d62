"""The verbs `launch`, `status`, `logs` and `cancel`: a recipe and a cluster file to jobs in a queue, and what becomes of them.

The work is in pivotrl/launching/. Called by cli.py.
"""

from __future__ import annotations

from pathlib import Path

from pivotrl.config.load import LoadedRecipe
from pivotrl.console import results_console
from pivotrl.launching.estimate import slots, train_estimate
from pivotrl.launching.missing import missing_mounts, missing_variables
from pivotrl.launching.nemo_run import export
from pivotrl.launching.render import Script, Target, load_target, render
from pivotrl.launching.status import cancel, log_files, run_status
from pivotrl.launching.submit import refuse_queued, submit


def run_launch(loaded: LoadedRecipe, cluster: Path, run: Path, *, model: Path | None, dry_run: bool, nemo_run: Path | None) -> None:
    """Writes RUN/launch and prints what it will use; submits the jobs unless `dry_run`, or writes the program `nemo_run` that does.

    Raises:
        UserError: for a wrong cluster file, a run with jobs in the queue, a path or a variable that jobs would not find (a dry run prints that),
            something that nemo-run cannot take, or a refusal of SLURM's.
    """
    target = load_target(cluster)
    # Also before a dry run: it would put other scripts and another recipe under the jobs that wait.
    refuse_queued(run)
    missing = [*missing_mounts(loaded, target.cluster, run), *missing_variables(loaded, target.cluster.environment)]
    if missing and not dry_run:
        raise missing[0]
    scripts = render(loaded, target, run)
    _print(loaded, target, run, scripts, model)
    for error in missing:
        results_console().print(f"a launch would be refused: {error}", highlight=False, markup=False)
    if nemo_run is not None:
        export(scripts, loaded, target, run, nemo_run)
        results_console().print(f"written: {nemo_run}; submit with `python {nemo_run}` where nemo_run is installed", highlight=False, markup=False)
    elif not dry_run:
        submissions = submit(scripts, target, run)
        ids = ", ".join(f"{one.stage} {one.job_id}" for one in submissions)
        results_console().print(f"submitted: {ids}; follow with `pivotrl status {run}`", highlight=False)


def print_status(run: Path) -> None:
    """Prints one row per job of the run."""
    from rich.table import Table

    table = Table("stage", "job", "state", "nodes", "time", "starts again", "progress", title=str(run), title_justify="left", box=None)
    for job in run_status(run):
        table.add_row(job.stage, job.job_id, job.state, job.nodes, job.elapsed, str(job.num_restarts), job.progress)
    results_console().print(table)


def print_logs(run: Path, stage: str | None) -> None:
    """Prints the logs of a stage's newest job, each with its path; where the logs of its processes are follows."""
    console = results_console()
    for path in log_files(run, stage):
        console.print(f"{path}:", highlight=False, markup=False)
        console.print(path.read_text(errors="replace"), highlight=False, markup=False)
    console.print(f"logs of single processes: {run / 'launch' / 'attempts'}", highlight=False, markup=False)


def run_cancel(run: Path) -> None:
    """Cancels the run's jobs and says which."""
    cancelled = cancel(run)
    results_console().print(f"cancelled: {', '.join(cancelled)}" if cancelled else "no job of the run was in the queue", highlight=False)


def _print(loaded: LoadedRecipe, target: Target, run: Path, scripts: list[Script], model: Path | None) -> None:
    from rich.table import Table

    jobs = [script.job for script in scripts]
    rows = slots(jobs, target.cluster, target.gpus_per_node)
    table = Table("job", "nodes", "GPUs", "time limit", "GPU-hours at most", "script", title=target.cluster.name, title_justify="left", box=None)
    for script, row in zip(scripts, rows, strict=True):
        shards = f" in {script.job.num_shards} jobs" if script.job.num_shards > 1 else ""
        table.add_row(row.name, f"{row.nodes}{shards}", str(row.gpus), row.time_limit, f"{row.gpu_hours:,.1f}", str(script.path))
    console = results_console()
    console.print(table)
    console.print(f"GPU-hours at most, each job started once: {sum(row.gpu_hours for row in rows):,.1f}", highlight=False)
    if target.hardware is None or all(job.name != "train" for job in jobs):
        return
    found = train_estimate(loaded, target.hardware, run, model)
    if isinstance(found, str):
        console.print(f"train by the planner: not estimated ({found})", highlight=False)
    else:
        fits = "" if found.fits else "; the layout does NOT fit the GPUs' memory, see `pivotrl plan`"
        text = f"train by the planner: {found.gpu_hours:,.0f} GPU-hours, {found.hours:,.1f} h at {found.step_s:,.1f} s a step{fits}"
        console.print(text, highlight=False)
