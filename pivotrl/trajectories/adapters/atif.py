"""Agent Trajectory Interchange Format (ATIF) files: ``{schema_version, session_id, agent, steps[], final_metrics}``.

A trajectory present is one file; one without an agent step is dropped. A step's `source` is system, user or agent; an agent step has a message,
`reasoning_content`, `tool_calls` (``{tool_call_id, function_name, arguments}``) and an `observation` whose results answer the calls. Where a step has
no calls, its results are what the agent saw next: a user turn. Steps marked `is_copied_context` are not actions. Messages of a Terminus-2 agent with
the JSON parser are read by the `terminus2` format. Domain: terminal, swe or search by the agent's name or its tools, else conversational.
Outcome: unknown, the format holds no verdict. A session id is a run, not a task, so the trajectory's own id is the task.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

from pivotrl.trajectories.adapters.conversation import Conversation, Facts, converted
from pivotrl.trajectories.adapters.detection import OneFilePerUnit, shown_record
from pivotrl.trajectories.adapters.openai_messages import add_message, as_id, content_text
from pivotrl.trajectories.adapters.terminus2 import add_terminus2_turn
from pivotrl.trajectories.files import document_rows
from pivotrl.trajectories.source import Converted, Probe, RawRow, RowDropped, RowQuarantined, SourceUnit
from pivotrl.trajectories.tools import parse_tools
from pivotrl.types import Domain, Origin, Tool

_DOMAIN_BY_AGENT = {
    "terminus": Domain.TERMINAL,
    "swe-agent": Domain.SWE,
    "mini-swe": Domain.SWE,
    "openhands": Domain.SWE,
    "codex": Domain.SWE,
    "claude-code": Domain.SWE,
    "aider": Domain.SWE,
}
_DOMAIN_BY_TOOL = {
    "bash_command": Domain.TERMINAL,
    "str_replace_editor": Domain.SWE,
    "execute_bash": Domain.SWE,
    "bash": Domain.SWE,
    "search": Domain.SEARCH,
    "visit": Domain.SEARCH,
    "web_search": Domain.SEARCH,
}


class AtifAdapter(OneFilePerUnit):
    """ATIF trajectories of any agent."""

    name = "atif"

    def sniff(self, probe: Probe) -> bool:
        return str(shown_record(probe).get("schema_version")).startswith("ATIF-")

    def rows(self, unit: SourceUnit) -> Iterator[RawRow | RowQuarantined | RowDropped]:
        yield from document_rows(unit)

    def convert(self, row: RawRow, tools: Sequence[Tool] | None) -> Converted:
        document: dict[str, Any] = row.value if isinstance(row.value, dict) else {}
        steps = document.get("steps")
        if not isinstance(steps, list) or not all(isinstance(step, dict) for step in cast("list[Any]", steps)):
            raise RowQuarantined("wrong schema: a trajectory is not an object with steps")
        run = cast("list[dict[str, Any]]", steps)
        if not any(step.get("source") == "agent" for step in run):
            raise RowDropped("no agent step")
        agent: dict[str, Any] = document["agent"] if isinstance(document.get("agent"), dict) else {}
        is_terminus_text = _is_terminus_json(agent) and not any(step.get("tool_calls") for step in run)
        conversation = Conversation(calls_carry_ids=not is_terminus_text)
        for step in run:
            _add(conversation, step, is_terminus_text=is_terminus_text)
        facts = Facts(self.name, _domain(agent, run), has_tool_list=not is_terminus_text)
        return converted(conversation, row, facts, parse_tools(agent.get("tool_definitions")), tools)


ADAPTER = AtifAdapter()


def _add(conversation: Conversation, step: Mapping[str, Any], *, is_terminus_text: bool) -> None:
    text = content_text(step.get("message"), conversation)
    match step.get("source"):
        case "agent":
            origin = Origin.HARNESS if step.get("is_copied_context") else Origin.MODEL
            message = {"role": "assistant", "content": text, "reasoning_content": step.get("reasoning_content")}
            if is_terminus_text:
                add_terminus2_turn(conversation, message, origin=origin)
            else:
                add_message(conversation, {**message, "tool_calls": _calls(step.get("tool_calls"))}, origin=origin)
        case "user":
            conversation.user(text)
        case "system" if conversation.is_before_user:
            conversation.system(text)
        case "system":
            # Chat templates know a system message only at the start; later ones are the environment speaking.
            conversation.user(text)
        case source:
            raise RowQuarantined(f"wrong schema: step source is {source!r:.40}")
    observation = step.get("observation")
    results = observation.get("results") if isinstance(observation, dict) else None
    for result in cast("list[Any]", results) if isinstance(results, list) else ():
        if isinstance(result, dict):
            _add_result(conversation, result)


def _calls(raw: Any) -> list[dict[str, Any]]:
    calls = [call for call in cast("list[Any]", raw) if isinstance(call, dict)] if isinstance(raw, list) else []
    return [{"id": call.get("tool_call_id"), "name": call.get("function_name"), "arguments": call.get("arguments", "")} for call in calls]


def _add_result(conversation: Conversation, result: Mapping[str, Any]) -> None:
    text = content_text(result.get("content"), conversation)
    if conversation.awaits_result:
        conversation.tool(text, call_id=as_id(result.get("source_call_id")))
    else:
        conversation.user(text)


def _is_terminus_json(agent: Mapping[str, Any]) -> bool:
    extra = agent.get("extra")
    parser = extra.get("parser") if isinstance(extra, dict) else None
    return str(agent.get("name")).startswith("terminus") and parser in (None, "json")


def _domain(agent: Mapping[str, Any], steps: Sequence[Mapping[str, Any]]) -> Domain:
    name = str(agent.get("name")).lower()
    for prefix, domain in _DOMAIN_BY_AGENT.items():
        if name.startswith(prefix):
            return domain
    for step in steps:
        for call in _calls(step.get("tool_calls")):
            if call["name"] in _DOMAIN_BY_TOOL:
                return _DOMAIN_BY_TOOL[call["name"]]
    return Domain.CONVERSATIONAL
