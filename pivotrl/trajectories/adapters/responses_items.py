"""Items of OpenAI's Responses API into a `Conversation`: message, reasoning, function_call, function_call_output and their custom-tool forms.

One assistant turn is one model reply: reasoning, then a message, then calls, in any number. A new turn begins where the reply would repeat itself: at
reasoning or a message that follows a message or calls. Called by the `codex` and `nemo_gym` adapters.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, cast

from pivotrl.actions.protocol import json_text
from pivotrl.trajectories.adapters.conversation import Conversation
from pivotrl.trajectories.adapters.openai_messages import arguments_text, as_id, content_text, thinking_text
from pivotrl.trajectories.source import RowQuarantined
from pivotrl.types import Origin, ParseOutcome, ToolCall

REPAIR_ENCRYPTED = "reasoning is encrypted, its summary kept"
REPAIR_UNKNOWN_ITEM = "item of an unknown type left out"

_MESSAGE_ROLES = ("system", "developer", "user", "assistant")
_CALLS = ("function_call", "custom_tool_call", "local_shell_call")
_OUTPUTS = ("function_call_output", "custom_tool_call_output", "local_shell_call_output")


class ResponseItems:
    """Collects items into turns. `origin` is that of the assistant turns; `flush` after the last item."""

    def __init__(self, conversation: Conversation, *, origin: Origin = Origin.MODEL, is_error: Callable[[Any], bool] = lambda _output: False) -> None:
        self._conversation = conversation
        self._origin = origin
        self._is_error = is_error
        self._reasoning: list[str] = []
        self._content: str | None = None
        self._calls: list[ToolCall] = []
        self._is_well_formed = True
        self._is_begun = False

    def add(self, raw: Any) -> None:
        """One item.

        Raises:
            RowQuarantined: for an item that is no object, or a message without a known role.
        """
        if not isinstance(raw, dict):
            raise RowQuarantined("wrong schema: an item is not an object")
        item = cast("dict[str, Any]", raw)
        kind = item.get("type")
        if kind == "message" or (kind is None and "role" in item):
            self._message(item)
        elif kind == "reasoning":
            self._reason(item)
        elif kind in _CALLS:
            self._call(item)
        elif kind in _OUTPUTS:
            self._output(item)
        else:
            self._conversation.repairs.add(REPAIR_UNKNOWN_ITEM)

    def flush(self) -> None:
        """Ends the assistant turn that is under way."""
        if not self._is_begun:
            return
        parse = None if self._is_well_formed else ParseOutcome.MALFORMED
        reasoning = "\n\n".join(self._reasoning)
        self._conversation.assistant(self._content or "", tuple(self._calls), reasoning=reasoning, origin=self._origin, parse=parse)
        self._reasoning, self._content, self._calls = [], None, []
        self._is_begun, self._is_well_formed = False, True

    def _message(self, item: Mapping[str, Any]) -> None:
        role = item.get("role")
        if role not in _MESSAGE_ROLES:
            raise RowQuarantined(f"wrong schema: message role is {role!r:.40}")
        text = content_text(_text_parts(item.get("content")), self._conversation)
        if role == "assistant":
            if self._content is not None or self._calls:
                self.flush()
            self._content, self._is_begun = text, True
            return
        self.flush()
        if role == "user":
            self._conversation.user(text, origin=Origin.HARNESS if _is_harness_text(text) else Origin.ENVIRONMENT)
        else:
            self._conversation.system(text)

    def _reason(self, item: Mapping[str, Any]) -> None:
        if self._content is not None or self._calls:
            self.flush()
        self._is_begun = True
        for key in ("content", "summary"):
            parts = item.get(key)
            text = thinking_text(_as_thinking(parts)) if isinstance(parts, list) else None
            if text:
                self._reasoning.append(text)
                break
        if item.get("encrypted_content") and not item.get("content"):
            self._conversation.repairs.add(REPAIR_ENCRYPTED)

    def _call(self, item: Mapping[str, Any]) -> None:
        call, is_well_formed = read_item_call(item)
        self._calls.append(call)
        self._is_well_formed &= is_well_formed
        self._is_begun = True

    def _output(self, item: Mapping[str, Any]) -> None:
        self.flush()
        output = item.get("output")
        text = output if isinstance(output, str) else content_text(_text_parts(output), self._conversation)
        self._conversation.tool(text, call_id=as_id(item.get("call_id")), is_error=self._is_error(output))


def read_item_call(item: Mapping[str, Any]) -> tuple[ToolCall, bool]:
    """A call item and whether it is well-formed. A custom tool takes free text: its one argument is `input`."""
    call_id = as_id(item.get("call_id")) or as_id(item.get("id"))
    name = item.get("name")
    if item.get("type") == "local_shell_call":
        action = item.get("action")
        return ToolCall("local_shell", json_text(action), call_id), isinstance(action, dict)
    if not isinstance(name, str) or not name:
        return ToolCall("", arguments_text(item.get("arguments"))[0], call_id), False
    if item.get("type") == "custom_tool_call":
        return ToolCall(name, json_text({"input": item.get("input")}), call_id), isinstance(item.get("input"), str)
    arguments, is_object = arguments_text(item.get("arguments", ""))
    return ToolCall(name, arguments, call_id), is_object


def _text_parts(content: Any) -> Any:
    """Content with the parts that only the Responses API has: refusals speak, and a structured output is an object without a type."""
    if isinstance(content, dict) and "type" not in content:
        return json_text(content)
    if not isinstance(content, list):
        return content
    return [
        {"type": "text", "text": part["refusal"]} if isinstance(part, dict) and isinstance(part.get("refusal"), str) else part for part in content
    ]


def _as_thinking(parts: list[Any]) -> list[Any]:
    return [{**part, "type": "thinking"} if isinstance(part, dict) else {"type": "thinking", "thinking": part} for part in parts]


def _is_harness_text(text: str) -> bool:
    """User turns that the coding harness writes in front of the person's own."""
    return text.lstrip().startswith(("<environment_context>", "<user_instructions>", "# AGENTS.md"))
