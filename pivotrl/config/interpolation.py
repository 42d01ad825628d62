"""How much the `${...}` of a recipe stand for, counted before OmegaConf writes it out: a few lines may stand for a billion values.

Pure; called by config/load.py before it resolves. References inside references are refused, because what they name is known only then.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, cast

from pivotrl.config.yaml_text import MAX_DEPTH, MAX_VALUES
from pivotrl.errors import UserError

_MAX_CHARACTERS = 2**24
_REFERENCE = re.compile(r"\$\{([^${}]*)\}")
_NESTED = re.compile(r"\$\{[^{}]*\$\{")
_RULE = f"what it stands for has at most {MAX_VALUES:,} values, {_MAX_CHARACTERS:,} characters and {MAX_DEPTH} levels"


def refuse_explosion(values: Mapping[str, Any], *, source: str) -> None:
    """Refuses references that stand for too much.

    Args:
        values: the merged tree as written, references left as text.
        source: the file, for the message.

    Raises:
        UserError: naming the key.
    """
    sizes: dict[tuple[str, ...], tuple[int, int, int]] = {}

    def size(path: tuple[str, ...], depth: int) -> tuple[int, int, int]:
        """Values, characters and levels of what stands at a place, references written out; a place being counted counts as nothing."""
        if path in sizes:
            return sizes[path]
        sizes[path] = (0, 0, 0)
        value = _at(values, path)
        # Beyond this depth the place is refused anyway, and nothing more need be counted.
        parts = [size(part, depth + 1) for part in _below(value, path)] if depth <= MAX_DEPTH else []
        characters = len(value) if isinstance(value, str) else 0
        total = 1 + sum(one[0] for one in parts), characters + sum(one[1] for one in parts), 1 + max((one[2] for one in parts), default=0)
        if total[0] > MAX_VALUES or total[1] > _MAX_CHARACTERS or max(total[2], depth) > MAX_DEPTH:
            raise UserError(f"{'.'.join(path) or 'the recipe'} of {source} stands for too much", rule=_RULE, fix="take out references")
        sizes[path] = total
        return total

    def _below(value: Any, path: tuple[str, ...]) -> list[tuple[str, ...]]:
        if isinstance(value, dict):
            return [(*path, str(key)) for key in cast("dict[Any, Any]", value)]
        if isinstance(value, list):
            return [(*path, str(index)) for index in range(len(cast("list[Any]", value)))]
        if not isinstance(value, str) or "${" not in value:
            return []
        if _NESTED.search(value):
            raise UserError(f"{'.'.join(path)} of {source} is {value[:60]!r}", rule="a ${...} holds no other ${...}", fix="write the key itself")
        return [_target(reference.strip(), path) for reference in _REFERENCE.findall(value)]

    size((), 0)


def _target(reference: str, path: tuple[str, ...]) -> tuple[str, ...]:
    """The place that a reference in `path` names: from the top, or with leading dots from the section that holds it."""
    keys = tuple(key for key in re.split(r"[.\[\]]+", reference) if key)
    num_dots = len(reference) - len(reference.lstrip("."))
    return (*path[: max(len(path) - num_dots, 0)], *keys) if num_dots else keys


def _at(values: Any, path: tuple[str, ...]) -> Any:
    """None for a place that is not there; OmegaConf says so."""
    for key in path:
        if isinstance(values, list) and key.isdigit():
            values = next(iter(cast("list[Any]", values)[int(key) :]), None)
        elif isinstance(values, dict):
            values = next((value for name, value in cast("dict[Any, Any]", values).items() if str(name) == key), None)
        else:
            return None
    return values
