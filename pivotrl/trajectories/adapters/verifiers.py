"""Result rows of the `verifiers` library: ``{prompt[], completion[], reward, info, task, example_id}``.

A trajectory present is one row. `prompt` is context: its assistant turns are not actions. A call is a JSON string whose arguments are again a JSON
string; tool messages carry no ids and are paired by adjacency; tools are `info.oai_tools`, padded with nulls. `info` may be a JSON string.
Outcome: `reward` of 1 is a success, below 1 a failure, none is unknown.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import orjson

from pivotrl.trajectories.adapters.conversation import Conversation, Facts, converted, reward_outcome
from pivotrl.trajectories.adapters.detection import OneFilePerUnit, is_chat, shown_record
from pivotrl.trajectories.adapters.openai_messages import add_message, as_id
from pivotrl.trajectories.source import Converted, Probe, RawRow, RowDropped, RowQuarantined
from pivotrl.trajectories.tools import parse_tools
from pivotrl.types import Domain, Origin, Tool


class VerifiersAdapter(OneFilePerUnit):
    """Evaluation results of a `verifiers` environment."""

    name = "verifiers"

    def sniff(self, probe: Probe) -> bool:
        record = shown_record(probe)
        if not is_chat(record.get("prompt")):
            return False
        completion = record.get("completion")
        return is_chat(completion) or (completion == [] and "reward" in record)

    def convert(self, row: RawRow, tools: Sequence[Tool] | None) -> Converted:
        record: dict[str, Any] = row.value if isinstance(row.value, dict) else {}
        prompt, completion = record.get("prompt"), record.get("completion")
        if not isinstance(prompt, list) or not isinstance(completion, list):
            raise RowQuarantined("wrong schema: a row is not an object with prompt and completion")
        if not completion:
            raise RowDropped("empty completion")
        conversation = Conversation()
        for message in cast("list[Any]", prompt):
            add_message(conversation, message, origin=Origin.HARNESS)
        for message in cast("list[Any]", completion):
            add_message(conversation, message)
        outcome, reward = reward_outcome(record.get("reward"))
        row_tools = parse_tools(_info(record).get("oai_tools") or record.get("tools"))
        return converted(conversation, row, Facts(self.name, Domain.SEARCH, outcome, reward, _task_id(record)), row_tools, tools)


ADAPTER = VerifiersAdapter()


def _info(record: Mapping[str, Any]) -> Mapping[str, Any]:
    info = record.get("info")
    if isinstance(info, str):
        try:
            info = orjson.loads(info)
        except orjson.JSONDecodeError:
            return {}
    return info if isinstance(info, dict) else {}


def _task_id(record: Mapping[str, Any]) -> str | None:
    """The example's number in its data set, by library version; several samples of one example are one task."""
    return next((as_id(record[key]) for key in ("example_id", "id") if as_id(record.get(key)) is not None), None)
