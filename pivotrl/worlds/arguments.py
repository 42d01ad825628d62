"""Tool schemas, and the arguments of a call read as its schema means them: defaults filled in, numbers by value, anything else an error.

What an environment needs of JSON schema and no more: flat objects of integer, number, string and boolean.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pivotrl.types import Tool, ToolCall


class BadArguments(ValueError):
    """The call cannot be executed; the text is what the tool answers."""


def make_tool(name: str, description: str, required: Mapping[str, Any], optional: Mapping[str, Any]) -> Tool:
    """A tool from the schemas of its arguments; nothing else may be given."""
    schema = {"type": "object", "properties": {**required, **optional}, "required": list(required), "additionalProperties": False}
    return Tool(name, description, schema)


def read_arguments(schema: Mapping[str, Any], call: ToolCall) -> dict[str, Any]:
    """Arguments by name, every property of the schema that was given or has a default.

    Raises:
        BadArguments: for text that is not an object, an unknown or missing name, or a value of the wrong type.
    """
    given = call.arguments_object()
    if given is None:
        raise BadArguments("bad arguments")
    properties = schema["properties"]
    for name in given:
        if name not in properties:
            raise BadArguments(f"no {name}")
    arguments = {}
    for name, rule in properties.items():
        if name in given:
            arguments[name] = _read_value(name, given[name], rule["type"])
        elif "default" in rule:
            arguments[name] = rule["default"]
        elif name in schema["required"]:
            raise BadArguments(f"{name} missing")
    return arguments


def _read_value(name: str, value: Any, kind: str) -> Any:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if kind == "integer" and is_number and float(value).is_integer():
        return int(value)
    if kind == "number" and is_number:
        return float(value)
    if kind == "string" and isinstance(value, str):
        return value
    if kind == "boolean" and isinstance(value, bool):
        return value
    raise BadArguments(f"bad {name}")
