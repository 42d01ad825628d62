"""tau2: the agent's view of a simulation, on an invented bakery."""

from pathlib import Path
from typing import Any

from fakes.adapter_files import harness_turns, model_turns, pairs, read_value, said

from pivotrl.types import Domain, Outcome, ParseOutcome, Role, Tool, ToolOrigin

GREETING = {"role": "assistant", "content": "Welcome to the bakery!", "tool_calls": None, "cost": 0.0, "usage": None, "raw_data": None}
STOP = {"role": "user", "content": "Thanks ###STOP###", "tool_calls": None}


def call(name: str, call_id: str, requestor: str = "assistant", **arguments: Any) -> dict[str, Any]:
    return {"id": call_id, "name": name, "arguments": arguments, "requestor": requestor}


def agent(content: str | None = None, *calls: dict[str, Any], **extra: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, "tool_calls": list(calls) or None, "usage": {"completion_tokens": 3}, **extra}


def result(call_id: str, content: str, requestor: str = "assistant", *, error: bool = False) -> dict[str, Any]:
    return {"role": "tool", "id": call_id, "content": content, "requestor": requestor, "error": error}


def document(
    *messages: dict[str, Any], reward: float | None = 1.0, tasks: list[Any] | None = None, policy: str | None = "Sell bread."
) -> dict[str, Any]:
    simulation = {
        "id": "s1",
        "task_id": "7",
        "trial": 0,
        "termination_reason": "user_stop",
        "reward_info": None if reward is None else {"reward": reward},
        "messages": list(messages),
    }
    environment = {"domain_name": "bakery", "policy": policy, "tool_defs": None}
    info = {"num_trials": 1, "user_info": {"llm": "u"}, "agent_info": {"llm": "a"}, "environment_info": environment}
    return {"timestamp": "2025-01-01", "info": info, "tasks": tasks or [{"id": "7", "initial_state": None}], "simulations": [simulation]}


def test_the_policy_is_the_system_prompt_and_the_greeting_is_the_harness(tmp_path: Path) -> None:
    messages = (
        GREETING,
        {"role": "user", "content": "A loaf?"},
        agent(None, call("stock", "c1", kind="rye")),
        result("c1", "3"),
        agent("Three left."),
    )
    trajectory = read_value(tmp_path, document(*messages, STOP)).only
    assert said(trajectory)[:2] == [("system", "Sell bread."), ("assistant", "Welcome to the bakery!")]
    assert [turn.content for turn in harness_turns(trajectory)] == ["Welcome to the bakery!"]
    assert [turn.content for turn in model_turns(trajectory)] == ["", "Three left."]
    assert (trajectory.task_id, trajectory.domain, trajectory.outcome, trajectory.reward) == (
        "bakery/7",
        Domain.CONVERSATIONAL,
        Outcome.SUCCESS,
        1.0,
    )
    assert pairs(trajectory) == [('{"kind": "rye"}', "3")]
    assert (trajectory.tool_origin, trajectory.tools[0].name) == (ToolOrigin.INFERRED, "stock")


def test_calls_of_the_users_own_tools_are_invisible(tmp_path: Path) -> None:
    messages = (
        {"role": "user", "content": "My oven is broken."},
        agent("Please check the display."),
        {"role": "user", "content": None, "tool_calls": [call("read_display", "u1", "user")]},
        result("u1", "E7", "user"),
        {"role": "user", "content": "It says E7.", "tool_calls": None},
        agent(None, call("lookup", "c1", code="E7")),
        result("c1", "overheated"),
    )
    reading = read_value(tmp_path, document(*messages))
    assert [content for role, content in said(reading.only) if role == "user"] == ["My oven is broken.", "It says E7."]
    assert [content for role, content in said(reading.only) if role == "tool"] == ["overheated"]
    assert [tool.name for tool in reading.only.tools] == ["lookup"]
    assert reading.repairs == ("calls of the user's own tools left out",)


def test_repeated_call_ids_are_paired_by_adjacency_and_numbered(tmp_path: Path) -> None:
    messages = (
        {"role": "user", "content": "Two loaves."},
        agent(None, call("price", "same", kind="rye"), call("price", "same", kind="oat")),
        result("same", "4"),
        result("same", "5"),
        agent(None, call("price", "same", kind="spelt")),
        result("same", "6", error=True),
    )
    reading = read_value(tmp_path, document(*messages))
    assert pairs(reading.only) == [('{"kind": "rye"}', "4"), ('{"kind": "oat"}', "5"), ('{"kind": "spelt"}', "6")]
    assert reading.repairs == ("tool call ids repeated, numbered",)
    assert [message.is_error for message in reading.only.messages if message.role is Role.TOOL] == [False, False, True]


def test_an_opening_call_or_generated_message_is_no_greeting(tmp_path: Path) -> None:
    solo = read_value(tmp_path, document(agent(None, call("stock", "c1")), result("c1", "3"))).only
    assert len(model_turns(solo)) == 1
    spoken = read_value(tmp_path, document(agent("Hello, I looked you up."), STOP)).only
    assert len(model_turns(spoken)) == 1


def test_copied_history_is_context(tmp_path: Path) -> None:
    history = [agent("Hi."), {"role": "user", "content": "Rye."}, agent("One rye.")]
    tasks = [{"id": "6", "initial_state": None}, {"id": "7", "initial_state": {"message_history": history}}]
    messages = (*history, {"role": "user", "content": "Two."}, agent("Two rye."))
    trajectory = read_value(tmp_path, document(*messages, tasks=tasks)).only
    assert [turn.content for turn in model_turns(trajectory)] == ["Two rye."]


def test_thinking_of_the_provider_is_reasoning(tmp_path: Path) -> None:
    raw = {"thinking_blocks": [{"type": "thinking", "thinking": "They want rye.", "signature": "x"}]}
    messages = ({"role": "user", "content": "Rye."}, agent("Sure.", raw_data=raw), agent("And?", reasoning="Ask more."))
    turns = model_turns(read_value(tmp_path, document(*messages)).only)
    assert [turn.reasoning for turn in turns] == ["They want rye.", "Ask more."]
    assert turns[0].content == "Sure."


def test_outcomes_and_what_is_dropped(tmp_path: Path) -> None:
    talk = ({"role": "user", "content": "Hi."}, agent("Hello."))
    assert read_value(tmp_path, document(*talk, reward=0.0)).only.outcome is Outcome.FAILURE
    assert read_value(tmp_path, document(*talk, reward=0.5)).only.outcome is Outcome.FAILURE
    assert read_value(tmp_path, document(*talk, reward=None)).only.outcome is Outcome.UNKNOWN
    assert read_value(tmp_path, document()).dropped == ["empty simulation"]
    assert read_value(tmp_path, document(GREETING, STOP)).dropped == ["no assistant turn written by the model"]


def test_given_tools_are_used_and_broken_arguments_stay(tmp_path: Path) -> None:
    tools = (Tool("stock", "Bread in stock", {"type": "object", "properties": {"kind": {"type": "string"}}}),)
    broken = {"id": "c1", "name": "stock", "arguments": '{"kind": ', "requestor": "assistant"}
    messages = ({"role": "user", "content": "Rye?"}, agent(None, broken), result("c1", "error", error=True))
    trajectory = read_value(tmp_path, document(*messages), tools=tools).only
    assert (trajectory.tools, trajectory.tool_origin) == (tools, ToolOrigin.FILE)
    (turn,) = model_turns(trajectory)
    assert (turn.parse, turn.tool_calls[0].arguments) == (ParseOutcome.MALFORMED, '{"kind": ')


def test_a_policy_that_is_missing_gives_no_system_message(tmp_path: Path) -> None:
    trajectory = read_value(tmp_path, document({"role": "user", "content": "Hi."}, agent("Hello."), policy=None)).only
    assert said(trajectory)[0] == ("user", "Hi.")
