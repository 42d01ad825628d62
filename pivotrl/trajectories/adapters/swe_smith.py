"""SWE-smith fine-tuning rows, ``{messages, instance_id}`` per line, and the .traj files of the same runs.

A trajectory present is one row or one .traj file. Calls are ``<function=NAME><parameter=KEY>VALUE</parameter></function>`` in the text (other
variants of the set carry `tool_calls`); the tools are described in the system prompt, which types the values. Observations are user turns: the one
after a call is its result, kept as the agent saw it, prefix included. Rows of the published set store `messages` as a JSON string.
Outcome: the `resolved` flag where a row has it, else unknown. .traj files are read as SWE-agent's, and detected as such.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import orjson

from pivotrl.trajectories.adapters.conversation import Conversation, Facts, converted
from pivotrl.trajectories.adapters.detection import OneFilePerUnit, chat_text, is_chat, shown_record
from pivotrl.trajectories.adapters.openai_messages import add_message, as_id, content_text
from pivotrl.trajectories.adapters.swe_agent import convert_run
from pivotrl.trajectories.adapters.tools_in_text import tools_in_text
from pivotrl.trajectories.source import Converted, Probe, RawRow, RowDropped, RowQuarantined
from pivotrl.types import Domain, Outcome, Tool

_OUTCOMES = {True: Outcome.SUCCESS, False: Outcome.FAILURE}


class SweSmithAdapter(OneFilePerUnit):
    """SWE-smith demonstrations."""

    name = "swe_smith"

    def sniff(self, probe: Probe) -> bool:
        record = shown_record(probe)
        messages = record.get("messages")
        if "trajectory_format" in record or "info" in record or not (is_chat(messages) or isinstance(messages, str)):
            return False
        if "instance_id" in record:
            return True
        # A first row longer than the head does not show its last key.
        text = chat_text(messages)
        return "---- BEGIN FUNCTION #" in text and "<function=" in text and "response" not in record

    def convert(self, row: RawRow, tools: Sequence[Tool] | None) -> Converted:
        if isinstance(row.value, dict) and "history" in row.value:
            return convert_run(row, tools, self.name)
        record, messages = _messages(row.value)
        first = messages[0]
        row_tools = tools_in_text(content_text(first.get("content"), Conversation())) if isinstance(first, dict) else ()
        conversation = Conversation(calls_carry_ids=any(isinstance(message, dict) and message.get("tool_calls") for message in messages))
        for message in messages:
            if isinstance(message, dict) and message.get("role") == "user" and conversation.awaits_result:
                conversation.tool(content_text(message.get("content"), conversation))
            else:
                add_message(conversation, message, tools=row_tools or tools or ())
        resolved = record.get("resolved")
        outcome = _OUTCOMES[resolved] if isinstance(resolved, bool) else Outcome.UNKNOWN
        return converted(conversation, row, Facts(self.name, Domain.SWE, outcome, None, as_id(record.get("instance_id"))), row_tools, tools)


ADAPTER = SweSmithAdapter()


def _messages(value: Any) -> tuple[dict[str, Any], list[Any]]:
    record = cast("dict[str, Any]", value) if isinstance(value, dict) else {}
    messages = record.get("messages")
    if isinstance(messages, str):
        try:
            messages = orjson.loads(messages)
        except orjson.JSONDecodeError as error:
            raise RowQuarantined("wrong schema: messages are not JSON") from error
    if not isinstance(messages, list):
        raise RowQuarantined("wrong schema: a row is not an object with messages")
    if not messages:
        raise RowDropped("no messages")
    return record, messages
