"""Terminus-2 replies: one JSON object ``{"analysis", "plan", "commands": [{"keystrokes", "duration"}], "task_complete"}``.

The action is one call of the pseudo-tool `TOOL_NAME` whose arguments are that JSON exactly as written. Prose and fences around it are the
content; where text follows the JSON, `PLACEHOLDER` in the content marks where it stood, so a reply is written back as it was.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pivotrl.actions.json_span import MAX_FAILED_READS, Span, read_value, skip_whitespace
from pivotrl.actions.protocol import InexpressibleAction, malformed, render_faithfully
from pivotrl.actions.thinking import parse_after_thinking, write_thinking
from pivotrl.types import Action, ParseOutcome, Tool, ToolCall

TOOL_NAME = "terminus2"
# Unicode's object replacement character: "an object is embedded here".
PLACEHOLDER = "\ufffc"
_REQUIRED = ("analysis", "plan", "commands")


class Terminus2Format:
    """One JSON object per reply, prose around it allowed."""

    name = "terminus2"

    def render(self, action: Action, tools: Sequence[Tool] = ()) -> str:
        if action.parse is ParseOutcome.PARSED and len(action.tool_calls) > 1:
            raise InexpressibleAction("several calls in one reply")
        if action.parse is ParseOutcome.PARSED and any(call.name != TOOL_NAME for call in action.tool_calls):
            raise InexpressibleAction("not a Terminus-2 action")
        return render_faithfully(self, action, tools)

    def transcribe(self, action: Action, tools: Sequence[Tool] = ()) -> str:  # noqa: ARG002 - JSON types itself
        if action.parse is ParseOutcome.MALFORMED and "{" in action.content:
            return action.content
        written = "\n".join(call.arguments for call in action.tool_calls)
        body = action.content.replace(PLACEHOLDER, written, 1) if PLACEHOLDER in action.content and written else action.content + written
        return write_thinking(action.reasoning, body)

    def parse(self, text: str, tools: Sequence[Tool] = ()) -> Action:  # noqa: ARG002 - JSON types itself
        return parse_after_thinking(text, _parse_body)


def is_terminus2_object(value: Any) -> bool:
    """Whether a JSON value has the shape that the harness executes: the three required keys and well-typed commands."""
    if not isinstance(value, Mapping) or any(key not in value for key in _REQUIRED):
        return False
    commands = value["commands"]
    return isinstance(commands, list) and all(_is_command(command) for command in commands)


def _is_command(command: Any) -> bool:
    if not isinstance(command, Mapping) or not isinstance(command.get("keystrokes"), str):
        return False
    duration = command.get("duration")
    return duration is None or (isinstance(duration, int | float) and not isinstance(duration, bool))


def _parse_body(text: str) -> Action:
    place = num_failed = 0
    is_begun = False
    while num_failed < MAX_FAILED_READS and (start := text.find("{", place)) != -1:
        found = read_value(text, start)
        if found is None:
            num_failed += 1
            is_begun |= text.startswith('"', skip_whitespace(text, start + 1))
            place = start + 1
            continue
        if is_terminus2_object(found.value):
            return _action(text, found)
        is_begun |= isinstance(found.value, dict) and "commands" in found.value
        place = found.end
    return malformed(text) if is_begun or num_failed == MAX_FAILED_READS else Action(text, (), None, ParseOutcome.ABSENT)


def _action(text: str, found: Span) -> Action:
    before, after = text[: found.start], text[found.end :]
    call = ToolCall(TOOL_NAME, text[found.start : found.end])
    if call.arguments_object() is None:
        return malformed(text)
    content = f"{before}{PLACEHOLDER}{after}" if after.strip() else before
    return Action(content, (call,), None, ParseOutcome.PARSED)
