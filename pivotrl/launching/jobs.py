"""Which jobs a recipe needs, in order, with their nodes and commands. Pure: no file is read, nothing is submitted. Called by render.py."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pivotrl.config.engines import RemotePlacement, VllmEngineConfig
from pivotrl.config.launch import ClusterFile, JobName
from pivotrl.config.schema import Recipe
from pivotrl.errors import UserError

# Jobs whose work is on the CPU; they go to the cluster's cpu_partition and ask for no GPU.
_CPU_JOBS = ("ingest", "select", "report")


@dataclass(frozen=True, slots=True)
class Command:
    """One `pivotrl` command of a job."""

    name: str
    """Names its logs."""
    words: tuple[str, ...]
    """After `python -m`, with {recipe} and {run} for the directories; quoted for the shell."""
    makes: str | None = None
    """A path that appears whole; where it exists the command has done its work and would refuse to do it again."""


@dataclass(frozen=True, slots=True)
class Job:
    """One batch job; `predecessors` says which one it waits for."""

    name: JobName
    purpose: str
    commands: tuple[Command, ...]
    nodes: int = 1
    generation_nodes: int = 0
    engines_per_node: int = 0
    """Engines of each generation node."""
    processes_per_node: int = 1
    num_shards: int = 1
    """Above 1 the job is an array of as many jobs."""
    shards_at_once: int | None = None

    def is_on_gpu_node(self, cluster: ClusterFile) -> bool:
        """Whether it asks for GPUs."""
        if self.name == "convert":
            return cluster.convert_on == "gpu_node"
        # Joining a profile's shards also does what a shard may have left, so it holds an engine.
        return self.name not in _CPU_JOBS or any(command.name == "profile" for command in self.commands)

    @property
    def hides_gpus(self) -> bool:
        """Whether its program must not see the node's GPUs: a conversion would put the whole model on one of them."""
        return self.name == "convert"

    @property
    def saves_when_asked(self) -> bool:
        """Whether its program watches for RUN/stop."""
        return self.name in ("sft", "train")

    @property
    def all_nodes(self) -> int:
        """Nodes of one job of it."""
        return self.nodes + self.generation_nodes


def recipe_jobs(recipe: Recipe, gpus_per_node: int) -> list[Job]:
    """The chain of jobs of a recipe.

    Raises:
        UserError: where generation nodes and the engines' placement do not fit each other.
    """
    launch = recipe.launch
    engines = _engines_per_node(recipe, gpus_per_node)
    # Profiling and evaluation have nodes of their own and generate where they run; `placement` is part of no stage's identity.
    local = ("placement.type=in_process",) if isinstance(recipe.placement, RemotePlacement) else ()
    processes = launch.processes_per_node or max(gpus_per_node, 1)
    shards = launch.profile_shards
    shard_words = ("--shard", f'"$SLURM_ARRAY_TASK_ID"/{shards}') if shards > 1 else ()
    jobs: list[Job] = []
    if "ingest" in recipe.stages:
        jobs.append(Job("ingest", "trajectories to candidates", (_stage("ingest"),)))
    if "sft" in recipe.stages:
        jobs.append(Job("sft", "supervised training of the reference policy", (_stage("sft"),), launch.train_nodes, processes_per_node=processes))
    if "profile" in recipe.stages:
        jobs.append(
            Job(
                "profile",
                "rollouts of the reference policy per candidate",
                (_stage("profile", *local, *shard_words),),
                num_shards=shards,
                shards_at_once=launch.profile_shards_at_once,
            )
        )
        merge = (_stage("profile", *local),) if shards > 1 else ()
        jobs.append(Job("select", "the profile's shards joined, and the pivots of it", (*merge, _stage("select"))))
    if "train" in recipe.stages:
        jobs.append(Job("train", "GRPO on pivots or episodes", (_stage("train"),), launch.train_nodes, launch.generation_nodes, engines, processes))
    if launch.convert_to is not None:
        words = ("pivotrl", "convert", f"{{run}}/{recipe.eval.of}/hf", "{run}/convert", "--from", "hf", "--to", launch.convert_to)
        jobs.append(Job("convert", "the trained checkpoint for the next stage", (Command("convert", words, makes="{run}/convert"),)))
    jobs.append(Job("eval", "scores of the reference and the trained policy", (_stage("eval", *local),)))
    jobs.append(Job("report", "the run's page", (Command("report", ("pivotrl", "report", "{run}")),)))
    return jobs


def predecessors(jobs: Sequence[Job]) -> list[JobName | None]:
    """For each job the one that must have ended well before it starts. None waits for `convert`, whose result is the next stage's.

    >>> predecessors([Job("train", "", ()), Job("convert", "", ()), Job("eval", "", ()), Job("report", "", ())])
    [None, 'train', 'train', 'eval']
    """
    found: list[JobName | None] = []
    last = None
    for job in jobs:
        found.append(last)
        last = last if job.name == "convert" else job.name
    return found


def _engines_per_node(recipe: Recipe, gpus_per_node: int) -> int:
    nodes, placement = recipe.launch.generation_nodes, recipe.placement
    if nodes == 0 and not isinstance(placement, RemotePlacement):
        return 0
    if nodes == 0 or not isinstance(placement, RemotePlacement):
        raise UserError(
            f"launch.generation_nodes is {nodes} and placement.type is {placement.type}",
            rule="engines on nodes of their own are remote, and remote engines need nodes",
            fix="set placement.type=remote and launch.generation_nodes together, or neither",
        )
    if int(placement.listen.rpartition(":")[2]) == 0:
        raise UserError(
            f"placement.listen is {placement.listen}",
            rule="the engines of a launched run are started with the port, which 0 leaves open",
            fix="give a port, for example 0.0.0.0:29650",
        )
    size = recipe.engine.tensor_parallel_size if isinstance(recipe.engine, VllmEngineConfig) else 1
    engines, left_over = divmod(placement.num_replicas, nodes)
    if left_over or (gpus_per_node and engines * size > gpus_per_node):
        raise UserError(
            f"placement.num_replicas is {placement.num_replicas}, each on {size} GPUs, and launch.generation_nodes is {nodes}",
            rule=f"every generation node gets as many replicas, and has {gpus_per_node} GPUs",
            fix=f"set placement.num_replicas to {nodes * max(gpus_per_node // size, 1)}",
        )
    return engines


def time_limit(job: Job, cluster: ClusterFile) -> str:
    """The job's time limit, as sbatch takes it."""
    return cluster.time.get(job.name, cluster.default_time)


def _stage(name: str, *words: str) -> Command:
    return Command(name, ("pivotrl", name, "{recipe}", "--run", "{run}", *words))
