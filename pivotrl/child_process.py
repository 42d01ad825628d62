"""The environment of a process that this one starts for a job of its own."""

from __future__ import annotations

import os

# What torchrun and SLURM's scripts tell the processes of a trainer about each other; a child that had it would wait for the others.
_LAUNCHER = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "ROLE_RANK", "MASTER_ADDR", "MASTER_PORT")


def own_environment() -> dict[str, str]:
    """This process's environment without its place among the processes that a launcher started."""
    return {name: value for name, value in os.environ.items() if name not in _LAUNCHER and not name.startswith("TORCHELASTIC")}
