"""Tool lists: read from a row or a file in the forms users have, freed of null padding, or inferred from the calls seen.

Called by the adapters (`parse_tools`, `resolve_tools`) and by `ingest.py` (`load_tools`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import orjson

from pivotrl.errors import UserError
from pivotrl.trajectories.source import RowQuarantined
from pivotrl.types import Message, Role, Tool, ToolOrigin

_NAME_KEYS = ("name", "name_for_model")
_DESCRIPTION_KEYS = ("description", "description_for_model")
_PARAMETERS_KEYS = ("parameters", "input_schema", "inputSchema")
_SCHEMA_MAPS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_SCHEMA_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
_SCHEMAS = ("items", "additionalProperties", "not", "if", "then", "else", "contains", "propertyNames")
# The only keywords whose value may mean something when it is null.
_NULL_IS_A_VALUE = ("default", "const")


def load_tools(path: Path) -> tuple[Tool, ...]:
    """The tools of a JSON file: OpenAI's list, a bare list of functions, or an object keyed by tool name.

    Raises:
        UserError: where the file cannot be read as one of these, or holds no tool.
    """
    rule = 'the file holds a JSON list of {"type": "function", "function": {...}} or {"name", "description", "parameters"}, or an object by tool name'
    try:
        value = orjson.loads(path.read_bytes())
        tools = parse_tools(value)
    except FileNotFoundError as error:
        raise UserError(f"tools file {path} does not exist", rule=rule, fix="correct ingest.tools") from error
    except (OSError, orjson.JSONDecodeError, RowQuarantined) as error:
        raise UserError(f"tools file {path} cannot be read: {error}", rule=rule, fix="correct the file or ingest.tools") from error
    if not tools:
        raise UserError(f"tools file {path} holds no tool", rule=rule, fix="correct the file or ingest.tools")
    return tools


def parse_tools(value: Any) -> tuple[Tool, ...]:
    """Tools from any of the forms of `load_tools`, or from its JSON text (data sets store tools as a string); nothing gives no tools.

    >>> parse_tools([{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {"x": None}}}}])[0].parameters
    {'type': 'object', 'properties': {}}

    Raises:
        RowQuarantined: for a tool without a name or with parameters that are no schema.
    """
    if isinstance(value, str):
        try:
            value = orjson.loads(value) if value.strip() else None
        except orjson.JSONDecodeError as error:
            raise RowQuarantined("wrong schema: tools are not JSON") from error
    if value is None:
        return ()
    if isinstance(value, dict):
        by_name = cast("dict[str, Any]", value)
        function = by_name.get("function")
        single: dict[str, Any] = function if isinstance(function, dict) else by_name
        if any(isinstance(single.get(key), str) for key in _NAME_KEYS):
            return (_parse_tool(by_name, None),)
        return tuple(_parse_tool(entry, name) for name, entry in by_name.items())
    if not isinstance(value, list):
        raise RowQuarantined("wrong schema: tools are neither a list nor an object")
    return tuple(_parse_tool(entry, None) for entry in cast("list[Any]", value) if entry is not None)


def drop_null_padding(schema: Any) -> Any:
    """A schema without the null properties and keywords that columnar data sets add to make all rows the same shape.

    Values of `enum` stay; a null `default` or `const` stays where no other keyword beside it is null.

    >>> drop_null_padding({"type": "object", "properties": {"a": {"type": "string", "enum": None}, "b": None}})
    {'type': 'object', 'properties': {'a': {'type': 'string'}}}
    """
    if not isinstance(schema, dict):
        return schema
    keywords = cast("dict[str, Any]", schema)
    is_padded = any(value is None for key, value in keywords.items() if key not in _NULL_IS_A_VALUE)
    cleaned: dict[str, Any] = {}
    for key, value in keywords.items():
        if value is None and (is_padded or key not in _NULL_IS_A_VALUE):
            continue
        if key in _SCHEMA_MAPS and isinstance(value, dict):
            cleaned[key] = {name: drop_null_padding(entry) for name, entry in value.items() if entry is not None}
        elif key in _SCHEMA_LISTS and isinstance(value, list):
            cleaned[key] = [drop_null_padding(entry) for entry in value if entry is not None]
        else:
            cleaned[key] = drop_null_padding(value) if key in _SCHEMAS else value
    return cleaned


def infer_tools(messages: Sequence[Message]) -> tuple[Tool, ...]:
    """Tools as far as the agent's own calls show them: names, argument names and JSON types; nothing required, no defaults.

    Sorted by name, so that the list does not tell the order in which the expert used them.
    """
    types_seen: dict[str, dict[str, set[str]]] = {}
    for message in messages:
        if message.role is not Role.ASSISTANT:
            continue
        for call in message.tool_calls:
            properties = types_seen.setdefault(call.name, {})
            for key, value in (call.arguments_object() or {}).items():
                properties.setdefault(key, set()).add(_json_type(value))
    return tuple(
        Tool(name, "", {"type": "object", "properties": {key: {"type": _type_keyword(types)} for key, types in sorted(properties.items())}})
        for name, properties in sorted(types_seen.items())
    )


def resolve_tools(row_tools: Sequence[Tool], file_tools: Sequence[Tool] | None, messages: Sequence[Message]) -> tuple[tuple[Tool, ...], ToolOrigin]:
    """The tools of a trajectory by precedence: its row, `--tools FILE`, the calls seen; and which of these it was."""
    if row_tools:
        return tuple(row_tools), ToolOrigin.ROW
    if file_tools:
        return tuple(file_tools), ToolOrigin.FILE
    inferred = infer_tools(messages)
    return inferred, ToolOrigin.INFERRED if inferred else ToolOrigin.NONE


def _parse_tool(entry: Any, key: str | None) -> Tool:
    if not isinstance(entry, dict):
        raise RowQuarantined("wrong schema: a tool is not an object")
    outer = cast("dict[str, Any]", entry)
    body = outer["function"] if isinstance(outer.get("function"), dict) else outer
    name = _first(body, _NAME_KEYS) or key
    if not isinstance(name, str) or not name:
        raise RowQuarantined("wrong schema: a tool without a name")
    parameters = _first(body, _PARAMETERS_KEYS)
    if isinstance(parameters, str):
        try:
            parameters = orjson.loads(parameters)
        except orjson.JSONDecodeError as error:
            raise RowQuarantined("wrong schema: tool parameters are not JSON") from error
    if parameters is None:
        parameters = {"type": "object", "properties": {}}
    if not isinstance(parameters, dict):
        raise RowQuarantined("wrong schema: tool parameters are not an object")
    return Tool(name, str(_first(body, _DESCRIPTION_KEYS) or ""), drop_null_padding(parameters))


def _first(body: Mapping[str, Any], keys: Sequence[str]) -> Any:
    return next((body[key] for key in keys if body.get(key) is not None), None)


def _json_type(value: Any) -> str:
    match value:
        case bool():
            return "boolean"
        case int():
            return "integer"
        case float():
            return "number"
        case str():
            return "string"
        case list():
            return "array"
        case None:
            return "null"
        case _:
            return "object"


def _type_keyword(types: set[str]) -> str | list[str]:
    if "number" in types:
        types = types - {"integer"}
    return next(iter(types)) if len(types) == 1 else sorted(types)
