"""NeMo-Gym pivot rows: ``responses_create_params`` (what the agent saw, and its tools) and the expert's next action.

A trajectory present is one row: the recorded input plus the expert action as its last turn. Only that turn is the model's (earlier assistant turns
are context), so a row gives exactly one candidate. The action is `expected_action` (function_call, function_call_batch, message) or, for terminal
rows, `expected_answer` (the JSON text of a Terminus-2 reply, or of a Terminus-1 reply, whose pseudo-tool is `terminus1`). Recorded rollouts (rows
with `response` and `reward`) are some policy's attempts, not the expert's: the response is left out, the expert action kept where the row has one,
the row dropped where it has none.
Import is lenient: null keys, missing types, missing tools and a string as input are all read.
Domain: terminal where the action is an `expected_answer`, swe or search where the agent's name says so, else conversational.
Outcome: unknown; a rollout's reward judges the rollout. Task: the trajectory where the row names it (`trajectory_id`, or a uuid with the step
number cut off), else the conversation's opening, so that neighbouring rows of one trajectory never fall on both sides of a held-out split.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, cast

from pivotrl.identity import content_id
from pivotrl.trajectories.adapters.conversation import Conversation, Facts, converted
from pivotrl.trajectories.adapters.detection import OneFilePerUnit, shown_record
from pivotrl.trajectories.adapters.openai_messages import arguments_text, as_id, content_text
from pivotrl.trajectories.adapters.responses_items import ResponseItems, read_item_call
from pivotrl.trajectories.adapters.terminus2 import add_terminus2_turn
from pivotrl.trajectories.source import Converted, Probe, RawRow, RowDropped, RowQuarantined
from pivotrl.trajectories.tools import parse_tools
from pivotrl.types import Domain, Origin, ParseOutcome, Role, Tool, ToolCall

_TERMINUS1 = "terminus1"

REPAIR_ROLLOUT = "recorded rollout left out, its expert action kept"

_UUID_AND_STEP = re.compile(r"([0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12})-\d+")


class NemoGymAdapter(OneFilePerUnit):
    """Single-step rows of NeMo-Gym."""

    name = "nemo_gym"

    def sniff(self, probe: Probe) -> bool:
        return isinstance(shown_record(probe).get("responses_create_params"), dict)

    def convert(self, row: RawRow, tools: Sequence[Tool] | None) -> Converted:
        record: dict[str, Any] = row.value if isinstance(row.value, dict) else {}
        params = record.get("responses_create_params")
        if not isinstance(params, dict):
            raise RowQuarantined("wrong schema: a row is not an object with responses_create_params")
        action, answer = record.get("expected_action"), record.get("expected_answer")
        if not action and not answer:
            raise RowDropped("recorded rollout without an expert action" if "response" in record else "no expert action")
        conversation = Conversation(calls_carry_ids=False)
        _add_input(conversation, params)
        task_id = _task_id(record, conversation)
        if "response" in record:
            conversation.repairs.add(REPAIR_ROLLOUT)
        if action:
            _add_expert_action(conversation, action)
        else:
            _add_expert_answer(conversation, answer)
        parallel = params.get("parallel_tool_calls") is not False
        facts = Facts(self.name, _domain(record), task_id=task_id, parallel_tool_calls=parallel, has_tool_list=bool(action))
        return converted(conversation, row, facts, parse_tools(params.get("tools")), tools)


ADAPTER = NemoGymAdapter()


def _add_input(conversation: Conversation, params: Mapping[str, Any]) -> None:
    instructions = params.get("instructions")
    if isinstance(instructions, str) and instructions:
        conversation.system(instructions)
    given = params.get("input")
    if isinstance(given, str):
        conversation.user(given)
        return
    if not isinstance(given, list):
        raise RowQuarantined("wrong schema: responses_create_params.input is neither text nor a list")
    items = ResponseItems(conversation, origin=Origin.HARNESS)
    for item in cast("list[Any]", given):
        items.add(item)
    items.flush()


def _add_expert_action(conversation: Conversation, action: Any) -> None:
    kind = action.get("type") if isinstance(action, dict) else None
    if kind == "message":
        conversation.assistant(content_text(action.get("content"), conversation))
        return
    raw_calls = action.get("calls") if kind == "function_call_batch" else [action] if kind == "function_call" else None
    if not isinstance(raw_calls, list) or not raw_calls or not all(isinstance(call, dict) for call in raw_calls):
        raise RowQuarantined(f"wrong schema: expected_action of type {kind!r:.40}")
    calls = [read_item_call(call) for call in raw_calls]
    is_well_formed = all(is_readable for _, is_readable in calls)
    conversation.assistant("", tuple(call for call, _ in calls), parse=None if is_well_formed else ParseOutcome.MALFORMED)


def _add_expert_answer(conversation: Conversation, answer: Any) -> None:
    arguments, is_object = arguments_text(answer)
    if is_object and '"state_analysis"' in arguments:
        conversation.assistant("", (ToolCall(_TERMINUS1, arguments),), awaits_result=False)
    else:
        add_terminus2_turn(conversation, {"content": arguments})


def _domain(record: Mapping[str, Any]) -> Domain:
    if not record.get("expected_action"):
        return Domain.TERMINAL
    agent = record.get("agent_ref")
    name = str(agent.get("name")) if isinstance(agent, dict) else ""
    return Domain.SWE if "swe" in name else Domain.SEARCH if "search" in name else Domain.CONVERSATIONAL


def _task_id(record: Mapping[str, Any], conversation: Conversation) -> str:
    if trajectory_id := as_id(record.get("trajectory_id")):
        return trajectory_id
    uuid = as_id(record.get("uuid"))
    if uuid is not None:
        step = _UUID_AND_STEP.fullmatch(uuid)
        return step.group(1) if step else uuid
    opening: list[str] = []
    for message in conversation.messages:
        opening.append(message.content)
        if message.role is Role.USER:
            break
    return content_id(opening)
