"""Files and options of `pivotrl launch`: what a recipe asks of a cluster (its section `launch`), and one cluster's own file.

The recipe says how many nodes; the cluster file says where they are, how a program starts there and which environment it gets. Neither
changes a number, so neither is part of a stage's identity. The GPU's figures stay in configs/clusters/, which the cluster file names.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from pivotrl.config.section import PositiveInt, Section

JobName = Literal["ingest", "sft", "profile", "select", "train", "convert", "eval", "report"]
Duration = Annotated[str, Field(pattern=r"^(\d+-)?\d{1,2}:\d{2}:\d{2}$")]
"""[days-]hours:minutes:seconds, as sbatch takes it."""
EnvironmentName = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")]
# A value that lands between quotes in a script, or a path in an #SBATCH line.
PlainText = Annotated[str, Field(pattern=r"^[^\n'\"`$\\]*$")]
PlainPath = Annotated[str, Field(pattern=r"^[^\s'\"`$\\,]+$")]
PlainList = Annotated[str, Field(pattern=r"^[^\s'\"`$\\,]+(,[^\s'\"`$\\,]+)*$")]
"""Names with commas between them."""


class LaunchConfig(Section):
    """What the recipe asks of a cluster; used by `pivotrl launch` alone."""

    train_nodes: PositiveInt = 1
    """Nodes of the trainer, in `sft` and `train`."""
    generation_nodes: Annotated[int, Field(ge=0)] = 0
    """Nodes of the train job that only generate; 0: the trainer's processes generate too."""
    processes_per_node: PositiveInt | None = None
    """Trainer processes of a node. None: one per GPU, or one on a cluster without GPUs."""
    profile_shards: PositiveInt = 1
    """Jobs of one node that share the profiling."""
    profile_shards_at_once: PositiveInt | None = None
    """Most of them to run at a time. None: no limit."""
    convert_to: Literal["megatron"] | None = None
    """Form the trained checkpoint is converted to for the next stage, in RUN/convert. None: it stays in Hugging Face form in RUN/train/hf."""


class ContainerConfig(Section):
    """A container started by pyxis and enroot."""

    image: PlainPath
    """Image, as `srun --container-image` takes it: registry#path:tag, or a .sqsh file."""
    mounts: tuple[PlainPath, ...] = ()
    """HOST:CONTAINER[:ro] each. The working directory, the run directory, `health.scratch_dir` and every path of the recipe must be there under
    the path they have outside; `pivotrl launch` refuses otherwise."""
    python: PlainPath = "python3"
    """Python 3.12 inside the image with the requirements of requirements/gpu.txt installed."""


class HealthConfig(Section):
    """The check of every node before a job's work starts."""

    min_free_gib: Annotated[float, Field(ge=0)] = 50.0
    """Free space below the run directory and below scratch_dir."""
    scratch_dir: PlainPath = "/tmp"
    """Directory on the node's own disk."""
    max_clock_skew_s: Annotated[float, Field(gt=0)] = 2.0
    """Largest difference between a node's clock and the clock of the job's first node; what a message takes is in it."""
    min_pair_gb_per_s: Annotated[float, Field(ge=0)] = 1.0
    """Slowest all-reduce between two nodes, per pair of processes, that is still healthy; measured on 64 MiB."""
    startup_s: PositiveInt = 600
    """How long the processes of all nodes may take to be there: the container is unpacked on every node and torch imported by every process."""
    timeout_s: PositiveInt = 300
    """The check once they are there; one exchange of tensors may take a sixth of it. A node that has not answered after both is bad, unless more than
    half of the nodes are silent: then none is excluded for it."""


class ClusterFile(Section):
    """One SLURM cluster: launch/clusters/NAME.yaml."""

    name: PlainText
    """Shown in plans."""
    hardware: str | None = None
    """configs/clusters file of the GPU nodes, relative to the working directory: GPUs per node and the figures behind GPU-hours. None: no GPUs."""
    slurm_conf: PlainPath | None = None
    """Configuration file of the SLURM to talk to. None: the system's own."""
    account: PlainPath | None = None
    """`sbatch --account`."""
    partition: PlainList | None = None
    """Partition of jobs that compute, or several with commas between them, of which SLURM takes the first that is free. It may be preemptible."""
    cpu_partition: PlainList | None = None
    """Partition of ingest, select (unless it joins a profile's shards), report, and convert where `convert_on` says so. None: `partition`."""
    qos: PlainPath | None = None
    """`sbatch --qos`; it may be preemptible."""
    cpu_qos: PlainPath | None = None
    """`sbatch --qos` of the jobs that need no GPU. None: `qos`."""
    reservation: PlainPath | None = None
    """`sbatch --reservation`."""
    cpu_reservation: PlainPath | None = None
    """`sbatch --reservation` of the jobs that need no GPU. None: `reservation`, or none where they have a `cpu_partition`."""
    exclude: tuple[PlainPath, ...] = ()
    """Nodes never to use. Those a health check finds bad are excluded too, for the rest of the run: RUN/launch/excluded_nodes."""
    gpu_option: PlainText = "--gpus-per-node={gpus}"
    """How sbatch asks for GPUs; {gpus} is replaced. Empty: the partition gives whole nodes without being asked."""
    sbatch_options: tuple[PlainText, ...] = ()
    """Further options of every job, one `#SBATCH` line each, for example `--exclusive`."""
    cpu_sbatch_options: tuple[PlainText, ...] | None = None
    """The same for the jobs that need no GPU. None: `sbatch_options`, or none where they have a `cpu_partition`."""
    convert_on: Literal["gpu_node", "cpu_node"] = "gpu_node"
    """Where `convert` runs: one process that holds the whole checkpoint in float32 and uses no GPU, so that the node's memory decides."""
    cpu_memory_gib: Annotated[float, Field(gt=0)] | None = None
    """Memory of a node of `cpu_partition`, for the doctor."""
    srun_options: tuple[PlainPath, ...] = ()
    """Further options of every srun, for example `--cpu-bind=none`."""
    container: ContainerConfig | None = None
    """The container programs run in. Either this or `venv`."""
    venv: PlainPath | None = None
    """Virtual environment on the shared file system, an absolute path. Either this or `container`."""
    path: PlainText = "/usr/local/bin:/usr/bin:/bin"
    """PATH of the jobs' scripts and of SLURM's commands where `pivotrl launch`, `status` and `cancel` are called."""
    environment: dict[EnvironmentName, PlainText] = Field(default_factory=dict[EnvironmentName, PlainText])
    """All the environment a program gets beside SLURM's own variables: NCCL, network interfaces, caches. Nothing is taken from the shell."""
    default_time: Duration = "04:00:00"
    """Time limit of jobs without one in `time`."""
    time: dict[JobName, Duration] = Field(default_factory=dict[JobName, Duration])
    """Time limit by job. A job that reaches it goes on from its last checkpoint or unit of work in a new slot; where it has left none, that start is
    a failure."""
    stop_before_s: PositiveInt = 600
    """How long before the time limit a job is told to save and stop: longer than one step, a validation and a checkpoint together, and shorter than
    every time limit."""
    max_failures: Annotated[int, Field(ge=0)] = 5
    """Starts that may end in a lost node, a killed process or a failed health check before the job is given up. Time limits count where
    the start left no new checkpoint or unit of work."""
    health: HealthConfig | None = HealthConfig()
    """The check before work starts, or null for none."""

    @model_validator(mode="after")
    def _one_place_for_programs(self) -> ClusterFile:
        if (self.container is None) == (self.venv is None):
            raise ValueError("exactly one of container and venv must be given: programs run in one or in the other")
        if self.venv is not None and not self.venv.startswith("/"):
            raise ValueError(f"venv is {self.venv!r}; it must be an absolute path, as jobs start in a directory of their own")
        return self

    @model_validator(mode="after")
    def _time_to_work(self) -> ClusterFile:
        for key, limit in {"default_time": self.default_time, **{f"time.{name}": limit for name, limit in self.time.items()}}.items():
            if seconds(limit) <= self.stop_before_s:
                raise ValueError(
                    f"{key} is {limit!r}, which is {seconds(limit)} s, and stop_before_s is {self.stop_before_s}; "
                    "a job is told to stop that long before its limit, so it must be longer"
                )
        return self


def seconds(limit: str) -> int:
    """Seconds of a time limit.

    >>> seconds("1-02:30:00")
    95400
    """
    days, _, clock = limit.rpartition("-")
    hour, minute, second = map(int, clock.split(":"))
    return ((24 * int(days or 0) + hour) * 60 + minute) * 60 + second
