"""Messages in OpenAI's chat form, and the relatives of it that agents store, into a `Conversation`.

Calls come as ``{"function": {"name", "arguments"}}``, as ``{"name", "arguments"}``, as ``{"function": name, "args": {...}}``, as a JSON string of
one of these, or in the text (Hermes and Qwen3-Coder tags). Arguments come as an object or as JSON text; text that is not a JSON object is kept
as it is and makes the turn malformed. Content is a string, null, or a list of parts. Most adapters call `add_message`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import orjson

from pivotrl.actions.protocol import json_text
from pivotrl.actions.registry import action_format
from pivotrl.trajectories.adapters.conversation import Conversation, reward_outcome
from pivotrl.trajectories.source import RowQuarantined
from pivotrl.types import Action, Origin, Outcome, ParseOutcome, Tool, ToolCall

REPAIR_PARTS_LEFT_OUT = "content part that is not text left out"

_ARGUMENT_KEYS = ("arguments", "args", "input")
_ID_KEYS = ("id", "call_id", "tool_call_id")
_REASONING_KEYS = ("reasoning_content", "reasoning", "thinking")
_THINKING_PARTS = ("thinking", "reasoning", "reasoning_text", "summary_text")
# Leaving out a part with one of these types would lose an action or its result.
_CALL_PARTS = ("tool_use", "tool_result", "tool_call", "function_call")
_TOOL_RESPONSE = "<tool_response>"
_TOOL_RESPONSE_END = "</tool_response>"


def add_message(conversation: Conversation, raw: Any, *, origin: Origin = Origin.MODEL, tools: Sequence[Tool] = ()) -> None:
    """One message of a chat. `origin` is that of an assistant turn; `tools` type the values of calls written as XML.

    Raises:
        RowQuarantined: for a message without a known role, or with content that would lose an action.
    """
    if not isinstance(raw, dict):
        raise RowQuarantined("wrong schema: a message is not an object")
    message = cast("dict[str, Any]", raw)
    match message.get("role"):
        case "assistant" | "model":
            add_assistant(conversation, message, origin=origin, tools=tools)
        case "user" | "human":
            add_user(conversation, content_text(message.get("content"), conversation))
        case "tool" | "function" | "observation":
            name = message.get("name")
            conversation.tool(
                content_text(message.get("content"), conversation),
                call_id=as_id(message.get("tool_call_id")),
                name=name if isinstance(name, str) else None,
                is_error=bool(message.get("is_error") or message.get("error")),
            )
        case "system" | "developer":
            conversation.system(content_text(message.get("content"), conversation))
        case role:
            raise RowQuarantined(f"wrong schema: message role is {role!r:.40}")


def add_assistant(conversation: Conversation, message: Mapping[str, Any], *, origin: Origin = Origin.MODEL, tools: Sequence[Tool] = ()) -> None:
    """An assistant message. Fine-tuning files mark turns not to learn from with ``"weight": 0``: those are the harness's."""
    text = content_text(message.get("content"), conversation)
    calls, is_well_formed = read_calls(message.get("tool_calls") or message.get("function_call"))
    reasoning = _reasoning_of(message)
    if message.get("weight") == 0:
        origin = Origin.HARNESS
    if calls:
        if "</think>" in text:
            spoken = action_format("plain").parse(text)
            text, reasoning = spoken.content, _joined(reasoning, spoken.reasoning)
        parse = ParseOutcome.PARSED if is_well_formed else ParseOutcome.MALFORMED
        conversation.assistant(text, calls, reasoning=reasoning, origin=origin, parse=parse)
        return
    if "<" not in text:
        # No tag of any format: what most turns are.
        conversation.assistant(text, reasoning=reasoning, origin=origin)
        return
    action = read_text_action(text, tools)
    conversation.assistant(action.content, action.tool_calls, reasoning=_joined(reasoning, action.reasoning), origin=origin, parse=action.parse)


def add_user(conversation: Conversation, text: str) -> None:
    """A user turn, or, where it wraps the results of calls written in the text, those results."""
    if _TOOL_RESPONSE in text and conversation.awaits_result and text.lstrip().startswith(_TOOL_RESPONSE):
        for piece in text.split(_TOOL_RESPONSE)[1:]:
            result, _, rest = piece.partition(_TOOL_RESPONSE_END)
            conversation.tool(result.removeprefix("\n").removesuffix("\n"))
            if rest.strip():
                conversation.user(rest.strip())
        return
    conversation.user(text)


def read_text_action(text: str, tools: Sequence[Tool] = ()) -> Action:
    """The action of an assistant text by the tags it holds; a plain message where it holds none."""
    if "<function=" in text:
        return action_format("qwen3_coder").parse(text, tools)
    if "<tool_call>" in text:
        return action_format("hermes").parse(text, tools)
    if "</think>" in text:
        return action_format("plain").parse(text)
    return Action(text, (), None, ParseOutcome.ABSENT)


def read_calls(raw: Any) -> tuple[tuple[ToolCall, ...], bool]:
    """Calls of a message and whether all of them are well-formed. A single call and a JSON string are taken for what they hold."""
    if not raw:
        return (), True
    if isinstance(raw, str):
        raw = _loaded(raw)
    entries: list[Any] = raw if isinstance(raw, list) else [raw]
    calls: list[ToolCall] = []
    is_well_formed = True
    for entry in entries:
        call, is_readable = read_call(entry)
        is_well_formed &= is_readable
        calls.append(call)
    return tuple(calls), is_well_formed


def read_call(raw: Any) -> tuple[ToolCall, bool]:
    """One call and whether it is well-formed: a name, and arguments that are a JSON object."""
    if isinstance(raw, str):
        raw = _loaded(raw)
    if not isinstance(raw, dict):
        return ToolCall("", raw if isinstance(raw, str) else json_text(raw)), False
    entry = cast("dict[str, Any]", raw)
    function = entry.get("function")
    body: dict[str, Any] = function if isinstance(function, dict) else entry
    name = function if isinstance(function, str) else body.get("name")
    arguments = body["arguments"] if "arguments" in body else next((body[key] for key in _ARGUMENT_KEYS if key in body), "")
    call_id = as_id(entry.get("id") or next((entry[key] for key in _ID_KEYS if entry.get(key)), None))
    text, is_object = arguments_text(arguments)
    is_named = isinstance(name, str) and name != ""
    return ToolCall(name if isinstance(name, str) else "", text, call_id), is_object and is_named


def arguments_text(arguments: Any) -> tuple[str, bool]:
    """Arguments as JSON text, and whether that text is an object. Text is kept as written."""
    if isinstance(arguments, dict):
        return json_text(arguments), True
    if not isinstance(arguments, str):
        return json_text(arguments), False
    try:
        return arguments, isinstance(orjson.loads(arguments), dict)
    except orjson.JSONDecodeError:
        return arguments, False


def content_text(content: Any, conversation: Conversation) -> str:
    """The text of a content field: parts are joined without a separator; pictures and other parts are left out, counted as a repair.

    Raises:
        RowQuarantined: for content that is neither text nor parts, or whose parts are calls or results.
    """
    if isinstance(content, str):
        return content
    if content is None:
        return ""
    if isinstance(content, dict):
        content = [content]
    if not isinstance(content, list):
        raise RowQuarantined(f"wrong schema: content is a {type(content).__name__}")
    pieces: list[str] = []
    for part in cast("list[Any]", content):
        if isinstance(part, str):
            pieces.append(part)
            continue
        text = _part_text(part)
        if text is not None:
            pieces.append(text)
        elif not (isinstance(part, dict) and part.get("type") in _THINKING_PARTS):
            conversation.repairs.add(REPAIR_PARTS_LEFT_OUT)
    return "".join(pieces)


def row_outcome(record: Mapping[str, Any]) -> tuple[Outcome, float | None]:
    """Outcome and reward that a row states: `outcome` by name, else `success` or `resolved`, else `reward` of 1 or below; else unknown."""
    outcome, reward = reward_outcome(record.get("reward"))
    for key in ("resolved", "success"):
        if isinstance(record.get(key), bool):
            outcome = Outcome.SUCCESS if record[key] else Outcome.FAILURE
    named = record.get("outcome")
    if isinstance(named, str) and named in {value.value for value in Outcome}:
        outcome = Outcome(named)
    return outcome, reward


def as_id(value: Any) -> str | None:
    """An id as text; None for missing and empty ones."""
    return str(value) if isinstance(value, str | int) and not isinstance(value, bool) and value != "" else None


def _part_text(part: Any) -> str | None:
    if not isinstance(part, dict):
        raise RowQuarantined("wrong schema: a content part is neither text nor an object")
    kind = part.get("type")
    if kind in _CALL_PARTS:
        raise RowQuarantined(f"content part of type {kind!r:.40}: calls inside content are not supported")
    if kind in _THINKING_PARTS:
        return None
    # AgentDojo keeps a part's text under "content".
    text = part.get("text", part.get("content"))
    return text if isinstance(text, str) else None


def _reasoning_of(message: Mapping[str, Any]) -> str | None:
    for key in _REASONING_KEYS:
        value = message.get(key)
        if isinstance(value, str) and value:
            return value
    blocks = message.get("thinking_blocks")
    content = message.get("content")
    parts = blocks if isinstance(blocks, list) else content if isinstance(content, list) else ()
    return thinking_text(parts)


def thinking_text(parts: Sequence[Any]) -> str | None:
    """The text of thinking parts among `parts`, one paragraph each; None where there is none. Encrypted thinking has no text."""
    pieces: list[str] = []
    for part in parts:
        if isinstance(part, dict) and part.get("type") in _THINKING_PARTS:
            text = part.get("thinking") or part.get("text") or part.get("reasoning")
            if isinstance(text, str) and text:
                pieces.append(text)
    return "\n\n".join(pieces) or None


def _joined(first: str | None, second: str | None) -> str | None:
    if first and second and first.strip() != second.strip():
        return f"{first}\n\n{second}"
    return first or second


def _loaded(text: str) -> Any:
    """The JSON value of a text, or the text itself."""
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError:
        return text
