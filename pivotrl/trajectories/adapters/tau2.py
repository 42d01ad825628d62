"""tau2-bench result files: ``{timestamp, info, tasks, simulations[]}``.

A trajectory present is one element of `simulations`; an empty one is dropped. The agent's view is rebuilt: the policy from
`info.environment_info` is the system prompt (the harness' fixed instructions around it are not in the file, so they are not invented); the first
assistant message is the harness' scripted greeting; calls of the user's own tools and their results are invisible to the agent and left out.
Messages copied from a task's `initial_state.message_history` are context, not actions. Thinking is read from `raw_data.thinking_blocks`.
Outcome: `reward_info.reward` of 1 is a success, below 1 a failure, none is unknown.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

from pivotrl.trajectories.adapters.conversation import Conversation, Facts, converted, reward_outcome
from pivotrl.trajectories.adapters.detection import OneFilePerUnit, shown_value
from pivotrl.trajectories.adapters.openai_messages import as_id, content_text, read_calls, thinking_text
from pivotrl.trajectories.files import array_rows
from pivotrl.trajectories.source import Converted, Probe, RawRow, RowDropped, RowQuarantined, SourceUnit
from pivotrl.trajectories.tools import parse_tools
from pivotrl.types import Domain, Origin, ParseOutcome, Tool

REPAIR_USER_TOOLS = "calls of the user's own tools left out"


class Tau2Adapter(OneFilePerUnit):
    """tau2-bench simulations."""

    name = "tau2"

    def sniff(self, probe: Probe) -> bool:
        value = shown_value(probe)
        if not isinstance(value, dict):
            return False
        document = cast("dict[str, Any]", value)
        info = document.get("info")
        if isinstance(info, dict) and "trajectory" not in document:
            return "user_info" in info and ("agent_info" in info or "environment_info" in info or "simulations" in document)
        simulations = document.get("simulations")
        return isinstance(simulations, list) and bool(simulations) and isinstance(simulations[0], dict) and "task_id" in simulations[0]

    def rows(self, unit: SourceUnit) -> Iterator[RawRow | RowQuarantined | RowDropped]:
        yield from array_rows(unit, key="simulations", shared_keys=("info", "tasks"))

    def convert(self, row: RawRow, tools: Sequence[Tool] | None) -> Converted:
        if not isinstance(row.value, dict) or not isinstance(row.value.get("messages"), list):
            raise RowQuarantined("wrong schema: a simulation is not an object with messages")
        simulation = cast("dict[str, Any]", row.value)
        messages = cast("list[Any]", simulation["messages"])
        if not messages:
            raise RowDropped("empty simulation")
        environment = _environment(row.shared)
        conversation = Conversation()
        policy = simulation.get("policy") or environment.get("policy")
        if isinstance(policy, str) and policy and _role(messages[0]) != "system":
            conversation.system(policy)
        num_copied = _num_history_messages(row.shared, simulation.get("task_id"))
        for index, message in enumerate(messages):
            if not isinstance(message, dict):
                raise RowQuarantined("wrong schema: a message is not an object")
            _add(conversation, message, is_copied=index < num_copied, is_first=index == 0)
        reward_info = simulation.get("reward_info")
        outcome, reward = reward_outcome(reward_info.get("reward") if isinstance(reward_info, dict) else None)
        facts = Facts(self.name, Domain.CONVERSATIONAL, outcome, reward, _task_id(environment, simulation))
        return converted(conversation, row, facts, parse_tools(environment.get("tool_defs")), tools)


ADAPTER = Tau2Adapter()


def _add(conversation: Conversation, message: Mapping[str, Any], *, is_copied: bool, is_first: bool) -> None:
    role = message.get("role")
    if role == "assistant":
        content = content_text(message.get("content"), conversation)
        calls, is_well_formed = read_calls(message.get("tool_calls"))
        is_greeting = is_first and not calls and not message.get("usage") and not message.get("raw_data")
        conversation.assistant(
            content,
            calls,
            reasoning=_reasoning(message),
            origin=Origin.HARNESS if is_copied or is_greeting else Origin.MODEL,
            parse=None if is_well_formed else ParseOutcome.MALFORMED,
        )
    elif role == "user":
        if message.get("tool_calls"):
            conversation.repairs.add(REPAIR_USER_TOOLS)
        else:
            conversation.user(content_text(message.get("content"), conversation))
    elif role == "tool":
        results = message.get("tool_messages")
        for result in cast("list[Any]", results) if isinstance(results, list) else (message,):
            _add_result(conversation, result)
    elif role == "system":
        conversation.system(content_text(message.get("content"), conversation))
    else:
        raise RowQuarantined(f"wrong schema: message role is {role!r:.40}")


def _add_result(conversation: Conversation, result: Mapping[str, Any]) -> None:
    if result.get("requestor") == "user":
        conversation.repairs.add(REPAIR_USER_TOOLS)
        return
    content = content_text(result.get("content"), conversation)
    conversation.tool(content, call_id=as_id(result.get("id")), is_error=result.get("error") is True)


def _reasoning(message: Mapping[str, Any]) -> str | None:
    written = message.get("reasoning") or message.get("reasoning_content")
    if isinstance(written, str):
        return written
    raw = message.get("raw_data")
    if not isinstance(raw, dict):
        return None
    inner = raw.get("message")
    for holder in (raw, inner):
        blocks = holder.get("thinking_blocks") if isinstance(holder, dict) else None
        if isinstance(blocks, list):
            return thinking_text(blocks)
    text = inner.get("reasoning_content") if isinstance(inner, dict) else None
    return text if isinstance(text, str) else None


def _environment(shared: Any) -> Mapping[str, Any]:
    info = shared.get("info") if isinstance(shared, dict) else None
    environment = info.get("environment_info") if isinstance(info, dict) else None
    return cast("dict[str, Any]", environment) if isinstance(environment, dict) else {}


def _task_id(environment: Mapping[str, Any], simulation: Mapping[str, Any]) -> str | None:
    """Task ids count from 0 in each domain, so the domain is part of the name."""
    task_id, domain = as_id(simulation.get("task_id")), environment.get("domain_name")
    return f"{domain}/{task_id}" if task_id is not None and isinstance(domain, str) and domain else task_id


def _num_history_messages(shared: Any, task_id: Any) -> int:
    tasks = shared.get("tasks") if isinstance(shared, dict) else None
    for task in cast("list[Any]", tasks) if isinstance(tasks, list) else ():
        if isinstance(task, dict) and task.get("id") == task_id:
            state = task.get("initial_state")
            history = state.get("message_history") if isinstance(state, dict) else None
            return len(history) if isinstance(history, list) else 0
    return 0


def _role(message: Any) -> Any:
    return message.get("role") if isinstance(message, dict) else None
