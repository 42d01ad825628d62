"""From recipe.yaml, what it extends and `key=value` words to a checked `Recipe`, with the source of every value.

Later wins: each file of `extends` in order, then the file itself, then the command line. A layer that gives a section another
`type` or `rule` replaces the section whole, since the old form's keys mean nothing in the new one. OmegaConf merges and
resolves `${...}`; pydantic checks. Every problem is a `UserError` that names the key, its value and the rule.
"""

from __future__ import annotations

import copy
import difflib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast, get_args

import orjson
from pydantic import BaseModel, TypeAdapter, ValidationError

from pivotrl.config.interpolation import refuse_explosion
from pivotrl.config.schema import Recipe
from pivotrl.config.verifiers import VerifierConfig
from pivotrl.config.yaml_text import MAX_DEPTH, read_yaml, read_yaml_file
from pivotrl.errors import UserError

RECIPE_FILE = "recipe.yaml"
COMMAND_LINE = "command line"
DEFAULT = "default"
_EXTENDS = "extends"
_MISSING = "???"
# The keys that say which form a section has.
_TAGS = ("type", "rule")


@dataclass(frozen=True, slots=True)
class LoadedRecipe:
    """A checked recipe with where its values came from."""

    recipe: Recipe
    directory: Path
    """The recipe's folder: what `{recipe}` in a path stands for."""
    origins: Mapping[str, str]
    """Dotted key to `file`, `command line` or `default`, for every leaf."""
    overrides: tuple[str, ...] = ()
    """The words of the command line, for processes that load the same recipe."""

    def expand(self, path: str, run: Path) -> Path:
        """A path of the recipe with `{recipe}` and `{run}` replaced."""
        return Path(self.expand_text(path, run))

    def expand_text(self, text: str, run: Path) -> str:
        """A word of the recipe with `{recipe}` and `{run}` replaced."""
        return text.replace("{recipe}", str(self.directory)).replace("{run}", str(run))

    def section(self, *names: str) -> dict[str, Any]:
        """JSON-ready dump of some sections, for a stage's manifest."""
        return self.recipe.model_dump(mode="json", include=set(names))


def load_recipe(directory: Path, overrides: Sequence[str] = ()) -> LoadedRecipe:
    """Loads and checks RECIPE/recipe.yaml.

    Args:
        overrides: words of the form ``train.num_steps=3``; values are YAML.

    Raises:
        UserError: for a missing file, broken YAML, a cycle in `extends`, an unknown key or a value outside its rule.
    """
    path = directory / RECIPE_FILE
    if not path.is_file():
        raise UserError(
            f"{directory} holds no {RECIPE_FILE}",
            rule=f"a recipe is a folder with {RECIPE_FILE}",
            fix="name such a folder, for example recipes/quickstart",
        )
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    origins: dict[str, str] = {}
    merged: Any = OmegaConf.create({})
    for file, tree in _layers(path, ()):
        origins.update({key: file.name if file.parent == directory else str(file) for key in _leaves(_plain(tree))})
        merged = _merge(merged, tree)
    for word in overrides:
        merged = _merge(merged, _override(word, origins))
    refuse_explosion(_plain(merged), source=str(path))
    try:
        values = OmegaConf.to_container(merged, resolve=True, throw_on_missing=False)
    except OmegaConfBaseException as error:
        raise UserError(
            f"{path}: {_one_line(error)}", rule="every ${...} must name an existing key", fix="correct the interpolation or add the key"
        ) from error
    values = cast("dict[str, Any]", values)
    _refuse_missing(values, path)
    recipe = _checked(values, path)
    known = {key: origins.get(key, DEFAULT) for key in _leaves(recipe.model_dump(mode="json"))}
    known.update({key: origin for key, origin in origins.items() if any(leaf.startswith(f"{key}.") or leaf == key for leaf in known)})
    return LoadedRecipe(recipe, directory, known, tuple(overrides))


def load_verifier(name: str, overrides: Sequence[str] = ()) -> VerifierConfig:
    """A verifier's section from the words of a command line, for verbs that work without a recipe.

    Args:
        name: the section's `type`.
        overrides: words of the form ``message=exact``; values are YAML.

    Raises:
        UserError: for an unknown name or key, a missing key, or a value outside its rule.
    """
    from omegaconf import OmegaConf

    names = sorted(tag for model in section_models(VerifierConfig) for tag in _tags(model))
    if name not in names:
        close = difflib.get_close_matches(name, names, n=1)
        raise UserError(
            f"--verifier is {name!r}",
            rule=f"it must be one of {', '.join(names)}",
            fix=f"did you mean {close[0]!r}?" if close else "use one of these names",
        )
    merged: Any = OmegaConf.create({"type": name})
    for word in overrides:
        merged = _merge(merged, _override(word, {}))
    values = _plain(merged)
    try:
        return TypeAdapter[VerifierConfig](VerifierConfig).validate_python(values)
    except ValidationError as error:
        raise _problem(error, values, source=f"--verifier {name}", section=("verifier",), add="give it after the verifier: {key}=VALUE") from error


def load_section[S: BaseModel](model: type[S], *, file: Path | None, overrides: Sequence[str] = ()) -> S:
    """A section that stands alone, outside any recipe: from a YAML file, words of a command line, or both.

    Raises:
        UserError: for a file that cannot be read, an unknown key, a missing key, or a value outside its rule.
    """
    merged = _merged_file(file)
    for word in overrides:
        merged = _merge(merged, _override(word, {}))
    values = _plain(merged)
    try:
        return model.model_validate(values)
    except ValidationError as error:
        source = str(file) if file is not None else "command line"
        raise _problem(error, values, source=source, section=(), add="give it as {key}=VALUE", root=model) from error


def load_keys(file: Path) -> frozenset[str]:
    """The top keys of such a file, to tell which section it holds.

    Raises:
        UserError: for a file that cannot be read.
    """
    return frozenset(map(str, _merged_file(file)))


def file_words(file: Path) -> list[str]:
    """A YAML file with keys of a recipe, what it extends included, as `words`.

    Raises:
        UserError: for a file that cannot be read.
    """
    return words(_plain(_merged_file(file)))


def words(tree: Mapping[str, Any]) -> list[str]:
    """A part of a recipe as the words of a command line that lay it over another, in order.

    A section that states its form stays one word, since it replaces another form whole.

    >>> words({"train": {"kl": {"beta": 0}}, "select": {"rule": "eq5", "lambda_diff": 0.9}})
    ['train.kl.beta=0', 'select={"rule":"eq5","lambda_diff":0.9}']
    """
    return [f"{key}={orjson.dumps(value).decode()}" for key, value in _sections(tree, "")]


def _sections(tree: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        section: Mapping[str, Any] = cast("Mapping[str, Any]", value) if isinstance(value, Mapping) else {}
        if section and not any(tag in section for tag in _TAGS) and not any("." in name for name in section):
            yield from _sections(section, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _merged_file(file: Path | None) -> Any:
    from omegaconf import OmegaConf

    if file is not None and not file.is_file():
        raise UserError(f"{file} is no file", rule="the option names a YAML file", fix="correct the path")
    merged: Any = OmegaConf.create({})
    for _, tree in _layers(file, ()) if file is not None else ():
        merged = _merge(merged, tree)
    return merged


def _layers(path: Path, above: tuple[Path, ...]) -> Iterator[tuple[Path, Any]]:
    from omegaconf import DictConfig, OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    if path.resolve() in above:
        chain = " -> ".join(file.name for file in (*above, path))
        raise UserError(f"`extends` goes in a circle: {chain}", rule="a file cannot extend itself", fix="remove one of the `extends`")
    try:
        value: Any = read_yaml_file(path)
        tree: Any = OmegaConf.create({}) if value is None else OmegaConf.create(value) if type(value) in (dict, list) else value
    except FileNotFoundError as error:
        raise UserError(
            f"{above[-1].name} extends {path}, which does not exist",
            rule="`extends` names files relative to the file it stands in",
            fix="correct the path",
        ) from error
    except (OmegaConfBaseException, OSError) as error:
        raise UserError(f"{path} is not readable YAML: {_one_line(error)}", rule="a recipe is a YAML mapping", fix="correct the file") from error
    if not isinstance(tree, DictConfig):
        raise UserError(
            f"{path} holds a {'list' if OmegaConf.is_list(tree) else type(tree).__name__}",
            rule="a recipe is a YAML mapping at its top",
            fix="write `key: value` lines",
        )
    extends = tree.pop(_EXTENDS, [])
    for name in [extends] if isinstance(extends, str) else list(extends):
        yield from _layers(path.parent / str(name), (*above, path.resolve()))
    yield path, tree


def _merge(below: Any, above: Any) -> Any:
    from omegaconf import OmegaConf

    below = copy.deepcopy(below)
    _drop_replaced(below, above)
    return OmegaConf.merge(below, above)


def _drop_replaced(below: Any, above: Any) -> None:
    """Takes sections out of `below`, at any depth, to which `above` gives another form."""
    from omegaconf import DictConfig, OmegaConf

    for key in list(above):
        if OmegaConf.is_interpolation(below, key) and _states_form(above, key):
            # Merged, the section would be laid over what the interpolation stands for.
            del below[key]
        if key not in below or any(OmegaConf.is_interpolation(tree, key) or OmegaConf.is_missing(tree, key) for tree in (below, above)):
            continue
        old, section = below.get(key), above.get(key)
        if not isinstance(section, DictConfig) or not isinstance(old, DictConfig):
            continue
        if any(tag in section and section[tag] != old.get(tag) for tag in _TAGS):
            del below[key]
        else:
            _drop_replaced(old, section)


def _states_form(tree: Any, key: Any) -> bool:
    """Whether the value of a key is a section that says which form it has."""
    from omegaconf import DictConfig, OmegaConf

    section = None if OmegaConf.is_interpolation(tree, key) or OmegaConf.is_missing(tree, key) else tree.get(key)
    return isinstance(section, DictConfig) and any(tag in section for tag in _TAGS)


def _override(word: str, origins: dict[str, str]) -> Any:
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    key, equals, text = word.partition("=")
    if not equals or not key.strip():
        raise UserError(
            f"{word!r} is not an override", rule="words after the recipe have the form key=value", fix="write for example train.num_steps=3"
        )
    if len(re.split(r"[.\[]", key)) > MAX_DEPTH:
        raise UserError(f"{word[:60]!r} names a key too deep", rule=f"keys have at most {MAX_DEPTH} levels", fix="correct the key")
    value, tree = read_yaml(text, source=repr(word[:60])), OmegaConf.create({})
    try:
        OmegaConf.update(tree, key, value)
    except (OmegaConfBaseException, IndexError, ValueError) as error:
        raise UserError(f"{word!r}: {_one_line(error)}", rule="the value is YAML", fix="quote it for the shell and for YAML") from error
    origins.update(dict.fromkeys(_leaves(_plain(tree)), COMMAND_LINE))
    return tree


def _leaves(tree: Mapping[Any, Any], prefix: str = "") -> Iterator[str]:
    """Dotted keys of everything that is not a non-empty mapping; lists are leaves."""
    for key, value in tree.items():
        if isinstance(value, Mapping) and value:
            yield from _leaves(cast("Mapping[Any, Any]", value), f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}"


def _plain(tree: Any) -> dict[str, Any]:
    """The mapping as written, interpolations and `???` left as text."""
    from omegaconf import OmegaConf

    return cast("dict[str, Any]", OmegaConf.to_container(tree, resolve=False, throw_on_missing=False))


def _refuse_missing(values: Mapping[str, Any], path: Path, prefix: str = "") -> None:
    for key, value in values.items():
        if value == _MISSING:
            raise UserError(
                f"{prefix}{key} is not set in {path}", rule="the recipe leaves it to you", fix=f"give it on the command line: {prefix}{key}=VALUE"
            )
        if isinstance(value, dict):
            _refuse_missing(cast("dict[str, Any]", value), path, f"{prefix}{key}.")


def _checked(values: Mapping[str, Any], path: Path) -> Recipe:
    try:
        return Recipe.model_validate(values)
    except ValidationError as error:
        raise _problem(error, values, source=str(path), section=(), add="add `{key}:` to the recipe") from error


def _problem(
    error: ValidationError, values: Mapping[str, Any], *, source: str, section: Sequence[str], add: str, root: type[BaseModel] = Recipe
) -> UserError:
    """The first problem of a checked section, in the user's words.

    Args:
        section: keys from the root down to the section that was checked; left out of the names shown.
        add: how a missing key is given, with ``{key}`` for its name.
        root: the section that holds everything.
    """
    problems = error.errors(include_url=False)
    # A misspelt key is usually why another one is missing, so it is the one to name.
    first = next((problem for problem in problems if problem["type"] == "extra_forbidden"), problems[0])
    more = f" (and {error.error_count() - 1} more)" if error.error_count() > 1 else ""
    inside = [str(part) for part in first["loc"]]
    location = [*section, *inside]
    key = ".".join(_without_tags(inside, values)) or ("the recipe" if root is Recipe else "the file")
    value = "" if first["type"] in ("missing", "extra_forbidden") or not inside else f" is {first['input']!r}"
    if first["type"] == "extra_forbidden":
        known = _fields_at(root, location[:-1])
        close = difflib.get_close_matches(location[-1], known, n=1)
        fix = f"did you mean {close[0]!r}?" if close else f"known keys there: {', '.join(sorted(known))}"
        return UserError(f"{source}: unknown key {key}{more}", rule="every key must be in the schema", fix=fix)
    if first["type"] == "missing":
        return UserError(f"{source}: {key} is missing{more}", rule=f"it has no default: {_description(root, location)}", fix=add.format(key=key))
    message = first["msg"].removeprefix("Value error, ")
    return UserError(f"{source}: {key}{value}{more}", rule=message[0].lower() + message[1:], fix=f"correct {key}: {_description(root, location)}")


def _without_tags(location: Sequence[str], values: Any) -> list[str]:
    """Pydantic puts a union's tag into the location; the user's key path has none."""
    path: list[str] = []
    for part in location:
        mapping = cast("Mapping[str, Any]", values) if isinstance(values, Mapping) else None
        if mapping is not None and part not in mapping and part in [mapping.get(tag) for tag in _TAGS]:
            continue
        path.append(part)
        if mapping is not None:
            values = mapping.get(part)
        elif isinstance(values, Sequence) and not isinstance(values, str) and part.isdigit():
            values = cast("Sequence[Any]", values)[int(part)]
    return path


def section_models(annotation: Any) -> Iterator[type[BaseModel]]:
    """All sections an annotation can hold, through unions, tuples, aliases and Annotated."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    aliased: Any = getattr(cast("Any", annotation), "__value__", None)
    for part in [aliased, *get_args(annotation)]:
        if part is not None:
            yield from section_models(part)


def _sections_at(root: type[BaseModel], location: Sequence[str]) -> list[type[BaseModel]]:
    sections: list[type[BaseModel]] = [root]
    for part in location:
        below = [model for section in sections if part in section.model_fields for model in section_models(section.model_fields[part].annotation)]
        if below:
            sections = below
        elif tagged := [model for model in sections if part in _tags(model)]:
            sections = tagged
    return sections


def _tags(model: type[BaseModel]) -> list[str]:
    return [str(tag) for name in _TAGS if name in model.model_fields for tag in get_args(model.model_fields[name].annotation)]


def _fields_at(root: type[BaseModel], location: Sequence[str]) -> list[str]:
    return [name for section in _sections_at(root, location) for name in section.model_fields]


def _description(root: type[BaseModel], location: Sequence[str]) -> str:
    for section in _sections_at(root, location[:-1]):
        if location and location[-1] in section.model_fields:
            return " ".join((section.model_fields[location[-1]].description or location[-1]).split())
    return "see docs/config.md"


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())
