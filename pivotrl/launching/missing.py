"""What jobs would miss on their nodes, by recipe and cluster file: paths that the container does not show, variables that nothing sets.

Nobody would see it before the job's turn has come. Called by verbs/launch.py before anything is submitted, and by the doctor.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from pivotrl.config.judge import FROM_ENVIRONMENT
from pivotrl.config.launch import ClusterFile
from pivotrl.config.load import LoadedRecipe
from pivotrl.config.schema import Recipe
from pivotrl.errors import UserError


@dataclass(frozen=True, slots=True)
class _Mount:
    outside: PurePosixPath
    inside: PurePosixPath
    is_read_only: bool

    @staticmethod
    def parse(text: str) -> _Mount:
        outside, _, rest = text.partition(":")
        inside, _, flags = rest.partition(":")
        return _Mount(PurePosixPath(outside), PurePosixPath(inside or outside), "ro" in flags.split("+"))


def missing_mounts(loaded: LoadedRecipe, cluster: ClusterFile, run: Path) -> list[UserError]:
    """One refusal per path that jobs use and do not find under its own name in the container; none where there is no container."""
    if cluster.container is None:
        return []
    mounts = [_Mount.parse(text) for text in cluster.container.mounts]
    written = {"--run": run.resolve(), "the working directory": Path.cwd()}
    if cluster.health is not None:
        written["health.scratch_dir"] = Path(cluster.health.scratch_dir)
    read = {key: Path(path) for key, value in _texts(loaded.recipe.model_dump(mode="json")) if (path := _absolute(value))}
    # A link is of use only where what it points to is there too.
    places = [(name, place) for name, path in {**written, **read}.items() for place in dict.fromkeys((path, path.resolve()))]
    return [
        UserError(
            f"{name} is {place}, and {problem}",
            rule="jobs run in a container, where a path exists under its own name if container.mounts says so",
            fix=f"mount it, for example {place}:{place}, or choose a path below a mount",
        )
        for name, place in places
        if (problem := _problem(mounts, PurePosixPath(place), is_written=name in written))
    ]


def needed_variables(recipe: Recipe) -> dict[str, str]:
    """Environment variables that the recipe reads, by the key that names them."""
    found: dict[str, str] = {}
    for key, value in _texts(recipe.model_dump(mode="json")):
        if key.endswith(".endpoint") and value.startswith(FROM_ENVIRONMENT):
            found[key] = value.removeprefix(FROM_ENVIRONMENT)
        elif key.endswith(".api_key_env"):
            found[key] = value
    return found


def missing_variables(loaded: LoadedRecipe, environment: Mapping[str, str]) -> list[UserError]:
    """One refusal per variable that the recipe reads and the cluster file does not set: the shell's are not handed on."""
    return [
        UserError(
            f"{key} names the environment variable {name}, which the cluster file's `environment` does not set",
            rule="jobs get no variable of the submitting shell",
            fix=f"add {name} to `environment` in the cluster file",
        )
        for key, name in needed_variables(loaded.recipe).items()
        if not environment.get(name)
    ]


def _problem(mounts: list[_Mount], path: PurePosixPath, *, is_written: bool) -> str:
    """Why a path is not in the container as it is outside; empty where it is."""
    covering = [mount for mount in mounts if path.is_relative_to(mount.inside)]
    if not covering:
        return "no mount of container.mounts shows it"
    # The innermost mount hides those around it.
    mount = max(covering, key=lambda one: len(one.inside.parts))
    source = mount.outside / path.relative_to(mount.inside)
    if source != path:
        return f"the container shows {source} there"
    return "its mount is read-only" if is_written and mount.is_read_only else ""


def _absolute(value: str) -> str | None:
    """The path that a text of the recipe is, where it leads out of the working directory; `{run}` and `{recipe}` are in the run's own."""
    if value.startswith(".."):
        return os.path.normpath(Path.cwd() / value)
    return os.path.normpath(value) if value.startswith("/") else None


def _texts(value: Any, key: str = "") -> Iterator[tuple[str, str]]:
    """Every text of a recipe with its dotted key."""
    if isinstance(value, str):
        yield key, value
    elif isinstance(value, dict | list):
        for name, item in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _texts(item, f"{key}.{name}" if key else str(name))
