"""A tool's JSON schema reduced to what comparing arguments needs, compiled once per tool.

Not a validator: an argument that breaks its schema is still compared with the expert's. What matters here is which spellings mean the same
value: which type a value is coerced to, which keys may be left out, which lists are sets, which strings are exact.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from functools import lru_cache
from typing import Any

from pivotrl.types import Tool, ToolOrigin

# Deeper schemas (or schemas that refer to themselves) are treated as unknown below this level.
_MAX_SCHEMA_DEPTH = 16
_CACHED_TOOLS = 8192
_EXACT_KEYWORDS = ("enum", "const", "pattern", "format")
_ID_SUFFIXES = ("_id", "_ids", "Id", "Ids")


class Coercion(StrEnum):
    """The one scalar type a schema allows, to which other spellings of a value are brought."""

    NONE = "none"
    NUMBER = "number"
    STRING = "string"
    BOOLEAN = "boolean"


_COERCIONS = {"integer": Coercion.NUMBER, "number": Coercion.NUMBER, "string": Coercion.STRING, "boolean": Coercion.BOOLEAN}


class Absent(StrEnum):
    """The default of a parameter that has none; apart from null, which is a value."""

    ABSENT = "absent"


@dataclass(frozen=True, slots=True)
class ValueRule:
    """How one value is brought to its canonical form."""

    coercion: Coercion = Coercion.NONE
    is_exact: bool = False
    """Strings keep case and inner spaces: enum values, formats, patterns, ids."""
    is_set: bool = False
    """Lists are compared without order and repetition (uniqueItems)."""
    items: ValueRule | None = None
    members: Mapping[str, ValueRule] = field(default_factory=dict[str, "ValueRule"])
    defaults: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Default of each optional member that states one."""
    droppable_nulls: frozenset[str] = frozenset()
    """Optional members for which null means the same as leaving them out."""


ANY_VALUE = ValueRule()


class _ByIdentity:
    """Makes a tool a cache key by identity (its schema is a dict, so it has no hash); holds the tool, so the identity is not reused."""

    __slots__ = ("tool",)

    def __init__(self, tool: Tool) -> None:
        self.tool = tool

    def __hash__(self) -> int:
        return id(self.tool)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _ByIdentity) and other.tool is self.tool


def rule_of(tool: Tool | None, origin: ToolOrigin) -> ValueRule:
    """The rule for a tool's arguments. A schema that was inferred from calls has no authority: types, defaults and optional keys are unknown."""
    if tool is None or origin in (ToolOrigin.INFERRED, ToolOrigin.NONE):
        return ANY_VALUE
    return _compile_tool(_ByIdentity(tool))


@lru_cache(maxsize=_CACHED_TOOLS)
def _compile_tool(key: _ByIdentity) -> ValueRule:
    root = key.tool.parameters
    return _compile(root, root, name="", depth=0)


def _compile(schema: Any, root: Mapping[str, Any], *, name: str, depth: int) -> ValueRule:
    if depth > _MAX_SCHEMA_DEPTH or not isinstance(schema, Mapping):
        return ANY_VALUE
    reference = schema.get("$ref")
    if isinstance(reference, str):
        return _compile(_resolve(reference, root), root, name=name, depth=depth + 1)
    branches = _branches(schema)
    if branches is not None:
        if len(branches) == 1:
            return _compile(branches[0], root, name=name, depth=depth + 1)
        return ValueRule(is_exact=_is_exact(schema, name) or any(_is_exact(branch, name) for branch in branches))
    members, defaults, droppable = _compile_members(schema, root, depth)
    return ValueRule(
        coercion=_coercion(schema.get("type")),
        is_exact=_is_exact(schema, name),
        is_set=schema.get("uniqueItems") is True,
        items=_compile(schema["items"], root, name=name, depth=depth + 1) if "items" in schema else None,
        members=members,
        defaults=defaults,
        droppable_nulls=droppable,
    )


def _compile_members(schema: Mapping[str, Any], root: Mapping[str, Any], depth: int) -> tuple[dict[str, ValueRule], dict[str, Any], frozenset[str]]:
    properties = schema.get("properties")
    if not isinstance(properties, Mapping):
        return {}, {}, frozenset()
    required = schema.get("required")
    required_keys = set(required) if isinstance(required, list | tuple) else set[str]()
    members = {key: _compile(value, root, name=key, depth=depth + 1) for key, value in properties.items()}
    defaults: dict[str, Any] = {}
    droppable: set[str] = set()
    for key, value in properties.items():
        if key in required_keys:
            continue
        default = value.get("default", Absent.ABSENT) if isinstance(value, Mapping) else Absent.ABSENT
        if default is None or default is Absent.ABSENT:
            droppable.add(key)
        else:
            defaults[key] = default
    return members, defaults, frozenset(droppable)


def _resolve(reference: str, root: Mapping[str, Any]) -> Any:
    if not reference.startswith("#/"):
        return None
    place: Any = root
    for part in reference[2:].split("/"):
        if not isinstance(place, Mapping) or part not in place:
            return None
        place = place[part]
    return place


def _branches(schema: Mapping[str, Any]) -> list[Mapping[str, Any]] | None:
    """The alternatives of a schema that are not null, or None where it has no alternatives."""
    for keyword in ("anyOf", "oneOf", "allOf"):
        alternatives = schema.get(keyword)
        if isinstance(alternatives, list) and alternatives:
            return [branch for branch in alternatives if isinstance(branch, Mapping) and branch.get("type") != "null"]
    return None


def _coercion(declared: Any) -> Coercion:
    types = [declared] if isinstance(declared, str) else declared
    if not isinstance(types, list):
        return Coercion.NONE
    coercions = {_COERCIONS.get(kind, Coercion.NONE) for kind in types if isinstance(kind, str) and kind != "null"}
    return coercions.pop() if len(coercions) == 1 else Coercion.NONE


def _is_exact(schema: Mapping[str, Any], name: str) -> bool:
    is_id = name == "id" or name.endswith(_ID_SUFFIXES)
    return is_id or any(keyword in schema for keyword in _EXACT_KEYWORDS)
