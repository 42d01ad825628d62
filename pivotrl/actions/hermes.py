"""Hermes calls: ``<tool_call>\\n{"name": ..., "arguments": {...}}\\n</tool_call>``, as Hermes, Qwen2.5 and Qwen3 write them.

Arguments are kept exactly as written. A call, or its arguments, that is JSON encoded once more as a JSON string is unwrapped:
real search trajectories hold them, and they can be meant in one way only. A call without `arguments`, or with arguments
that are not an object, is malformed: the servers that run these models refuse it too.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence

from pivotrl.actions.json_span import read_members, read_value, skip_whitespace
from pivotrl.actions.protocol import render_faithfully
from pivotrl.actions.tagged import ReadCalls, parse_tagged, write_tagged
from pivotrl.actions.thinking import parse_after_thinking, write_thinking
from pivotrl.types import Action, ParseOutcome, Tool, ToolCall

_OPEN = "<tool_call>"
_CLOSE = "</tool_call>"
_OPENING = re.compile(re.escape(_OPEN))
_SEPARATOR = "\n"


class HermesFormat:
    """JSON calls between ``<tool_call>`` tags."""

    name = "hermes"

    def render(self, action: Action, tools: Sequence[Tool] = ()) -> str:
        return render_faithfully(self, action, tools)

    def transcribe(self, action: Action, tools: Sequence[Tool] = ()) -> str:  # noqa: ARG002 - arguments are typed by JSON itself
        if action.parse is ParseOutcome.MALFORMED and _OPEN in action.content:
            return action.content
        calls = [f"{_OPEN}\n{call_json(call)}\n{_CLOSE}" for call in action.tool_calls]
        return write_thinking(action.reasoning, write_tagged(action.content, calls, _SEPARATOR))

    def parse(self, text: str, tools: Sequence[Tool] = ()) -> Action:  # noqa: ARG002 - arguments are typed by JSON itself
        return parse_after_thinking(text, _parse_body)


def call_json(call: ToolCall) -> str:
    """The JSON of one call, arguments verbatim (so not JSON where they are broken)."""
    return f'{{"name": {json.dumps(call.name, ensure_ascii=False)}, "arguments": {call.arguments}}}'


def call_from_json(text: str) -> ToolCall | None:
    """The call that a JSON text holds and nothing else, or None."""
    start = skip_whitespace(text, 0)
    found = _read_call_object(text, start)
    return found[0] if found is not None and skip_whitespace(text, found[1]) == len(text) else None


def _parse_body(text: str) -> Action:
    return parse_tagged(text, opening=_OPENING, read=_read_call, separator=_SEPARATOR)


def _read_call(text: str, match: re.Match[str]) -> ReadCalls:
    found = _read_call_object(text, skip_whitespace(text, match.end()))
    if found is None:
        return ReadCalls((), _end_of_broken_call(text, match.end()), is_well_formed=False)
    call, end = found
    close = skip_whitespace(text, end)
    calls = () if call is None else (call,)
    if not text.startswith(_CLOSE, close):
        return ReadCalls(calls, _end_of_broken_call(text, end), is_well_formed=False)
    return ReadCalls(calls, close + len(_CLOSE), is_well_formed=call is not None)


def _end_of_broken_call(text: str, start: int) -> int:
    """Behind the next closing tag, or at the next opening one, whichever comes first."""
    close, following = text.find(_CLOSE, start), text.find(_OPEN, start)
    if close != -1 and (following == -1 or close < following):
        return close + len(_CLOSE)
    return len(text) if following == -1 else following


def _read_call_object(text: str, start: int) -> tuple[ToolCall | None, int] | None:
    """The call at `start` (None where the JSON is readable and not a call) and its end; None where there is no JSON."""
    if text.startswith('"', start):
        wrapped = read_value(text, start)
        return None if wrapped is None else (call_from_json(wrapped.value), wrapped.end)
    found = read_members(text, start)
    if found is None:
        return None
    members, end = found
    name, arguments = members.get("name"), members.get("arguments")
    if name is None or arguments is None or not isinstance(name.value, str) or not name.value:
        return None, end
    written = arguments.value if isinstance(arguments.value, str) else text[arguments.start : arguments.end]
    call = ToolCall(name.value, written)
    return (call if call.arguments_object() is not None else None), end
