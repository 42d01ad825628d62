"""WebDancer-style chatml rows: ``{type: "chatml", messages[], functions[], answer, ...}``, calls as ``<tool_call>`` text after ``<think>``.

A trajectory present is one row. Results are user turns wrapped in ``<tool_response>``; they become tool messages without the tags. Tools come from
`functions`, else from the ``<tools>`` block of the first user message. ``<answer>`` stays in the text: it is what the model said.
Outcome: unknown; `answer` is the reference, not a verdict. Rows carry no task id.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

from pivotrl.trajectories.adapters.conversation import Conversation, Facts, converted
from pivotrl.trajectories.adapters.detection import OneFilePerUnit, is_chat, shown_record
from pivotrl.trajectories.adapters.openai_messages import add_message, as_id, content_text, row_outcome
from pivotrl.trajectories.adapters.tools_in_text import tools_in_text
from pivotrl.trajectories.source import Converted, Probe, RawRow, RowDropped, RowQuarantined
from pivotrl.trajectories.tools import parse_tools
from pivotrl.types import Domain, Tool


class ChatmlToolsAdapter(OneFilePerUnit):
    """Search episodes in chatml."""

    name = "chatml_tools"

    def sniff(self, probe: Probe) -> bool:
        record = shown_record(probe)
        if not is_chat(record.get("messages")):
            return False
        functions = record.get("functions")
        return record.get("type") == "chatml" or (
            isinstance(functions, list) and bool(functions) and isinstance(functions[0], dict) and "name_for_model" in functions[0]
        )

    def convert(self, row: RawRow, tools: Sequence[Tool] | None) -> Converted:
        if not isinstance(row.value, dict) or not isinstance(row.value.get("messages"), list):
            raise RowQuarantined("wrong schema: a row is not an object with messages")
        record = cast("dict[str, Any]", row.value)
        messages = cast("list[Any]", record["messages"])
        if not messages:
            raise RowDropped("no messages")
        row_tools = parse_tools(record.get("functions")) or _tools_of_prompt(messages)
        conversation = Conversation(calls_carry_ids=False)
        for message in messages:
            add_message(conversation, message, tools=row_tools or tools or ())
        outcome, reward = row_outcome(record)
        task_id = as_id(record.get("task_id")) or as_id(record.get("id"))
        return converted(conversation, row, Facts(self.name, Domain.SEARCH, outcome, reward, task_id), row_tools, tools)


ADAPTER = ChatmlToolsAdapter()


def _tools_of_prompt(messages: Sequence[Any]) -> tuple[Tool, ...]:
    for message in messages[:2]:
        if isinstance(message, dict) and (found := tools_in_text(content_text(message.get("content"), Conversation()))):
            return found
    return ()
