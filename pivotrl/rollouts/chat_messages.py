"""OpenAI chat requests as states, and sampled turns as chat replies: what an agent that knows only that protocol sends and gets.

Consumed by rollouts/chat_server.py. Reading is that of the trajectory adapters, so a state an agent asks with is the state its trajectory would
give. Upstream form: POST /v1/chat/completions as vLLM serves it, and what nemo-gym's `vllm_model` server adds to a message
(`prompt_token_ids`, `generation_token_ids`, `generation_log_probs`).
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, cast

from pivotrl.actions.registry import action_format
from pivotrl.trajectories.adapters.conversation import Conversation
from pivotrl.trajectories.adapters.openai_messages import add_message
from pivotrl.trajectories.source import RowQuarantined
from pivotrl.trajectories.tools import parse_tools
from pivotrl.types import Action, Completion, FinishReason, ParseOutcome, State, Tool, ToolCall, ToolOrigin

_CAPS = ("max_tokens", "max_completion_tokens")
# What would make a reply of another form than the one turn that is learned from.
_REFUSED: Mapping[str, tuple[Any, ...]] = {"n": (None, 1), "stream": (None, False), "stop": (None, [], "")}

type ReasoningPlace = Literal["apart", "in_content"]


class UnusableRequest(ValueError):
    """A request that cannot be answered; the message says why, to the agent's author."""


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """What an agent asks: a state, and at most how many tokens."""

    state: State
    max_new_tokens: int | None


def read_chat(body: Any) -> ChatRequest:
    """The request of a JSON body. Sampling settings other than the cap are not read: how a policy samples is the recipe's.

    A last message of the assistant, as after a turn of thinking alone, is history like the others: the next turn is a new one.

    Raises:
        UnusableRequest: for messages or tools that cannot be read, several replies, a stream, or stop texts.
    """
    if not isinstance(body, dict) or not isinstance(body.get("messages"), list) or not body["messages"]:
        raise UnusableRequest("`messages` is not a list with at least one message")
    request = cast("dict[str, Any]", body)
    for key, allowed in _REFUSED.items():
        if request.get(key) not in allowed:
            raise UnusableRequest(f"`{key}` is {request[key]!r:.40}; a turn is one whole reply that ends as the chat template ends it")
    try:
        tools = parse_tools(request.get("tools"))
        conversation = Conversation()
        for message in request["messages"]:
            add_message(conversation, message, tools=tools)
    except RowQuarantined as error:
        raise UnusableRequest(str(error)) from error
    messages = conversation.finish()
    caps = [request[key] for key in _CAPS if request.get(key) is not None]
    if any(isinstance(cap, bool) or not isinstance(cap, int) or cap < 1 for cap in caps):
        raise UnusableRequest("the cap on new tokens is not a positive number")
    return ChatRequest(State(messages, tools, ToolOrigin.ROW if tools else ToolOrigin.NONE), min(caps, default=None))


def chat_reply(
    completion: Completion, action: Action, *, text: str, tools: tuple[Tool, ...], num_prompt_tokens: int, ticket: int, reasoning: ReasoningPlace
) -> dict[str, Any]:
    """A sampled turn as a chat completion.

    Calls are given as `tool_calls` where the agent stated tools and all of them can be read; else the text is the content, as vLLM does.

    Args:
        text: what was generated, opened thinking in front, end-of-turn token taken off.
        ticket: a number for this turn, which an agent of NeMo-Gym hands on with its result. It stands where token ids would: a history of
            prompts with their ids would grow with the square of the turns.
    """
    content, calls, thinking = _said(action, text, tools)
    message: dict[str, Any] = {"role": "assistant", "content": content or None}
    if thinking and reasoning == "apart":
        message["reasoning_content"] = thinking
    elif thinking:
        message["content"] = f"<think>{thinking}</think>{content}"
    if calls:
        message["tool_calls"] = [
            {"id": f"call_{ticket}_{number}", "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for number, call in enumerate(calls)
        ]
    message |= {"prompt_token_ids": [ticket], "generation_token_ids": [ticket], "generation_log_probs": [0.0]}
    is_cut = completion.finish_reason is FinishReason.LENGTH
    num_tokens = len(completion.token_ids)
    return {
        "id": f"chatcmpl-{ticket}",
        "object": "chat.completion",
        "created": int(time.time()),
        "model": "policy",
        "choices": [{"index": 0, "message": message, "finish_reason": "length" if is_cut else "tool_calls" if calls else "stop"}],
        "usage": {"prompt_tokens": num_prompt_tokens, "completion_tokens": num_tokens, "total_tokens": num_prompt_tokens + num_tokens},
    }


def tickets_of(result: Any) -> list[int]:
    """The tickets of the turns in an agent's result (nemo-gym's verify response), in order.

    >>> tickets_of({"response": {"output": [{"type": "message", "generation_token_ids": [7]}, {"type": "function_call_output"}]}})
    [7]
    """
    held = [item["generation_token_ids"] for item in _output(result) if item.get("generation_token_ids")]
    return [ids[0] if isinstance(ids, list) and len(ids) == 1 and isinstance(ids[0], int) else -1 for ids in cast("list[Any]", held)]


def _output(result: Any) -> list[dict[str, Any]]:
    response = result.get("response") if isinstance(result, dict) else None
    output = response.get("output") if isinstance(response, dict) else None
    return [cast("dict[str, Any]", item) for item in cast("list[Any]", output or []) if isinstance(item, dict)]


def says_something(result: Any) -> bool:
    """Whether an agent's result holds a turn of the policy, with or without its ticket.

    >>> says_something({"response": {"output": [{"type": "function_call_output"}]}}), says_something({"response": {"output": [{"type": "message"}]}})
    (False, True)
    """
    return any(item.get("type") in ("message", "function_call", "reasoning") and item.get("role") != "user" for item in _output(result))


def _said(action: Action, text: str, tools: tuple[Tool, ...]) -> tuple[str, tuple[ToolCall, ...], str | None]:
    if action.parse is ParseOutcome.PARSED and tools:
        return action.content, action.tool_calls, action.reasoning
    spoken = action_format("plain").parse(text)
    return spoken.content, (), spoken.reasoning
