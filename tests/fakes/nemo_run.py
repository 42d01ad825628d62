"""Stands for the package nemo_run under an exported program: the few names it uses, keeping what it is told."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import TracebackType
from typing import Any


class Packager:
    """The packager that packs nothing."""


@dataclass
class Script:
    """A task."""

    inline: str


class SlurmExecutor:
    """Keeps its parameters; refuses those that the package's does not have."""

    PARAMETERS = frozenset(
        (
            *("account", "partition", "job_name_prefix", "time", "nodes", "ntasks_per_node", "cpus_per_task", "cpus_per_gpu", "gpus_per_node"),
            *("gpus_per_task", "qos", "mem", "mem_per_gpu", "mem_per_cpu", "comment", "constraint", "exclude", "gres", "signal", "exclusive"),
            *("array", "open_mode", "container_image", "container_mounts", "container_env", "additional_parameters", "srun_args", "packager"),
            *("env_vars", "retries", "setup_lines", "segment", "network", "wait_time_for_group_job", "monitor_group_job_wait_time"),
        )
    )

    def __init__(self, **parameters: Any) -> None:
        assert parameters.keys() <= self.PARAMETERS
        self.parameters = parameters


@dataclass
class Added:
    """One call of `Experiment.add`."""

    name: str
    scripts: list[Script]
    executors: list[SlurmExecutor]
    dependencies: list[str]


@dataclass
class Experiment:
    """Keeps what was added; `made` is the newest one."""

    title: str
    added: list[Added] = field(default_factory=list)
    ran: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        globals()["made"] = self

    def __enter__(self) -> Experiment:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        pass

    def add(self, task: Script | list[Script], executor: Any, name: str, dependencies: list[str] | None = None) -> str:
        assert all(other in [one.name for one in self.added] for other in dependencies or [])
        scripts, executors = (value if isinstance(value, list) else [value] for value in (task, executor))
        assert len(scripts) == len(executors)
        self.added.append(Added(name, scripts, executors, dependencies or []))
        return name

    def dryrun(self) -> None:
        self.ran.append("dryrun")

    def run(self, *, detach: bool) -> None:
        assert detach
        self.ran.append("run")


made: Experiment
