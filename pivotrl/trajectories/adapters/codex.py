"""Codex CLI session files: JSONL events ``{timestamp, type, payload}``.

A trajectory present is one file. Only `response_item` events are read: `event_msg` events repeat them for the screen. Reasoning is encrypted, so its
summary is kept and the rest counted as a repair. Turns that the harness writes in the user's name (environment, instructions) are the harness's. A
last line that was cut off is left out, a broken one in the middle quarantines the session, and a compaction ends it: what follows was written
from a history that the file does not hold. A shell result with a non-zero exit code is an error. Outcome: unknown.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, cast

import orjson

from pivotrl.trajectories.adapters.conversation import Conversation, Facts, converted
from pivotrl.trajectories.adapters.detection import OneFilePerUnit, shown_record
from pivotrl.trajectories.adapters.responses_items import ResponseItems
from pivotrl.trajectories.adapters.shell_text import exit_code
from pivotrl.trajectories.files import jsonl_rows
from pivotrl.trajectories.source import Converted, Probe, RawRow, RowDropped, RowQuarantined, SourceUnit
from pivotrl.trajectories.tools import parse_tools
from pivotrl.types import Domain, Tool

REPAIR_CUT_LINE = "last line cut off, left out"
REPAIR_COMPACTED = "turns after a compaction left out"

_EVENT_TYPES = ("session_meta", "response_item", "event_msg", "turn_context", "compacted")
# Bookkeeping among the response items: nothing that the model saw or wrote.
_BOOKKEEPING = ("ghost_snapshot", "other")


class CodexAdapter(OneFilePerUnit):
    """Codex CLI sessions."""

    name = "codex"

    def sniff(self, probe: Probe) -> bool:
        record = shown_record(probe)
        return record.get("type") in _EVENT_TYPES and isinstance(record.get("payload"), dict)

    def rows(self, unit: SourceUnit) -> Iterator[RawRow | RowQuarantined | RowDropped]:
        events: list[Any] = []
        repairs: set[str] = set()
        broken: RowQuarantined | None = None
        for row in jsonl_rows(unit):
            if broken is not None:
                yield broken
                return
            if isinstance(row, RowQuarantined):
                broken = row
                continue
            events.append(row.value)
            repairs.update(row.repairs)
        if broken is not None:
            if not events:
                yield broken
                return
            repairs.add(REPAIR_CUT_LINE)
        yield RawRow(unit.name, 0, None, events, None, tuple(sorted(repairs)))

    def convert(self, row: RawRow, tools: Sequence[Tool] | None) -> Converted:
        if not isinstance(row.value, list):
            raise RowQuarantined("wrong schema: a session is not a list of events")
        conversation = Conversation()
        items = ResponseItems(conversation, is_error=_is_error)
        row_tools: tuple[Tool, ...] = ()
        for event in cast("list[Any]", row.value):
            payload = event.get("payload") if isinstance(event, dict) else None
            if not isinstance(payload, dict):
                raise RowQuarantined("wrong schema: an event without a payload")
            match event.get("type"):
                case "session_meta":
                    row_tools = _begin(conversation, payload) or row_tools
                case "response_item" if payload.get("type") not in _BOOKKEEPING:
                    items.add(payload)
                case "compacted":
                    conversation.repairs.add(REPAIR_COMPACTED)
                    break
                case _:
                    pass
        items.flush()
        return converted(conversation, row, Facts(self.name, Domain.SWE), row_tools, tools)


ADAPTER = CodexAdapter()


def _begin(conversation: Conversation, meta: dict[str, Any]) -> tuple[Tool, ...]:
    instructions = meta.get("base_instructions") or meta.get("instructions")
    if isinstance(instructions, dict):
        instructions = instructions.get("text")
    if isinstance(instructions, str) and instructions and not conversation.messages:
        conversation.system(instructions)
    return parse_tools(meta.get("dynamic_tools"))


def _is_error(output: Any) -> bool:
    """Whether a shell result says so: JSON text with `metadata.exit_code` or a `success` flag, or a text that opens with an exit code."""
    if isinstance(output, dict):
        return output.get("success") is False
    if not isinstance(output, str):
        return False
    if output.startswith("Exit code: "):
        return exit_code("exit code " + output[len("Exit code: ") :][:12]) not in (None, 0)
    if not output.startswith("{"):
        return False
    try:
        value = orjson.loads(output)
    except orjson.JSONDecodeError:
        return False
    metadata = value.get("metadata") if isinstance(value, dict) else None
    return isinstance(metadata, dict) and metadata.get("exit_code") not in (None, 0)
