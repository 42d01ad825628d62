"""tau-bench result files: a list of ``{task_id, trial, reward, info, traj[]}`` with OpenAI messages.

A trajectory present is one element of the list. Call ids repeat across the turns of one conversation, so results are paired by adjacency there.
A tool output that begins with ``Error:`` is how the environment reports an error. The `think` tool is an ordinary tool whose output is empty.
Outcome: `reward` of 1 is a success, below 1 a failure, none is unknown. Task ids count from 0 in each domain and no field names the domain.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, cast

from pivotrl.trajectories.adapters.conversation import Conversation, Facts, converted, reward_outcome
from pivotrl.trajectories.adapters.detection import OneFilePerUnit, shown_record, shown_value
from pivotrl.trajectories.adapters.openai_messages import add_message, as_id
from pivotrl.trajectories.files import array_rows
from pivotrl.trajectories.source import Converted, Probe, RawRow, RowDropped, RowQuarantined, SourceUnit
from pivotrl.types import Domain, Tool

_ERROR = "Error:"


class TauBenchAdapter(OneFilePerUnit):
    """tau-bench episodes."""

    name = "tau_bench"

    def sniff(self, probe: Probe) -> bool:
        if not isinstance(shown_value(probe), list):
            return False
        record = shown_record(probe)
        info = record.get("info")
        has_task = isinstance(info, dict) and isinstance(info.get("task"), dict)
        return "task_id" in record and ("traj" in record or ("reward" in record and has_task))

    def rows(self, unit: SourceUnit) -> Iterator[RawRow | RowQuarantined | RowDropped]:
        yield from array_rows(unit)

    def convert(self, row: RawRow, tools: Sequence[Tool] | None) -> Converted:
        if not isinstance(row.value, dict) or not isinstance(row.value.get("traj"), list):
            raise RowQuarantined("wrong schema: an episode is not an object with traj")
        episode = cast("dict[str, Any]", row.value)
        if not episode["traj"]:
            raise RowDropped("empty episode")
        conversation = Conversation()
        for message in cast("list[Any]", episode["traj"]):
            add_message(conversation, _with_error(message))
        outcome, reward = reward_outcome(episode.get("reward"))
        facts = Facts(self.name, Domain.CONVERSATIONAL, outcome, reward, as_id(episode.get("task_id")))
        return converted(conversation, row, facts, (), tools)


ADAPTER = TauBenchAdapter()


def _with_error(message: Any) -> Any:
    if isinstance(message, dict) and message.get("role") == "tool":
        content = message.get("content")
        if isinstance(content, str) and content.startswith(_ERROR):
            return {**message, "is_error": True}
    return message
