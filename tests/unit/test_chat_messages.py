"""Chat requests and replies by hand: what is read, what is refused, what a reply says of a call, of thinking, of text that is no call."""

from __future__ import annotations

from typing import Any

import pytest

from pivotrl.actions.registry import action_format
from pivotrl.rollouts.chat_messages import ReasoningPlace, UnusableRequest, chat_reply, read_chat, tickets_of
from pivotrl.types import Completion, FinishReason, Message, Origin, ParseOutcome, Role, Tool, ToolCall, ToolOrigin

LOOK_UP = Tool("look_up", "Looks up", {"type": "object", "properties": {"key": {"type": "string"}}})
TOOLS = [{"type": "function", "function": {"name": "look_up", "description": "Looks up", "parameters": dict(LOOK_UP.parameters)}}]
CALL = '<tool_call>\n{"name": "look_up", "arguments": {"key": "a"}}\n</tool_call>'


def reply(
    text: str, *, form: str = "hermes", tools: tuple[Tool, ...] = (LOOK_UP,), reasoning: ReasoningPlace = "apart", is_cut: bool = False
) -> dict[str, Any]:
    completion = Completion((7, 8, 9), (-0.1,) * 3, FinishReason.LENGTH if is_cut else FinishReason.STOP, 4)
    action = action_format(form).parse(text, tools)
    return chat_reply(completion, action, text=text, tools=tools, num_prompt_tokens=11, ticket=5, reasoning=reasoning)


def message(text: str, **options: Any) -> dict[str, Any]:
    choice = reply(text, **options)["choices"][0]["message"]
    assert (choice.pop("prompt_token_ids"), choice.pop("generation_token_ids"), choice.pop("generation_log_probs")) == ([5], [5], [0.0])
    return choice


def test_a_conversation_is_read_as_an_adapter_reads_it() -> None:
    call = {"id": "call_5_0", "type": "function", "function": {"name": "look_up", "arguments": '{"key": "a"}'}}
    messages = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "Look "}, {"type": "text", "text": "it up."}]},
        {"role": "assistant", "content": None, "tool_calls": [call], "reasoning_content": "It asks.", "prompt_token_ids": [5]},
        {"role": "tool", "tool_call_id": "call_5_0", "content": "1"},
    ]
    asked = read_chat({"model": "policy", "messages": messages, "tools": TOOLS, "temperature": 0.0, "logprobs": True, "max_completion_tokens": 9})
    assert asked.max_new_tokens == 9
    assert asked.state.tools == (LOOK_UP,)
    assert asked.state.tool_origin is ToolOrigin.ROW
    assert asked.state.messages == (
        Message(Role.SYSTEM, "Be brief.", origin=Origin.HARNESS),
        Message(Role.USER, "Look it up."),
        Message(Role.ASSISTANT, "", (ToolCall("look_up", '{"key": "a"}', "call_5_0"),), "It asks.", origin=Origin.MODEL, parse=ParseOutcome.PARSED),
        Message(Role.TOOL, "1", tool_call_id="call_5_0", name="look_up"),
    )
    assert read_chat({"messages": messages[:2]}).state.tool_origin is ToolOrigin.NONE


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ([], "`messages` is not a list"),
        ({}, "`messages` is not a list"),
        ({"messages": []}, "`messages` is not a list"),
        ({"messages": "hi"}, "`messages` is not a list"),
        ({"messages": ["hi"]}, "a message is not an object"),
        ({"messages": [{"role": "oracle", "content": "hi"}]}, "message role is 'oracle'"),
        ({"messages": [{"role": "user", "content": 3}]}, "content is a int"),
        ({"messages": [{"role": "user", "content": "hi"}], "tools": [{"type": "function"}]}, "tool"),
        ({"messages": [{"role": "user", "content": "hi"}], "n": 2}, "`n` is 2"),
        ({"messages": [{"role": "user", "content": "hi"}], "stream": True}, "`stream` is True"),
        ({"messages": [{"role": "user", "content": "hi"}], "stop": ["\n"]}, "`stop` is"),
        ({"messages": [{"role": "user", "content": "hi"}], "max_tokens": 0}, "the cap on new tokens is not a positive number"),
        ({"messages": [{"role": "user", "content": "hi"}], "max_tokens": "many"}, "is not a positive number"),
    ],
)
def test_what_cannot_be_answered_is_refused(body: Any, reason: str) -> None:
    with pytest.raises(UnusableRequest, match=reason):
        read_chat(body)


def test_a_turn_of_thinking_alone_is_history() -> None:
    """What simple_agent asks with after one: it has said nothing and called nothing, so its agent asks again."""
    asked = read_chat({"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "<think>hm</think>"}]})
    assert [(one.role, one.content, one.reasoning) for one in asked.state.messages[1:]] == [(Role.ASSISTANT, "", "hm")]


def test_what_changes_nothing_is_taken() -> None:
    asked = read_chat({"messages": [{"role": "user", "content": "hi"}], "n": 1, "stream": False, "stop": None, "max_tokens": None, "top_p": 0.5})
    assert asked.max_new_tokens is None


def test_calls_are_given_with_ids_of_their_own() -> None:
    assert message(f"Let me see.\n{CALL}\n{CALL}") == {
        "role": "assistant",
        "content": "Let me see.",
        "tool_calls": [
            {"id": f"call_5_{number}", "type": "function", "function": {"name": "look_up", "arguments": '{"key": "a"}'}} for number in (0, 1)
        ],
    }
    whole = reply(CALL)
    assert whole["choices"][0]["finish_reason"] == "tool_calls"
    assert whole["choices"][0]["message"]["content"] is None
    assert whole["usage"] == {"prompt_tokens": 11, "completion_tokens": 3, "total_tokens": 14}


@pytest.mark.parametrize("text", ["Hello.", '<tool_call>\n{"name": "look_up", "argu</tool_call>', '<tool_call>\n{"name": "look_up"'])
def test_what_is_no_call_is_text(text: str) -> None:
    assert message(text) == {"role": "assistant", "content": text}
    assert reply(text)["choices"][0]["finish_reason"] == "stop"


def test_an_agent_without_tools_gets_the_text_whatever_it_holds() -> None:
    """Terminus writes its commands as JSON text and reads them itself."""
    text = '{"analysis": "none", "plan": "ls", "commands": [{"keystrokes": "ls\\n", "duration": 0.1}]}'
    assert action_format("terminus2").parse(text).parse is ParseOutcome.PARSED
    assert message(text, form="terminus2", tools=()) == {"role": "assistant", "content": text}
    assert message(CALL, tools=()) == {"role": "assistant", "content": CALL}


def test_thinking_stands_apart_or_in_the_text() -> None:
    text = f"<think>\nIt asks.\n</think>\n\nLet me see.\n{CALL}"
    apart, inside = message(text), message(text, reasoning="in_content")
    assert (apart["reasoning_content"], apart["content"]) == ("It asks.", "Let me see.")
    assert "reasoning_content" not in inside
    assert inside["content"] == "<think>It asks.</think>Let me see."
    assert message("<think>\nIt never ends") == {"role": "assistant", "content": "<think>\nIt never ends"}


def test_a_cut_turn_says_so() -> None:
    assert reply("Hel", is_cut=True)["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize(
    ("result", "tickets"),
    [
        ({"response": {"output": [{"generation_token_ids": [3]}, {"type": "function_call_output"}, {"generation_token_ids": [4]}]}}, [3, 4]),
        ({"response": {"output": [{"generation_token_ids": []}, {"generation_token_ids": None}]}}, []),
        # Placeholders of agents that lost the ids, and ids that are none of ours.
        ({"response": {"output": [{"generation_token_ids": [0]}, {"generation_token_ids": [1, 2]}, {"generation_token_ids": "x"}]}}, [0, -1, -1]),
        ({"response": {"output": None}}, []),
        ({"response": "lost"}, []),
        (None, []),
    ],
)
def test_tickets_are_read_from_whatever_an_agent_returns(result: Any, tickets: list[int]) -> None:
    assert tickets_of(result) == tickets
