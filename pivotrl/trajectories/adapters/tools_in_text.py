"""Tools that a prompt describes in its text, for rows whose only tool list is written there.

Two forms: JSON objects between ``<tools>`` tags (Hermes, Qwen, WebDancer), and the ``---- BEGIN FUNCTION #1: name ----`` sections of SWE-agent and
OpenHands without function calling.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Any

from pivotrl.actions.json_span import read_value
from pivotrl.trajectories.source import RowQuarantined
from pivotrl.trajectories.tools import parse_tools
from pivotrl.types import Tool

_TOOLS_OPEN, _TOOLS_CLOSE = "<tools>", "</tools>"
_SECTION = re.compile(r"---- BEGIN FUNCTION #\d+: (\S+) ----\n(.*?)---- END FUNCTION #\d+ ----", re.DOTALL)
_PARAMETER = re.compile(r"^  \(\d+\) (\w+) \((\w+), (required|optional)\): (.*?)(?=^  \(\d+\) \w+ \(|\Z)", re.DOTALL | re.MULTILINE)
_ALLOWED = re.compile(r"^Allowed values: \[(.*)\]\s*$", re.MULTILINE)
_JSON_TYPES = frozenset({"string", "integer", "number", "boolean", "array", "object"})


def tools_in_text(text: str) -> tuple[Tool, ...]:
    """The tools that a prompt lists; none where it lists none, or lists them in a form that cannot be read."""
    if "---- BEGIN FUNCTION #" in text:
        return _function_sections(text)
    start = text.find(_TOOLS_OPEN)
    end = text.find(_TOOLS_CLOSE, start)
    return _tagged_tools(text[start + len(_TOOLS_OPEN) : end]) if -1 < start < end else ()


@lru_cache(maxsize=64)
def _tagged_tools(text: str) -> tuple[Tool, ...]:
    entries: list[Any] = []
    place = 0
    while place < len(text):
        if text[place] in " \t\r\n,":
            place += 1
            continue
        found = read_value(text, place)
        if found is None:
            return ()
        entries.extend(found.value if isinstance(found.value, list) else [found.value])
        place = found.end
    try:
        return parse_tools(entries)
    except RowQuarantined:
        return ()


@lru_cache(maxsize=64)
def _function_sections(text: str) -> tuple[Tool, ...]:
    return tuple(_function(match.group(1), match.group(2)) for match in _SECTION.finditer(text))


def _function(name: str, body: str) -> Tool:
    description, _, listed = body.partition("\nParameters:\n")
    properties: dict[str, Any] = {}
    required: list[str] = []
    for parameter in _PARAMETER.finditer(listed):
        key, kind, necessity, meaning = parameter.groups()
        schema: dict[str, Any] = {"type": kind if kind in _JSON_TYPES else "string", "description": meaning.strip()}
        if allowed := _ALLOWED.search(meaning):
            schema["enum"] = [value.strip().strip("`") for value in allowed.group(1).split(",")]
        properties[key] = schema
        if necessity == "required":
            required.append(key)
    parameters = {"type": "object", "properties": properties, "required": required}
    return Tool(name, description.removeprefix("Description: ").strip(), parameters)
