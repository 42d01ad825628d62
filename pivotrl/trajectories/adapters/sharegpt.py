"""ShareGPT rows with function calling (Glaive): ``{conversations: [{from, value}], tools, system}``; the action is a role of its own.

A trajectory present is one row of a JSON array or JSONL file. Roles: human, gpt, function_call (a JSON text of one call or a list), observation,
system, and the names that other data sets use for them. A function_call that cannot be read keeps its text and is malformed. Tools are a JSON
string. A spoken turn in front of any user is a scripted greeting. Outcome: the row's `reward` or `success` where it has one, else unknown.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import orjson

from pivotrl.trajectories.adapters.conversation import Conversation, Facts, converted
from pivotrl.trajectories.adapters.detection import OneFilePerUnit, is_chat, shown_record
from pivotrl.trajectories.adapters.openai_messages import add_assistant, add_user, as_id, content_text, read_calls, row_outcome
from pivotrl.trajectories.adapters.tools_in_text import tools_in_text
from pivotrl.trajectories.source import Converted, Probe, RawRow, RowDropped, RowQuarantined
from pivotrl.trajectories.tools import parse_tools
from pivotrl.types import Domain, Origin, ParseOutcome, Tool

_USER = ("human", "user")
_ASSISTANT = ("gpt", "assistant", "model", "chatgpt")
_CALL = ("function_call", "function-call", "tool_call")
_RESULT = ("observation", "tool", "function_response", "function-response", "tool_response")


class ShareGptAdapter(OneFilePerUnit):
    """ShareGPT conversations."""

    name = "sharegpt"

    def sniff(self, probe: Probe) -> bool:
        conversations: Any = shown_record(probe).get("conversations")
        return is_chat(conversations, role_key="from") and "value" in conversations[0]

    def convert(self, row: RawRow, tools: Sequence[Tool] | None) -> Converted:
        if not isinstance(row.value, dict) or not isinstance(row.value.get("conversations"), list):
            raise RowQuarantined("wrong schema: a row is not an object with conversations")
        record = cast("dict[str, Any]", row.value)
        turns = cast("list[Any]", record["conversations"])
        if not turns:
            raise RowDropped("no messages")
        conversation = Conversation(calls_carry_ids=False)
        if isinstance(record.get("system"), str) and record["system"]:
            conversation.system(record["system"])
        row_tools = parse_tools(record.get("tools"))
        for turn in turns:
            if not isinstance(turn, dict):
                raise RowQuarantined("wrong schema: a turn is not an object")
            _add(conversation, turn, row_tools or tools or ())
        if not row_tools and conversation.messages:
            row_tools = tools_in_text(conversation.messages[0].content)
        outcome, reward = row_outcome(record)
        task_id = as_id(record.get("task_id")) or as_id(record.get("id"))
        return converted(conversation, row, Facts(self.name, Domain.CONVERSATIONAL, outcome, reward, task_id), row_tools, tools)


ADAPTER = ShareGptAdapter()


def _add(conversation: Conversation, turn: Mapping[str, Any], tools: Sequence[Tool]) -> None:
    speaker = turn.get("from")
    text = content_text(turn.get("value"), conversation)
    if speaker in _USER:
        add_user(conversation, text)
    elif speaker in _ASSISTANT:
        is_greeting = conversation.is_before_user and "<tool_call>" not in text
        add_assistant(conversation, {**turn, "content": text}, origin=Origin.HARNESS if is_greeting else Origin.MODEL, tools=tools)
    elif speaker in _CALL:
        _add_call(conversation, text)
    elif speaker in _RESULT:
        if "<tool_response>" in text:
            add_user(conversation, text)
        else:
            conversation.tool(text)
    elif speaker == "system":
        conversation.system(text)
    else:
        raise RowQuarantined(f"wrong schema: turn from {speaker!r:.40}")


def _add_call(conversation: Conversation, text: str) -> None:
    try:
        value = orjson.loads(text)
    except orjson.JSONDecodeError:
        value = None
    if not isinstance(value, dict | list) or not value:
        conversation.assistant(text, parse=ParseOutcome.MALFORMED)
        return
    calls, is_well_formed = read_calls(value)
    conversation.assistant("", calls, parse=None if is_well_formed else ParseOutcome.MALFORMED)
