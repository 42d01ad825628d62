"""Qwen3-Coder calls: ``<tool_call>\\n<function=NAME>\\n<parameter=KEY>\\nVALUE\\n</parameter>\\n</function>\\n</tool_call>``.

The bare ``<function=...>`` of SWE-agent is read too. A value is text, so its type needs a rule:

- a parameter whose schema says string (and nothing else) is written raw and read raw, whatever it looks like;
- any other value is JSON, except that a string which is not JSON text by itself is written raw. So ``ls -la`` needs no quotes, the number 5
  is ``5``, and the string "5" is ``"5"``. Reading inverts this: text that is JSON is that value, other text is a string.

Servers type values by the schema, so callers give the state's tools where they have them. Arguments read back are spelled by `json_text`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import orjson

from pivotrl.actions.protocol import json_text, render_faithfully
from pivotrl.actions.tagged import ReadCalls, parse_tagged, write_tagged
from pivotrl.actions.thinking import parse_after_thinking, write_thinking
from pivotrl.types import Action, ParseOutcome, Tool, ToolCall

_WRAP_OPEN = "<tool_call>"
_WRAP_CLOSE = "</tool_call>"
_OPENING = re.compile(r"<tool_call>|<function=")
_FUNCTION = re.compile(r"\s*<function=([^>\n]+)>\s*")
_PARAMETER = re.compile(r"<parameter=([^>\n]+)>")
# A value may hold the closing tag itself; only one that is followed by the next parameter or the end of the function closes it.
_END_OF_VALUE = re.compile(r"</parameter>\s*(?=<parameter=|</function>)")
_FUNCTION_CLOSE = "</function>"
_WRAP_CLOSE_AHEAD = re.compile(r"\s*</tool_call>")
_SEPARATOR = "\n\n"


class Qwen3CoderFormat:
    """XML-like calls with untyped values."""

    name = "qwen3_coder"

    def render(self, action: Action, tools: Sequence[Tool] = ()) -> str:
        return render_faithfully(self, action, tools)

    def transcribe(self, action: Action, tools: Sequence[Tool] = ()) -> str:
        if action.parse is ParseOutcome.MALFORMED and _OPENING.search(action.content):
            return action.content
        strings = _string_parameters(tools)
        calls = [_write_call(call, strings.get(call.name, frozenset())) for call in action.tool_calls]
        return write_thinking(action.reasoning, write_tagged(action.content, calls, _SEPARATOR))

    def parse(self, text: str, tools: Sequence[Tool] = ()) -> Action:
        strings = _string_parameters(tools)

        def parse_body(body: str) -> Action:
            return parse_tagged(body, opening=_OPENING, read=lambda t, m: _read_call(t, m, strings), separator=_SEPARATOR)

        return parse_after_thinking(text, parse_body)


def _string_parameters(tools: Sequence[Tool]) -> Mapping[str, frozenset[str]]:
    return {tool.name: frozenset(key for key, schema in _properties(tool) if _is_string(schema)) for tool in tools}


def _properties(tool: Tool) -> Sequence[tuple[str, Any]]:
    properties = tool.parameters.get("properties")
    return tuple(properties.items()) if isinstance(properties, Mapping) else ()


def _is_string(schema: Any) -> bool:
    return isinstance(schema, Mapping) and schema.get("type") in ("string", ["string"])


def _write_call(call: ToolCall, strings: frozenset[str]) -> str:
    arguments = call.arguments_object()
    if arguments is None:
        return f"{_WRAP_OPEN}\n<function={call.name}>\n{call.arguments}\n{_FUNCTION_CLOSE}\n{_WRAP_CLOSE}"
    parameters = "".join(f"<parameter={key}>\n{_write_value(value, is_string=key in strings)}\n</parameter>\n" for key, value in arguments.items())
    return f"{_WRAP_OPEN}\n<function={call.name}>\n{parameters}{_FUNCTION_CLOSE}\n{_WRAP_CLOSE}"


def _write_value(value: Any, *, is_string: bool) -> str:
    if isinstance(value, str) and (is_string or not _is_json(value)):
        return value
    return json_text(value)


def _read_value(text: str, *, is_string: bool) -> Any:
    if is_string:
        return text
    try:
        return orjson.loads(text)
    except ValueError:
        return text


def _is_json(text: str) -> bool:
    try:
        orjson.loads(text)
    except ValueError:
        return False
    return True


def _read_call(text: str, match: re.Match[str], strings: Mapping[str, frozenset[str]]) -> ReadCalls:
    is_wrapped = match.group() == _WRAP_OPEN
    function = _FUNCTION.match(text, match.end() if is_wrapped else match.start())
    if function is None:
        return ReadCalls((), match.end(), is_well_formed=False)
    name, place = function.group(1), function.end()
    arguments: dict[str, Any] = {}
    is_well_formed = True
    while parameter := _PARAMETER.match(text, place):
        key, start = parameter.group(1), parameter.end()
        end = _END_OF_VALUE.search(text, start)
        if end is None:
            return ReadCalls((), start, is_well_formed=False)
        is_well_formed &= key not in arguments
        value = text[start : end.start()].removeprefix("\n").removesuffix("\n")
        arguments[key] = _read_value(value, is_string=key in strings.get(name, frozenset()))
        place = end.end()
    if not text.startswith(_FUNCTION_CLOSE, place):
        return ReadCalls((), place, is_well_formed=False)
    place += len(_FUNCTION_CLOSE)
    call = ToolCall(name, json_text(arguments))
    if is_wrapped:
        wrap_close = _WRAP_CLOSE_AHEAD.match(text, place)
        is_well_formed &= wrap_close is not None
        place = wrap_close.end() if wrap_close else place
    return ReadCalls((call,), place, is_well_formed=is_well_formed and call.arguments_object() is not None)
