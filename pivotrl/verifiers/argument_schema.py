"""A tool's JSON schema reduced to what comparing arguments needs, compiled once per tool.

Not a validator: an argument that breaks its schema is still compared with the expert's. What matters here is which spellings mean the same
value: which type a value is coerced to, what kind of string it is, which keys may be left out, which lists have no order. `$ref`
(recursive ones too), `allOf`, `anyOf` and `oneOf` are followed; a value of several forms is read by the first form it fits.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, cast

from pivotrl.types import State, Tool, ToolOrigin
from pivotrl.verifiers.argument_kinds import Kind, kind_by_name, kind_by_schema

# Beyond these a schema counts as unknown, so that no schema costs more than a moment.
_MAX_SCHEMA_DEPTH = 24
_MAX_RULES_PER_TOOL = 4000
_MAX_REFERENCES = 16
_MAX_REMEMBERED_NAMES = 256
_CACHED_TOOLS = 8192


class Coercion(StrEnum):
    """The one scalar type a schema allows, to which other spellings of a value are brought."""

    NONE = "none"
    NUMBER = "number"
    STRING = "string"
    BOOLEAN = "boolean"


_COERCIONS = {"integer": Coercion.NUMBER, "number": Coercion.NUMBER, "string": Coercion.STRING, "boolean": Coercion.BOOLEAN}


class Order(StrEnum):
    """What the places of a list's items mean."""

    COUNTS = "counts"
    BAG = "bag"
    """Places mean nothing, repetition does (the recipe's `unordered`)."""
    SET = "set"
    """Neither counts (uniqueItems)."""


@dataclass(slots=True, eq=False)
class ValueRule:
    """How one value is brought to its canonical form. Filled by the compiler in place, because schemas refer to themselves; then never changed."""

    kind: Kind = Kind.PLAIN
    coercion: Coercion = Coercion.NONE
    choices: tuple[Any, ...] = ()
    """Members of an enum (or the one value of a const)."""
    order: Order = Order.COUNTS
    items: ValueRule | None = None
    first_items: tuple[ValueRule, ...] = ()
    """Rules of the first items of a tuple (prefixItems)."""
    members: dict[str, ValueRule] = field(default_factory=dict[str, "ValueRule"])
    """Rules of an object's members; knows one for every name."""
    defaults: dict[str, Any] = field(default_factory=dict[str, Any])
    """Default of each optional member that states one."""
    droppable_nulls: frozenset[str] = frozenset()
    """Optional members for which null means the same as leaving them out."""
    ignored: frozenset[str] = frozenset()
    """Members that the recipe leaves out of the comparison."""
    forms: tuple[ValueRule, ...] = ()
    """The alternatives of a value that has several."""
    json_types: frozenset[str] = frozenset()
    """Types the schema allows; empty where it says nothing."""
    required: frozenset[str] = frozenset()
    is_closed: bool = False
    """No other members than `members` are allowed."""

    def fits(self, value: Any) -> bool:
        """Whether a value has this form, looking at its type, its choices and its own members' names and constants."""
        kind = json_type(value)
        if self.json_types and kind not in self.json_types and not (kind == "integer" and "number" in self.json_types):
            return False
        if self.choices and value not in self.choices:
            return False
        if not isinstance(value, dict):
            return True
        if not value.keys() >= self.required or (self.is_closed and not value.keys() <= self.members.keys()):
            return False
        constants = ((key, rule.choices[0]) for key, rule in self.members.items() if len(rule.choices) == 1 and key in value)
        return all(value[key] == constant for key, constant in constants)


def json_type(value: Any) -> str:
    """The JSON type of a parsed value."""
    match value:
        case None:
            return "null"
        case bool():
            return "boolean"
        case int():
            return "integer"
        case float():
            return "integer" if value.is_integer() else "number"
        case str():
            return "string"
        case list():
            return "array"
        case _:
            return "object"


@dataclass(frozen=True, slots=True)
class RecipeRules:
    """What the recipe says about arguments. Keys are ``tool.argument`` (or ``tool.argument.member``); ``*`` stands for every tool."""

    kinds: Mapping[str, Kind] = field(default_factory=dict[str, Kind])
    unordered: frozenset[str] = frozenset()
    ignored: frozenset[str] = frozenset()
    is_search: bool = False
    """Batched queries and pages are sets, and a URL is the page behind it."""


class RuleBook:
    """The rules of tools, compiled once per tool under one recipe."""

    def __init__(self, recipe: RecipeRules) -> None:
        self._recipe = recipe
        self._by_tool: dict[int, tuple[Tool, ValueRule]] = {}
        self._by_name: dict[str, ValueRule] = {}

    def rule(self, state: State, name: str) -> ValueRule:
        """The rule for a tool's arguments. A schema that was inferred from calls has no authority: types, defaults and optional keys are
        unknown then, and only names speak."""
        if state.tool_origin not in (ToolOrigin.INFERRED, ToolOrigin.NONE):
            for tool in state.tools:
                if tool.name == name:
                    return self._of_tool(tool)
        if (rule := self._by_name.get(name)) is None:
            if len(self._by_name) >= _CACHED_TOOLS:
                self._by_name.clear()
            rule = self._by_name[name] = _Compiler(name, {}, self._recipe).unknown(())
        return rule

    def _of_tool(self, tool: Tool) -> ValueRule:
        # By identity: a schema is a dict and has no hash. The entry holds the tool, so the identity is not reused.
        if (entry := self._by_tool.get(id(tool))) is None:
            if len(self._by_tool) >= _CACHED_TOOLS:
                self._by_tool.clear()
            entry = self._by_tool[id(tool)] = (tool, _Compiler(tool.name, tool.parameters, self._recipe).compile(tool.parameters, ()))
        return entry[1]


class _Members(dict[str, ValueRule]):
    """Rules by member; a name that the schema does not know gets the rule of its name or of additionalProperties."""

    def __init__(self, compiler: _Compiler, path: tuple[str, ...], other: Any) -> None:
        self._compiler, self._path, self._other = compiler, path, other
        self._unknown: dict[str, ValueRule] = {}

    def __missing__(self, key: str) -> ValueRule:
        if (rule := self._unknown.get(key)) is None:
            path = (*self._path, key)
            is_schema = isinstance(self._other, Mapping) and bool(self._other)
            rule = self._compiler.compile(self._other, path) if is_schema else self._compiler.unknown(path)
            if len(self._unknown) < _MAX_REMEMBERED_NAMES:
                self._unknown[key] = rule
        return rule


class _Compiler:
    """One tool's schema to rules. A definition used in several places has one rule per name it is used under, so what the recipe says of its
    members by path holds in all of them."""

    def __init__(self, tool: str, root: Mapping[str, Any], recipe: RecipeRules) -> None:
        self._tool, self._root, self._recipe = tool, root, recipe
        self._compiled: dict[tuple[int, str], tuple[Any, ValueRule]] = {}
        self._num_rules = 0

    def compile(self, schema: Any, path: tuple[str, ...]) -> ValueRule:
        if not isinstance(schema, Mapping) or len(path) > _MAX_SCHEMA_DEPTH or self._num_rules > _MAX_RULES_PER_TOOL:
            return self.unknown(path)
        # The entry holds the schema, so the identity in its key is not reused. Entered before it is filled: the schema may hold itself.
        key = (id(schema), path[-1] if path else "")
        if (entry := self._compiled.get(key)) is not None:
            return entry[1]
        self._num_rules += 1
        rule = ValueRule()
        self._compiled[key] = (schema, rule)
        self._fill(rule, self._merged(cast("Mapping[str, Any]", schema), 0), path)
        return rule

    def unknown(self, path: tuple[str, ...]) -> ValueRule:
        """The rule of a value of which only the name is known."""
        rule = ValueRule()
        self._name(rule, {}, path)
        rule.members = _Members(self, path, None)
        rule.items = rule if path else None
        return rule

    def _fill(self, rule: ValueRule, schema: Mapping[str, Any], path: tuple[str, ...]) -> None:
        alternatives = _alternatives(schema)
        if len(alternatives) == 1:
            schema = self._merged(alternatives[0], 0)
        self._name(rule, schema, path)
        types = _types(schema)
        rule.json_types = frozenset(types)
        rule.choices = _choices(schema)
        rule.coercion = _coercion(types or {json_type(choice) for choice in rule.choices})
        if schema.get("uniqueItems") is True:
            rule.order = Order.SET
        first = schema.get("prefixItems")
        if isinstance(schema.get("items"), list):
            # The form that tuples had before JSON Schema 2020-12.
            first = schema["items"]
        elif "items" in schema:
            rule.items = self.compile(schema["items"], path)
        if isinstance(first, list):
            rule.first_items = tuple(self.compile(item, path) for item in first)
        self._fill_members(rule, schema, path)
        if len(alternatives) > 1:
            rule.forms = tuple(self.compile(alternative, path) for alternative in alternatives)

    def _name(self, rule: ValueRule, schema: Mapping[str, Any], path: tuple[str, ...]) -> None:
        name = path[-1] if path else ""
        places = [f"{tool}.{'.'.join(path)}" for tool in (self._tool, "*")]
        stated = next((self._recipe.kinds[place] for place in places if place in self._recipe.kinds), None)
        by_schema = Kind.EXACT if "pattern" in schema else kind_by_schema(schema)
        rule.kind = stated or by_schema or kind_by_name(name, self._tool)
        if self._recipe.is_search and stated is None and rule.kind is Kind.URL:
            rule.kind = Kind.PAGE
        if self._recipe.is_search and rule.kind in (Kind.QUERY, Kind.PAGE):
            rule.order = Order.SET
        if any(place in self._recipe.unordered for place in places):
            rule.order = Order.BAG
        prefixes = [f"{tool}.{''.join(f'{part}.' for part in path)}" for tool in (self._tool, "*")]
        members = {place.removeprefix(prefix) for place in self._recipe.ignored for prefix in prefixes if place.startswith(prefix)}
        rule.ignored = frozenset(member for member in members if "." not in member)

    def _fill_members(self, rule: ValueRule, schema: Mapping[str, Any], path: tuple[str, ...]) -> None:
        other = schema.get("additionalProperties")
        members = rule.members = _Members(self, path, other)
        properties = schema.get("properties")
        if not isinstance(properties, Mapping):
            return
        required = schema.get("required")
        rule.required = frozenset(str(key) for key in required) if isinstance(required, list | tuple) else frozenset()
        rule.is_closed = other is False
        droppable: set[str] = set()
        for key, value in cast("Mapping[str, Any]", properties).items():
            members[key] = self.compile(value, (*path, key))
            if key in rule.required:
                continue
            default = self._merged(cast("Mapping[str, Any]", value), 0).get("default") if isinstance(value, Mapping) else None
            if default is None:
                droppable.add(key)
            else:
                rule.defaults[key] = default
        rule.droppable_nulls = frozenset(droppable)

    def _merged(self, schema: Mapping[str, Any], num_references: int) -> Mapping[str, Any]:
        """The schema with its `$ref` and `allOf` written into it; its own keywords win, members and required keys are joined."""
        if "$ref" not in schema and "allOf" not in schema:
            return schema
        merged = {key: value for key, value in schema.items() if key not in ("$ref", "allOf")}
        for part in self._parts(schema):
            if num_references >= _MAX_REFERENCES:
                break
            for key, value in self._merged(part, num_references + 1).items():
                own = merged.get(key)
                if isinstance(own, Mapping) and isinstance(value, Mapping) and key == "properties":
                    merged[key] = {**value, **own}
                elif isinstance(own, list) and isinstance(value, list) and key == "required":
                    merged[key] = [*own, *value]
                elif key not in merged:
                    merged[key] = value
        return merged

    def _parts(self, schema: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
        reference, all_of = schema.get("$ref"), schema.get("allOf")
        candidates = [_resolve(reference, self._root)] if isinstance(reference, str) else []
        candidates += all_of if isinstance(all_of, list) else []
        yield from (candidate for candidate in candidates if isinstance(candidate, Mapping))


def _resolve(reference: str, root: Mapping[str, Any]) -> Any:
    """The target of a JSON pointer into the tool's own schema, or None."""
    if not reference.startswith("#"):
        return None
    place: Any = root
    for part in reference[1:].split("/")[1:]:
        key = part.replace("~1", "/").replace("~0", "~")
        if isinstance(place, list) and key.isdecimal() and int(key) < len(place):
            place = place[int(key)]
        elif isinstance(place, Mapping) and key in place:
            place = place[key]
        else:
            return None
    return place


def _alternatives(schema: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The forms of a value that are not null, each with the keywords beside `anyOf` or `oneOf`; nothing where it has one form only."""
    for keyword in ("anyOf", "oneOf"):
        branches = schema.get(keyword)
        if isinstance(branches, list) and branches:
            beside = {key: value for key, value in schema.items() if key != keyword}
            forms = [cast("dict[str, Any]", branch) for branch in branches if isinstance(branch, dict) and _types(branch) != {"null"}]
            return [{**form, "allOf": [*form.get("allOf", []), beside]} for form in forms]
    return []


def _types(schema: Mapping[str, Any]) -> set[str]:
    declared = schema.get("type")
    types = [declared] if isinstance(declared, str) else declared
    return {kind for kind in types if isinstance(kind, str)} if isinstance(types, list) else set()


def _choices(schema: Mapping[str, Any]) -> tuple[Any, ...]:
    if schema.get("const") is not None:
        return (schema["const"],)
    enum = schema.get("enum")
    return tuple(enum) if isinstance(enum, list) else ()


def _coercion(types: set[str]) -> Coercion:
    coercions = {_COERCIONS.get(kind, Coercion.NONE) for kind in types - {"null"}}
    return coercions.pop() if len(coercions) == 1 else Coercion.NONE
