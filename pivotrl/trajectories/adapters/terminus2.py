"""Terminus-2 fine-tuning rows: ``{task_id, conversations[]}``, user and assistant turns, the action a JSON text of analysis, plan and commands.

A trajectory present is one row. Some turns have prose or fences around the JSON, some hold no command; the action is read by the `terminus2`
format, so it is one call of its pseudo-tool (in no tool list: the agent was given none) whose arguments are the JSON as written. Terminal output is
a user turn, as the agent saw it: the answer to a command batch is a screen, not a tool result. There is no system message. An episode ends with two
completion turns (the harness asks whether the agent is sure); both are the model's.
Outcome: the row's `reward` or `success` where it has one, else unknown.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

from pivotrl.actions.registry import action_format
from pivotrl.trajectories.adapters.conversation import Conversation, Facts, converted
from pivotrl.trajectories.adapters.detection import OneFilePerUnit, chat_text, is_chat, shown_record
from pivotrl.trajectories.adapters.openai_messages import add_message, as_id, content_text, row_outcome
from pivotrl.trajectories.source import Converted, Probe, RawRow, RowDropped, RowQuarantined
from pivotrl.types import Domain, Origin, Tool


class Terminus2Adapter(OneFilePerUnit):
    """Terminus-2 episodes."""

    name = "terminus2"

    def sniff(self, probe: Probe) -> bool:
        conversations = shown_record(probe).get("conversations")
        return is_chat(conversations) and '"keystrokes"' in chat_text(conversations)

    def convert(self, row: RawRow, tools: Sequence[Tool] | None) -> Converted:
        if not isinstance(row.value, dict) or not isinstance(row.value.get("conversations"), list):
            raise RowQuarantined("wrong schema: a row is not an object with conversations")
        record = cast("dict[str, Any]", row.value)
        if not record["conversations"]:
            raise RowDropped("no messages")
        conversation = Conversation(calls_carry_ids=False)
        for message in cast("list[Any]", record["conversations"]):
            if isinstance(message, dict) and message.get("role") == "assistant":
                add_terminus2_turn(conversation, message)
            else:
                add_message(conversation, message)
        outcome, reward = row_outcome(record)
        facts = Facts(self.name, Domain.TERMINAL, outcome, reward, as_id(record.get("task_id")), has_tool_list=False)
        return converted(conversation, row, facts, (), tools)


ADAPTER = Terminus2Adapter()


def add_terminus2_turn(conversation: Conversation, message: dict[str, Any], *, origin: Origin = Origin.MODEL) -> None:
    """An assistant message whose text is a Terminus-2 reply. The screen that answers it is a user turn, so its call awaits no result."""
    action = action_format("terminus2").parse(content_text(message.get("content"), conversation))
    written = message.get("reasoning_content")
    reasoning = "\n\n".join(text for text in (written if isinstance(written, str) else None, action.reasoning) if text)
    conversation.assistant(action.content, action.tool_calls, reasoning=reasoning, origin=origin, parse=action.parse, awaits_result=False)
