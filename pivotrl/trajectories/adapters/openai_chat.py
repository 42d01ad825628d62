"""Plain chat rows: ``{messages[]}`` (or `conversations` with role and content), JSONL, a JSON array, or one object, in OpenAI's message form.

A trajectory present is one row. Optional keys: `tools` or `functions` (a list or its JSON text), `parallel_tool_calls`, `task_id` or `id`, `reward`,
`success`, `outcome`, `domain`. Calls may also be Hermes or Qwen3-Coder text; the tools are then read from the system prompt where the row has none.
A spoken assistant turn in front of any user turn is a scripted greeting, and an assistant message with ``"weight": 0`` is not to be learned from.
Outcome: `outcome` (success, failure, unknown), else `success` or `resolved`, else `reward` (1 is a success, below 1 a failure), else unknown.
Detection yields to every format that is more specific.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import orjson

from pivotrl.trajectories.adapters import (
    agentdojo,
    chatml_tools,
    mini_swe_agent,
    nemo_gym,
    openhands,
    swe_agent,
    swe_smith,
    tau2,
    terminus2,
    verifiers,
)
from pivotrl.trajectories.adapters.conversation import Conversation, Facts, converted
from pivotrl.trajectories.adapters.detection import OneFilePerUnit, is_chat, shown_record
from pivotrl.trajectories.adapters.openai_messages import add_message, as_id, row_outcome
from pivotrl.trajectories.adapters.tools_in_text import tools_in_text
from pivotrl.trajectories.source import Converted, Probe, RawRow, RowDropped, RowQuarantined
from pivotrl.trajectories.tools import parse_tools
from pivotrl.types import Domain, Origin, Tool

_ROLES = ("system", "developer", "user", "assistant", "tool", "function")
_MORE_SPECIFIC = tuple(
    module.ADAPTER for module in (agentdojo, chatml_tools, mini_swe_agent, nemo_gym, openhands, swe_agent, swe_smith, tau2, terminus2, verifiers)
)


class OpenAiChatAdapter(OneFilePerUnit):
    """Chat messages without a benchmark's frame."""

    name = "openai_chat"

    def sniff(self, probe: Probe) -> bool:
        record = shown_record(probe)
        messages: Any = record.get("messages") or record.get("conversations")
        if not is_chat(messages) or messages[0]["role"] not in _ROLES:
            return False
        return not any(adapter.sniff(probe) for adapter in _MORE_SPECIFIC)

    def convert(self, row: RawRow, tools: Sequence[Tool] | None) -> Converted:
        record: dict[str, Any] = row.value if isinstance(row.value, dict) else {}
        messages = record.get("messages") or record.get("conversations")
        if isinstance(messages, str):
            try:
                messages = orjson.loads(messages)
            except orjson.JSONDecodeError as error:
                raise RowQuarantined("wrong schema: messages are not JSON") from error
        if not isinstance(messages, list):
            if "messages" in record or "conversations" in record:
                raise RowDropped("no messages")
            raise RowQuarantined("wrong schema: a row is not an object with messages")
        run = cast("list[Any]", messages)
        row_tools = parse_tools(record.get("tools") or record.get("functions")) or _tools_of_prompt(run)
        conversation = Conversation(calls_carry_ids=any(isinstance(message, dict) and message.get("tool_calls") for message in run))
        for message in run:
            is_greeting = conversation.is_before_user and _is_speech(message)
            add_message(conversation, message, origin=Origin.HARNESS if is_greeting else Origin.MODEL, tools=row_tools or tools or ())
        outcome, reward = row_outcome(record)
        task_id = next((as_id(record[key]) for key in ("task_id", "instance_id", "id") if as_id(record.get(key)) is not None), None)
        facts = Facts(self.name, _domain(record), outcome, reward, task_id, parallel_tool_calls=record.get("parallel_tool_calls") is not False)
        return converted(conversation, row, facts, row_tools, tools)


ADAPTER = OpenAiChatAdapter()


def _is_speech(message: Any) -> bool:
    if not isinstance(message, dict) or message.get("role") != "assistant" or message.get("tool_calls") or message.get("function_call"):
        return False
    content = message.get("content")
    return not (isinstance(content, str) and ("<tool_call>" in content or "<function=" in content))


def _tools_of_prompt(messages: Sequence[Any]) -> tuple[Tool, ...]:
    first = messages[0] if messages else None
    content = first.get("content") if isinstance(first, dict) else None
    return tools_in_text(content) if isinstance(content, str) else ()


def _domain(record: Mapping[str, Any]) -> Domain:
    """The row's own `domain` where it is one of ours."""
    name = record.get("domain")
    return Domain(name) if isinstance(name, str) and name in {domain.value for domain in Domain} else Domain.CONVERSATIONAL
