"""RUN/launch/: one sbatch script per job, the shell they share, the code and the recipe they run. Nothing is submitted here.

Scripts are for people to read: one `#SBATCH` line per option, one line per program, and what all stages share in files beside them.
Called by verbs/launch.py; templates are in launch/templates/.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pivotrl.config.engines import RemotePlacement
from pivotrl.config.launch import ClusterFile
from pivotrl.config.load import LoadedRecipe, load_section
from pivotrl.config.planning import ClusterConfig
from pivotrl.errors import EXIT_STOPPED, UserError
from pivotrl.launching.jobs import Job, recipe_jobs, time_limit
from pivotrl.launching.snapshot import check_files, snapshot_code, snapshot_recipe
from pivotrl.rundir import STAGES, Stage, atomic_write

LAUNCH = "launch"
EXCLUDED = "excluded_nodes"
"""Below LAUNCH: nodes that a health check found bad, one a line."""
_PACKAGE = Path(__file__).resolve().parents[1]
# In a wheel the templates lie beside this file, in a checkout at its root.
_TEMPLATES = next((place for place in (_PACKAGE / "launching" / "templates", _PACKAGE.parent / "launch" / "templates") if place.is_dir()), _PACKAGE)
_SHARED = ("environment.sh", "job.sh", "restart.sh", "health.sh", "task.sh")
# What a path may not hold: scripts use it unquoted, and so does sbatch, which also replaces %.
_UNSAFE = set(" \t\n'\"`$\\,;&|<>()*?[]{}!#~%")


@dataclass(frozen=True, slots=True)
class Target:
    """The cluster a run is rendered for."""

    cluster: ClusterFile
    hardware: ClusterConfig | None

    @property
    def gpus_per_node(self) -> int:
        return self.hardware.gpus_per_node if self.hardware else 0


@dataclass(frozen=True, slots=True)
class Script:
    """A job with its script."""

    job: Job
    path: Path


def load_target(path: Path) -> Target:
    """Reads a cluster file and the hardware file it names.

    Raises:
        UserError: for a file, key or value that is wrong.
    """
    cluster = load_section(ClusterFile, file=path)
    return Target(cluster, load_section(ClusterConfig, file=Path(cluster.hardware)) if cluster.hardware is not None else None)


def open_jobs(loaded: LoadedRecipe, target: Target, run: Path) -> list[Job]:
    """The recipe's jobs that the run has not finished.

    Raises:
        UserError: where RUN/convert holds another checkpoint than the one that the run is going to make.
    """
    jobs = recipe_jobs(loaded.recipe, target.gpus_per_node)
    is_converted = (run / "convert").exists()
    if is_converted and loaded.recipe.launch.convert_to is not None and not Stage.is_done(run, loaded.recipe.eval.of):
        raise UserError(
            f"{run / 'convert'} exists and {loaded.recipe.eval.of} is not finished",
            rule="a conversion is of the run's own checkpoint, and never replaces another",
            fix=f"remove or move {run / 'convert'}",
        )
    done = {job.name for job in jobs if job.name in STAGES and job.name != "report" and Stage.is_done(run, job.name)}
    return [job for job in jobs if job.name not in done and not (job.name == "convert" and is_converted)]


def render(loaded: LoadedRecipe, target: Target, run: Path) -> list[Script]:
    """Writes everything the jobs need below RUN/launch and returns their scripts in order.

    Raises:
        UserError: for a path that scripts cannot hold, a file of the recipe that does not exist, or nodes that do not fit the engines; nothing was
            written then.
    """
    run = run.resolve()
    for path in (run, Path.cwd()):
        if wrong := sorted(character for character in set(str(path)) if character in _UNSAFE or not character.isprintable()):
            raise UserError(
                f"{path} holds {''.join(wrong)!r}", rule="scripts and sbatch take plain paths", fix="choose a --run without such characters"
            )
    jobs = open_jobs(loaded, target, run)
    check_files(loaded)
    launch_dir = run / LAUNCH
    (launch_dir / "logs").mkdir(parents=True, exist_ok=True)
    context = _context(target, run, code_dir=snapshot_code(launch_dir))
    recipe_dir = snapshot_recipe(loaded, launch_dir)
    environment = templates()
    for name in (name for name in _SHARED if name != "health.sh" or target.cluster.health is not None):
        # Jobs are the same user's; a judge's key may be among the variables.
        atomic_write(launch_dir / name, environment.get_template(f"{name}.j2").render(context).encode(), is_private=name == "environment.sh")
    scripts: list[Script] = []
    for job in jobs:
        path = launch_dir / f"{job.name}.sbatch"
        text = environment.get_template("stage.sbatch.j2").render(context, job=job, **job_context(job, loaded, target, run, recipe_dir))
        atomic_write(path, text.encode())
        scripts.append(Script(job, path))
    return scripts


def templates() -> Any:
    """The environment that reads launch/templates."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    # The shell's ${#array[@]} holds what jinja takes for the start of a comment.
    options: dict[str, Any] = {"trim_blocks": True, "lstrip_blocks": True, "keep_trailing_newline": True}
    return Environment(
        loader=FileSystemLoader(_TEMPLATES), undefined=StrictUndefined, comment_start_string="{##", comment_end_string="##}", **options
    )


def _context(target: Target, run: Path, *, code_dir: Path) -> dict[str, Any]:
    cluster = target.cluster
    return {
        "run": run,
        "launch_dir": run / LAUNCH,
        "code_dir": code_dir,
        "python": python_of(cluster),
        "environment": environment_of(cluster),
        "srun_options": _quoted([*cluster.srun_options, *container_options(cluster)]),
        "plain_srun_options": _quoted(cluster.srun_options),
        "stop_before_s": cluster.stop_before_s,
        "max_failures": cluster.max_failures,
        "exclude": _quoted(cluster.exclude),
        "excluded": EXCLUDED,
        "health": cluster.health,
        "exit_stopped": EXIT_STOPPED,
    }


def python_of(cluster: ClusterFile) -> str:
    """The interpreter of the jobs' programs, inside the container where there is one."""
    return cluster.container.python if cluster.container else f"{cluster.venv}/bin/python"


def environment_of(cluster: ClusterFile) -> dict[str, str]:
    """All the environment of a job beside SLURM's variables."""
    configured = {"SLURM_CONF": cluster.slurm_conf} if cluster.slurm_conf else {}
    return {"PATH": cluster.path, **configured, **cluster.environment}


def _quoted(words: Sequence[str]) -> str:
    return " ".join(f'"{word}"' for word in words)


def container_options(cluster: ClusterFile) -> list[str]:
    """Options of pyxis. What the cluster file sets must win over the image's own environment, which pyxis prefers unless told."""
    if cluster.container is None:
        return []
    mounts = [f"--container-mounts={','.join(cluster.container.mounts)}"] if cluster.container.mounts else []
    names = [f"--container-env={','.join(cluster.environment)}"] if cluster.environment else []
    return [f"--container-image={cluster.container.image}", *mounts, *names, "--no-container-mount-home", f"--container-workdir={Path.cwd()}"]


def job_context(job: Job, loaded: LoadedRecipe, target: Target, run: Path, recipe_dir: Path) -> dict[str, Any]:
    """What a job's script says beyond the run's context; words, which follow `python -m`, are quoted for the shell."""
    gpus = target.gpus_per_node if job.is_on_gpu_node(target.cluster) else 0
    fill = lambda words: " ".join(word.replace("{recipe}", str(recipe_dir)).replace("{run}", str(run)) for word in words)  # noqa: E731
    placement = loaded.recipe.placement
    port = placement.listen.rpartition(":")[2] if isinstance(placement, RemotePlacement) else ""
    commands = [
        {"name": command.name, "words": fill(command.words), "makes": fill((command.makes,)) if command.makes else None} for command in job.commands
    ]
    return {
        "options": sbatch_options(job, target, run, gpus),
        "gpus": gpus,
        # A job of one process without GPUs has no neighbours, and the program itself meets a full disk.
        "check_health": target.cluster.health is not None and (job.all_nodes > 1 or gpus > 0),
        "commands": commands,
        "gpus_per_engine": gpus // job.engines_per_node if job.engines_per_node else 0,
        "engine_words": fill(("pivotrl", "engine", "{recipe}", "--run", "{run}", "--connect", f'"$master":{port}')),
    }


def _excluded(cluster: ClusterFile, run: Path) -> list[str]:
    """Nodes of the cluster file, and those that jobs of the run have found bad."""
    found = run / LAUNCH / EXCLUDED
    return list(dict.fromkeys([*cluster.exclude, *(found.read_text().split() if found.is_file() else [])]))


def sbatch_options(job: Job, target: Target, run: Path, gpus: int) -> list[str]:
    """The job's options, as its `#SBATCH` lines hold them."""
    cluster = target.cluster
    partition, qos, reservation, more = cluster.partition, cluster.qos, cluster.reservation, cluster.sbatch_options
    if not job.is_on_gpu_node(cluster):
        # Another partition's nodes are neither in the reservation nor, say, of the constraint that the GPU nodes are asked by.
        if cluster.cpu_partition is not None:
            partition, reservation, more = cluster.cpu_partition, None, ()
        qos, reservation = cluster.cpu_qos or qos, cluster.cpu_reservation or reservation
        more = more if cluster.cpu_sbatch_options is None else cluster.cpu_sbatch_options
    array, excluded = job.num_shards > 1, _excluded(cluster, run)
    at_once = f"%{job.shards_at_once}" if job.shards_at_once else ""
    named = {"account": cluster.account, "partition": partition, "qos": qos, "reservation": reservation}
    return [
        f"--job-name=pivotrl-{run.name}-{job.name}",
        *(f"--{name}={value}" for name, value in named.items() if value is not None),
        f"--nodes={job.all_nodes}",
        f"--ntasks-per-node={max(job.processes_per_node, job.engines_per_node)}",
        *([cluster.gpu_option.replace("{gpus}", str(gpus))] if gpus and cluster.gpu_option else []),
        *([f"--array=0-{job.num_shards - 1}{at_once}"] if array else []),
        f"--time={time_limit(job, cluster)}",
        f"--signal=B:USR1@{cluster.stop_before_s}",
        "--requeue",
        "--open-mode=append",
        "--export=NONE",
        f"--chdir={Path.cwd()}",
        f"--output={run / LAUNCH}/logs/{job.name}.{'%A_%a' if array else '%j'}.out",
        *([f"--exclude={','.join(excluded)}"] if excluded else []),
        *more,
    ]
