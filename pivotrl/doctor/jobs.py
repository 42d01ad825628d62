"""What the jobs of a launched run find on their nodes, as the cluster file has it: mounts, environment, memory for the conversion."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pivotrl.config.launch import ClusterFile
from pivotrl.config.load import LoadedRecipe
from pivotrl.config.planning import ClusterConfig
from pivotrl.doctor.findings import Findings
from pivotrl.doctor.settings import place
from pivotrl.launching.missing import missing_mounts, missing_variables, needed_variables
from pivotrl.planning.memory import GIB
from pivotrl.planning.weights import FLOAT32_BYTES, count_parameters


def check_jobs(loaded: LoadedRecipe, cluster: ClusterFile, run: Path, findings: Findings) -> None:
    """What `pivotrl launch` refuses."""
    for error in missing_mounts(loaded, cluster, run):
        findings.error("mounts", error.problem, where="container.mounts", rule=error.rule, fix=error.fix)
    for error in missing_variables(loaded, cluster.environment):
        findings.error("environment", error.problem, where="environment", rule=error.rule, fix=error.fix)


def check_conversion(loaded: LoadedRecipe, config: Any, cluster: ClusterFile, hardware: ClusterConfig | None, findings: Findings) -> None:
    """Whether a node of the conversion's partition holds the checkpoint, which one process reads whole, in float32 on the CPU."""
    if loaded.recipe.launch.convert_to is None:
        return
    on_gpu_node = cluster.convert_on == "gpu_node"
    memory_gib = cluster.cpu_memory_gib if not on_gpu_node else hardware.host_memory_gib if hardware is not None else None
    if memory_gib is None:
        findings.not_checked["memory of convert"] = (
            "the cluster file has no `hardware`" if on_gpu_node else "the cluster file has no `cpu_memory_gib`"
        )
        return
    needed_gib = count_parameters(config).total * FLOAT32_BYTES / GIB
    if needed_gib > memory_gib:
        findings.error(
            "convert-memory",
            f"the checkpoint takes {needed_gib:,.0f} GiB in float32",
            where=f"{place(loaded, 'launch.convert_to')}, convert_on: {cluster.convert_on}",
            rule=f"a node there has {memory_gib:,.0f} GiB, and one process holds the whole checkpoint",
            fix="set convert_on in the cluster file to nodes that have the memory, or leave launch.convert_to out and convert elsewhere",
        )


@contextmanager
def jobs_environment(loaded: LoadedRecipe, cluster: ClusterFile | None) -> Iterator[None]:
    """Within the block the variables that the recipe reads are what its jobs get; without a cluster file they are the shell's."""
    names = set(needed_variables(loaded.recipe).values()) if cluster is not None else set[str]()
    before = {name: os.environ.get(name) for name in names}
    _set({name: cluster.environment.get(name) if cluster is not None else None for name in names})
    try:
        yield
    finally:
        _set(before)


def _set(values: dict[str, str | None]) -> None:
    for name, value in values.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
