"""A NeMo-Gym row from the product's own records, for pivots whose trajectories did not come from one.

The state becomes Responses API items, the expert's action `expected_action`, or `expected_answer` for a terminal agent, whose reply is JSON text.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from pivotrl.types import Action, Domain, Message, Role, State, Tool, ToolCall, ToolOrigin
from pivotrl.verifiers.gym_terminus import written

AGENTS = {
    Domain.CONVERSATIONAL: "single_step_tool_use_with_argument_comparison_agent",
    Domain.SEARCH: "search_pivot_single_step_tool_use_with_argument_comparison_agent",
    Domain.SWE: "swe_pivot_single_step_tool_use_with_argument_comparison_agent",
    Domain.TERMINAL: "terminus_judge_simple_agent",
}
"""The public agent of each domain: the name that `agent_ref` refers to in a NeMo-Gym configuration."""

_HARNESSES = {"terminus1": "terminus_1", "terminus2": "terminus_2"}


def agent_ref(domain: Domain) -> dict[str, str]:
    """The reference to the domain's public agent."""
    return {"type": "responses_api_agents", "name": AGENTS[domain]}


def build_row(state: State, expert: Action, *, domain: Domain, uuid: str, parallel_tool_calls: bool) -> dict[str, Any]:
    """The row of one pivot. Tools that were only inferred from calls are left out: their schemas would be invented."""
    params: dict[str, Any] = {"input": list(_items(state)), "parallel_tool_calls": parallel_tool_calls, "tool_choice": "auto"}
    row: dict[str, Any] = {"responses_create_params": params, "uuid": uuid, "agent_ref": agent_ref(domain)}
    if _is_reply(expert.tool_calls):
        call = expert.tool_calls[0]
        return {**row, "expected_answer": call.arguments, "metadata": {"harness": _HARNESSES[call.name]}}
    params["tools"] = tools_of(state)
    return {**row, "expected_action": expected_action(expert)}


def tools_of(state: State) -> list[dict[str, Any]]:
    """The state's tools as function tools; none where they were inferred."""
    is_given = state.tool_origin in (ToolOrigin.ROW, ToolOrigin.FILE)
    return [_tool(tool) for tool in state.tools] if is_given else []


def expected_action(expert: Action) -> dict[str, Any]:
    """A message, a call, or a batch of calls."""
    calls = [{"type": "function_call", "name": call.name, "arguments": call.arguments} for call in expert.tool_calls]
    if not calls:
        return {"type": "message", "content": expert.content}
    return calls[0] if len(calls) == 1 else {"type": "function_call_batch", "calls": calls}


def _items(state: State) -> Iterator[dict[str, Any]]:
    num_calls = 0
    for message in state.messages:
        if message.role is Role.TOOL:
            call_id = message.tool_call_id or f"call_{max(num_calls - 1, 0)}"
            yield {"type": "function_call_output", "call_id": call_id, "output": message.content}
            continue
        yield from _spoken(message)
        for call in () if _is_reply(message.tool_calls) else message.tool_calls:
            yield {"type": "function_call", "call_id": call.id or f"call_{num_calls}", "name": call.name, "arguments": call.arguments}
            num_calls += 1


def _spoken(message: Message) -> Iterator[dict[str, Any]]:
    if message.reasoning:
        yield {"type": "reasoning", "id": "rs", "summary": [{"type": "summary_text", "text": message.reasoning}]}
    action = Action(message.content, message.tool_calls, None, message.parse)
    text = written(action) if _is_reply(message.tool_calls) else message.content
    if text or not message.tool_calls:
        yield {"type": "message", "role": message.role.value, "content": text}


def _is_reply(calls: Sequence[ToolCall]) -> bool:
    """Whether the one call is a terminal agent's reply, which was text, and not a call of a tool."""
    return len(calls) == 1 and calls[0].name in _HARNESSES


def _tool(tool: Tool) -> dict[str, Any]:
    return {"type": "function", "name": tool.name, "description": tool.description, "parameters": dict(tool.parameters), "strict": False}
