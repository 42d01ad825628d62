"""mini-SWE-agent trajectory files: ``{info, messages[], trajectory_format, instance_id}``, or a bare list of messages (.traj.json, old versions).

A trajectory present is one file. The closing message with role `exit` is the harness' and left out; the last call is never answered. Observations are
tool messages, or, where commands are written in a fence, user turns: the one after a command is its result. A command whose return code is not 0
is an error. A text with more than one command is refused by the harness, so it is malformed.
Outcome: an exit that is not `Submitted`, or with an empty submission, is a failure; the tests' verdict is not in the file, so the rest is unknown.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

from pivotrl.trajectories.adapters.conversation import Conversation, Facts, converted
from pivotrl.trajectories.adapters.detection import OneFilePerUnit, is_chat, shown_value
from pivotrl.trajectories.adapters.openai_messages import add_message, as_id, content_text
from pivotrl.trajectories.adapters.shell_text import bash_call, exit_code, fenced_blocks
from pivotrl.trajectories.files import document_rows
from pivotrl.trajectories.source import Converted, Probe, RawRow, RowDropped, RowQuarantined, SourceUnit
from pivotrl.types import Domain, Outcome, ParseOutcome, Tool

REPAIR_EXIT = "harness' exit message left out"


# Only these blocks are commands; an example in another language beside them is not.
_SHELL_LANGUAGES = ("mswea_bash_command", "bash")


class MiniSweAgentAdapter(OneFilePerUnit):
    """mini-SWE-agent runs."""

    name = "mini_swe_agent"

    def sniff(self, probe: Probe) -> bool:
        value = shown_value(probe)
        if isinstance(value, list):
            return probe.name.endswith(".traj.json") and is_chat(value)
        if not isinstance(value, dict) or "trajectory" in value:
            return False
        document = cast("dict[str, Any]", value)
        if str(document.get("trajectory_format")).startswith("mini-swe-agent"):
            return True
        info = document.get("info")
        if not isinstance(info, dict):
            return False
        return "mini_version" in info or ("model_stats" in info and ("config" in info or is_chat(document.get("messages"))))

    def rows(self, unit: SourceUnit) -> Iterator[RawRow | RowQuarantined | RowDropped]:
        yield from document_rows(unit)

    def convert(self, row: RawRow, tools: Sequence[Tool] | None) -> Converted:
        document: dict[str, Any] = row.value if isinstance(row.value, dict) else {"messages": row.value}
        messages = document.get("messages")
        if not isinstance(messages, list) or not all(isinstance(message, dict) for message in cast("list[Any]", messages)):
            raise RowQuarantined("wrong schema: a run has no list of messages")
        if not messages:
            raise RowDropped("no messages")
        run = cast("list[dict[str, Any]]", messages)
        calls_are_text = not any(message.get("tool_calls") for message in run)
        conversation = Conversation(calls_carry_ids=not calls_are_text)
        for message in run:
            _add(conversation, message, calls_are_text=calls_are_text)
        facts = Facts(self.name, Domain.SWE, _outcome(document.get("info")), None, as_id(document.get("instance_id")))
        return converted(conversation, row, facts, (), tools)


ADAPTER = MiniSweAgentAdapter()


def _add(conversation: Conversation, message: Mapping[str, Any], *, calls_are_text: bool) -> None:
    role = message.get("role")
    if role == "exit":
        conversation.repairs.add(REPAIR_EXIT)
    elif role == "tool" or (role == "user" and conversation.awaits_result and calls_are_text):
        content = content_text(message.get("content"), conversation)
        extra = message.get("extra")
        code = extra.get("returncode") if isinstance(extra, dict) else exit_code(content[:64])
        conversation.tool(content, call_id=as_id(message.get("tool_call_id")), is_error=code not in (None, 0))
    elif role == "assistant" and calls_are_text:
        _add_text_turn(conversation, message)
    else:
        add_message(conversation, message)


def _add_text_turn(conversation: Conversation, message: Mapping[str, Any]) -> None:
    text = content_text(message.get("content"), conversation)
    reasoning = message.get("reasoning_content")
    reasoning = reasoning if isinstance(reasoning, str) else None
    blocks = fenced_blocks(text)
    blocks = tuple(block for block in blocks if block.language in _SHELL_LANGUAGES) or blocks
    if len(blocks) == 1:
        conversation.assistant(blocks[0].before, (bash_call(blocks[0].body),), reasoning=reasoning)
    else:
        conversation.assistant(text, reasoning=reasoning, parse=ParseOutcome.MALFORMED if blocks else ParseOutcome.ABSENT)


def _outcome(info: Any) -> Outcome:
    if not isinstance(info, dict) or not isinstance(info.get("exit_status"), str):
        return Outcome.UNKNOWN
    is_submitted = info["exit_status"] == "Submitted" and bool(info.get("submission"))
    return Outcome.UNKNOWN if is_submitted else Outcome.FAILURE
