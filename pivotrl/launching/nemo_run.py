"""A rendered run as a Python program for nemo-run, for labs that submit with it: one task per job, in the same order, with the same resources.

Names are those of nemo_run 0.11.1 (core/execution/slurm.py and run/experiment.py), read from the package; `make nemo-run` checks the
program against the installed one. What its batch scripts cannot say is done by RUN/launch/nemo.sh and task.sh, or named in the program's
head. Nothing is imported from nemo_run here. Called by verbs/launch.py after render.py has written RUN/launch.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pivotrl.config.load import LoadedRecipe
from pivotrl.errors import EXIT_STOPPED, UserError
from pivotrl.launching.jobs import Job, predecessors
from pivotrl.launching.render import LAUNCH, Script, Target, container_options, environment_of, job_context, python_of, sbatch_options, templates
from pivotrl.launching.snapshot import RECIPE
from pivotrl.rundir import atomic_write

CHECKED_VERSION = "0.11.1"
# Options of sbatch that SlurmExecutor has a parameter for; the rest go through its additional_parameters.
_PARAMETERS = (
    *("account", "partition", "qos", "time", "nodes", "ntasks_per_node", "cpus_per_task", "cpus_per_gpu", "gpus_per_node", "gpus_per_task"),
    *("gres", "mem", "mem_per_gpu", "mem_per_cpu", "comment", "constraint", "exclude", "exclusive", "array", "segment", "network"),
)
_NUMBERS = ("nodes", "ntasks_per_node", "cpus_per_task", "cpus_per_gpu", "gpus_per_node", "gpus_per_task", "segment")
# What nemo-run sets itself; `signal` is replaced, see below.
_ITS_OWN = ("job_name", "output", "error", "open_mode", "requeue", "signal")
# nemo-run replaces this text in scripts of jobs without a container.
_REPLACED = "/nemo_run"


def export(scripts: Sequence[Script], loaded: LoadedRecipe, target: Target, run: Path, out: Path) -> None:
    """Writes the program to `out`, and the shell that its jobs source to RUN/launch/nemo.sh.

    Raises:
        UserError: for an option or a path that nemo-run would change; nothing was written to `out` then.
    """
    run = run.resolve()
    context = _context(scripts, loaded, target, run)
    environment = templates()
    environment.filters["literal"] = repr
    text = environment.get_template("nemo_run.py.j2").render(context)
    if target.cluster.container is None and _REPLACED in text:
        raise UserError(
            f"a path of the run holds {_REPLACED!r}: {next(line.strip() for line in text.splitlines() if _REPLACED in line)}",
            rule="nemo-run replaces that text in the scripts of jobs without a container",
            fix="choose another --run, or directories of other names",
        )
    shared = {"launch_dir": run / LAUNCH, "health": target.cluster.health, "exit_stopped": EXIT_STOPPED}
    atomic_write(run / LAUNCH / "nemo.sh", environment.get_template("nemo.sh.j2").render(shared).encode())
    atomic_write(out, text.encode())


def _context(scripts: Sequence[Script], loaded: LoadedRecipe, target: Target, run: Path) -> dict[str, Any]:
    cluster, launch_dir = target.cluster, run / LAUNCH
    environment = environment_of(cluster)
    # nemo-run writes every name in capitals.
    odd = {name: value for name, value in environment.items() if name != name.upper()}
    options = [_executor_options(script.job, target, run) for script in scripts]
    common = {name: value for name, value in options[0].items() if all(name in other and other[name] == value for other in options)}
    container = cluster.container
    if container is not None:
        common |= {"container_image": container.image, "container_mounts": list(container.mounts), "container_env": list(cluster.environment)}
    # A job with engines has its own srun for each, which must not take the container's options twice: nemo-run has parameters for these.
    srun_args = ["--export=ALL", *cluster.srun_options, *(word for word in container_options(cluster) if word == "--no-container-mount-home")]
    recipe_dir = launch_dir / RECIPE
    return {
        "checked_version": CHECKED_VERSION,
        "launch_dir": str(launch_dir),
        "working_directory": str(Path.cwd()),
        "python": shlex.quote(python_of(cluster)),
        "retries": cluster.max_failures,
        "environment": {name: shlex.quote(value) for name, value in environment.items() if name not in odd},
        "more_setup": [f"export {name}={shlex.quote(value)}" for name, value in odd.items()],
        "srun_args": srun_args,
        "job_name_prefix": f"pivotrl-{run.name}-",
        "title": f"pivotrl-{run.name}",
        "common": common,
        "jobs": [
            _job(script.job, own, common, after, job_context(script.job, loaded, target, run, recipe_dir))
            for script, own, after in zip(scripts, options, predecessors([script.job for script in scripts]), strict=True)
        ],
    }


def _executor_options(job: Job, target: Target, run: Path) -> dict[str, object]:
    """The job's sbatch options as parameters of SlurmExecutor."""
    gpus = target.gpus_per_node if job.is_on_gpu_node(target.cluster) else 0
    parameters: dict[str, object] = {"account": None}
    more: dict[str, object] = {"kill_on_invalid_dep": "yes"}
    for word in (word for option in sbatch_options(job, target, run, gpus) for word in _words(option)):
        name, equals, value = word.removeprefix("--").partition("=")
        name = name.replace("-", "_")
        if name in _ITS_OWN:
            continue
        group = parameters if name in _PARAMETERS else more
        group[name] = (int(value) if name in _NUMBERS and value.isdecimal() else value) if equals else True
    # Without B: it goes to the programs, as nemo-run's script would only die of it.
    parameters["signal"] = f"TERM@{target.cluster.stop_before_s}"
    return {**parameters, "additional_parameters": more}


def _words(option: str) -> list[str]:
    words = shlex.split(option)
    if wrong := [word for word in words if not word.startswith("--")]:
        raise UserError(
            f"the sbatch option {option!r} holds {wrong[0]!r}",
            rule="nemo-run takes options as names with values",
            fix="write it as --name=value in the cluster file, for example --constraint=h100",
        )
    return words


def _job(job: Job, options: Mapping[str, object], common: Mapping[str, object], after: str | None, context: Mapping[str, Any]) -> dict[str, Any]:
    own = {name: value for name, value in options.items() if name not in common}
    basics = {"stage": job.name, "gpus": context["gpus"], "per_node": job.processes_per_node, "checks": context["check_health"]}
    lines = ["'export PIVOTRL_HIDE_GPUS=1'"] if job.hides_gpus and context["gpus"] else []
    lines += [line for command in context["commands"] for line in _lines(command)]
    task_lines = [f"script({lines[0]})," if len(lines) == 1 else "script("] + [f"    {line}," for line in lines if len(lines) > 1]
    task_lines += ["),"] if len(lines) > 1 else []
    executor_lines = _executor("executor=", basics, own)
    if job.generation_nodes:
        engine = f"script('export PIVOTRL_ENGINE_GPUS={context['gpus_per_engine']}', {_task('engine', context['engine_words'])}),"
        task_lines = ["[", *(f"    {line}" for line in [*task_lines, engine]), "],"]
        trainer = {**own, "srun_args": _place(0, job.nodes, job.processes_per_node)}
        engines = {**own, "srun_args": _place(job.nodes, job.generation_nodes, job.engines_per_node)}
        executor_lines = ["executor=[", *(f"    {line}" for part in (trainer, engines) for line in _executor("", basics, part)), "],"]
    return {"name": job.name, "purpose": job.purpose, "after": after, "task_lines": task_lines, "executor_lines": executor_lines}


def _lines(command: Mapping[str, Any]) -> list[str]:
    """The command, after a look at whether what it makes is there."""
    made = [repr(f"if [ -e {command['makes']} ]; then exit 0; fi")] if command["makes"] else []
    return [*made, _task(command["name"], command["words"])]


def _task(name: str, words: str) -> str:
    """The call of the program's `task`. The address that a script of ours has in $master is exported by nemo.sh."""
    return f"task({name!r}, {words.replace('"$master"', '"$MASTER_ADDR"')!r})"


def _place(first: int, nodes: int, per_node: int) -> tuple[str, ...]:
    return (f"--relative={first}", f"--nodes={nodes}", f"--ntasks={nodes * per_node}", f"--ntasks-per-node={per_node}")


def _executor(head: str, basics: Mapping[str, Any], own: Mapping[str, object]) -> list[str]:
    stage, *rest = basics.items()
    words = [repr(stage[1]), *(f"{name}={value!r}" for name, value in [*rest, *own.items()])]
    return [f"{head}executor(", *(f"    {word}," for word in words), "),"]
