"""What a launched run needs of the submitting machine, copied into the run: the code by its content, and the recipe with all its values.

A job that waits for days runs the code and the recipe it was submitted with, whatever happens to the checkout meanwhile. Called by render.py.
"""

from __future__ import annotations

import compileall
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pivotrl
from pivotrl.config.load import RECIPE_FILE, LoadedRecipe
from pivotrl.errors import UserError
from pivotrl.identity import content_id, file_id
from pivotrl.rundir import COMMIT_FILE, atomic_write, source_commit

RECIPE = "recipe"
_PACKAGE = Path(pivotrl.__file__).resolve().parent
_HERE = "{recipe}/"


def snapshot_code(launch_dir: Path) -> Path:
    """Copies the installed package to LAUNCH/code/<content id>/pivotrl and returns the directory to import it from.

    It is compiled for this version of Python, by which jobs with the same one start sooner; others compile it themselves.
    """
    files = {str(path.relative_to(_PACKAGE)): path for path in sorted(_PACKAGE.rglob("*")) if path.is_file() and "__pycache__" not in path.parts}
    commit = source_commit()
    target = launch_dir / "code" / content_id(commit, {name: file_id(path) for name, path in files.items()})
    if target.is_dir():
        return target
    unfinished = target.with_name(f".{target.name}.tmp")
    shutil.rmtree(unfinished, ignore_errors=True)
    for name, path in files.items():
        copy = unfinished / _PACKAGE.name / name
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(path, copy)
    compileall.compile_dir(unfinished, quiet=2, stripdir=unfinished, prependdir=target)
    (unfinished / COMMIT_FILE).write_text(commit + "\n")
    unfinished.rename(target)
    return target


def check_files(loaded: LoadedRecipe) -> None:
    """Raises UserError where a file that the recipe names below `{recipe}` does not exist, or two from outside would get one name."""
    places: dict[str, Path] = {}

    def check(value: str) -> str:
        if value.startswith(_HERE):
            source, name = _place(value, loaded.directory)
            if not source.exists():
                raise UserError(f"{value} is {source}, which does not exist", rule="jobs get a copy of it", fix="correct the path in the recipe")
            if (other := places.setdefault(name, source.resolve())) != source.resolve():
                raise UserError(f"{other} and {source.resolve()} have one name", rule=f"jobs get both copied to {name}", fix="rename one of them")
        return value

    _map_text(loaded.recipe.model_dump(mode="json"), check)


def snapshot_recipe(loaded: LoadedRecipe, launch_dir: Path) -> Path:
    """Writes LAUNCH/recipe/recipe.yaml with every value of the recipe, and beside it the files it names below its own folder.

    A file that the recipe names outside its folder (`{recipe}/../x`) is copied to files/ and the value changed to it.

    The files have passed `check_files`.
    """
    from omegaconf import OmegaConf

    target = launch_dir / RECIPE
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir(parents=True)

    def keep(value: str) -> str:
        return _keep_file(value, loaded.directory, target) if value.startswith(_HERE) else value

    values = _map_text(loaded.recipe.model_dump(mode="json"), keep)
    atomic_write(target / RECIPE_FILE, OmegaConf.to_yaml(OmegaConf.create(values)).encode())
    return target


def _keep_file(value: str, directory: Path, target: Path) -> str:
    source, name = _place(value, directory)
    copy = target / name
    copy.parent.mkdir(parents=True, exist_ok=True)
    if source.is_dir():
        shutil.copytree(source, copy, dirs_exist_ok=True)
    else:
        shutil.copy2(source, copy)
    return value if source.resolve().is_relative_to(directory.resolve()) else _HERE + name


def _place(value: str, directory: Path) -> tuple[Path, str]:
    """The file that a value means, and its path below the copied recipe."""
    source = directory / value.removeprefix(_HERE)
    inside = source.resolve().is_relative_to(directory.resolve())
    return source, str(source.resolve().relative_to(directory.resolve())) if inside else f"files/{source.name}"


def _map_text(value: Any, change: Callable[[str], str]) -> Any:
    if isinstance(value, str):
        return change(value)
    if isinstance(value, dict):
        return {key: _map_text(item, change) for key, item in value.items()}
    return [_map_text(item, change) for item in value] if isinstance(value, list) else value
