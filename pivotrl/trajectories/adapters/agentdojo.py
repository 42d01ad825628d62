"""AgentDojo run files: one JSON object per run, ``{suite_name, user_task_id, injection_task_id, messages[], utility, security, error}``.

A trajectory present is one file. A call is ``{function, args, id}``; some models' calls have no id or an empty one. Where a tool failed, the agent
was shown `error` in place of the content. Outcome: `utility` says whether the user's task was solved; a run whose injected attack went through
(`security` true beside an `injection_task_id`) is a failure whatever its utility; no utility is unknown.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

from pivotrl.trajectories.adapters.conversation import Conversation, Facts, converted
from pivotrl.trajectories.adapters.detection import OneFilePerUnit, shown_record
from pivotrl.trajectories.adapters.openai_messages import add_message
from pivotrl.trajectories.files import document_rows
from pivotrl.trajectories.source import Converted, Probe, RawRow, RowDropped, RowQuarantined, SourceUnit
from pivotrl.types import Domain, Outcome, Tool


class AgentDojoAdapter(OneFilePerUnit):
    """AgentDojo runs, benign and attacked."""

    name = "agentdojo"

    def sniff(self, probe: Probe) -> bool:
        record = shown_record(probe)
        return "suite_name" in record and "user_task_id" in record

    def rows(self, unit: SourceUnit) -> Iterator[RawRow | RowQuarantined | RowDropped]:
        yield from document_rows(unit)

    def convert(self, row: RawRow, tools: Sequence[Tool] | None) -> Converted:
        if not isinstance(row.value, dict) or not isinstance(row.value.get("messages"), list):
            raise RowQuarantined("wrong schema: a run is not an object with messages")
        run = cast("dict[str, Any]", row.value)
        if not run["messages"]:
            raise RowDropped("empty run")
        conversation = Conversation()
        for message in cast("list[Any]", run["messages"]):
            add_message(conversation, _as_shown(message))
        facts = Facts(self.name, Domain.CONVERSATIONAL, _outcome(run), None, _task_id(run))
        return converted(conversation, row, facts, (), tools)


ADAPTER = AgentDojoAdapter()


def _as_shown(message: Any) -> Any:
    if isinstance(message, dict) and message.get("role") == "tool" and isinstance(message.get("error"), str) and message["error"]:
        return {**message, "content": message["error"]}
    return message


def _outcome(run: Mapping[str, Any]) -> Outcome:
    utility = run.get("utility")
    if not isinstance(utility, bool):
        return Outcome.UNKNOWN
    was_hijacked = run.get("injection_task_id") is not None and run.get("security") is True
    return Outcome.SUCCESS if utility and not was_hijacked else Outcome.FAILURE


def _task_id(run: Mapping[str, Any]) -> str | None:
    """Task ids count from 0 in each suite, so the suite is part of the name. An attacked run is the same task."""
    suite, task = run.get("suite_name"), run.get("user_task_id")
    return f"{suite}/{task}" if isinstance(suite, str) and isinstance(task, str) else None
