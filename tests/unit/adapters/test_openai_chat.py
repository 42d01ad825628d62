"""Plain chat rows: every way in which calls, content, reasoning, tools and outcomes are written."""

from pathlib import Path
from typing import Any

import orjson
import pytest
from fakes.adapter_files import harness_turns, model_turns, pairs, read_rows, read_value, said

from pivotrl.types import Domain, Outcome, ParseOutcome, Tool, ToolOrigin

USER = {"role": "user", "content": "Bake rye."}
TOOL = {
    "type": "function",
    "function": {"name": "bake", "description": "Bake", "parameters": {"type": "object", "properties": {"kind": {"type": "string"}}}},
}


def agent(content: Any = None, *calls: Any, **extra: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **({"tool_calls": list(calls)} if calls else {}), **extra}


def call(arguments: Any, call_id: str | None = "c1") -> dict[str, Any]:
    return {"type": "function", "function": {"name": "bake", "arguments": arguments}, **({} if call_id is None else {"id": call_id})}


def tool(content: Any, call_id: str | None = "c1") -> dict[str, Any]:
    return {"role": "tool", "content": content, **({} if call_id is None else {"tool_call_id": call_id})}


@pytest.mark.parametrize(
    ("arguments", "written", "parse"),
    [
        ({"kind": "rye"}, '{"kind": "rye"}', ParseOutcome.PARSED),
        ('{"kind":"rye"}', '{"kind":"rye"}', ParseOutcome.PARSED),
        ("{}", "{}", ParseOutcome.PARSED),
        ('{"kind": ', '{"kind": ', ParseOutcome.MALFORMED),
        ("rye", "rye", ParseOutcome.MALFORMED),
        ("", "", ParseOutcome.MALFORMED),
        (None, "null", ParseOutcome.MALFORMED),
        (["rye"], '["rye"]', ParseOutcome.MALFORMED),
        ('"{\\"kind\\": 1}"', '"{\\"kind\\": 1}"', ParseOutcome.MALFORMED),
    ],
)
def test_arguments_are_kept_as_written(tmp_path: Path, arguments: Any, written: str, parse: ParseOutcome) -> None:
    (turn,) = model_turns(read_rows(tmp_path, {"messages": [USER, agent(None, call(arguments))]}).only)
    assert (turn.tool_calls[0].arguments, turn.parse, turn.content) == (written, parse, "")


def test_other_shapes_of_a_call(tmp_path: Path) -> None:
    shapes: list[Any] = [
        {"name": "bake", "arguments": {"n": 1}, "id": "a"},
        {"function": "bake", "args": {"n": 2}, "id": "b"},
        orjson.dumps({"function": {"name": "bake", "arguments": '{"n": 3}'}, "id": "c"}).decode(),
        {"type": "function_call", "name": "bake", "arguments": '{"n": 4}', "call_id": "d"},
    ]
    legacy = {"role": "assistant", "content": None, "function_call": {"name": "bake", "arguments": '{"n": 5}'}}
    first, second = model_turns(read_rows(tmp_path, {"messages": [USER, agent(None, *shapes), legacy]}).only)
    assert [call.arguments for call in (*first.tool_calls, *second.tool_calls)] == [f'{{"n": {n}}}' for n in range(1, 6)]
    assert {turn.parse for turn in (first, second)} == {ParseOutcome.PARSED}


def test_parallel_calls_with_missing_and_reused_ids(tmp_path: Path) -> None:
    def turn(call_id: str | None, *numbers: int) -> dict[str, Any]:
        return agent(None, *(call({"n": n}, call_id) for n in numbers))

    missing = read_rows(tmp_path, {"messages": [USER, turn(None, 1, 2), tool("one", None), tool("two", None)]})
    assert pairs(missing.only) == [('{"n": 1}', "one"), ('{"n": 2}', "two")]
    assert missing.repairs == ("tool call ids missing, numbered",)
    reused = read_rows(tmp_path, {"messages": [USER, turn("c1", 1), tool("one"), turn("c1", 2), tool("two")]})
    assert pairs(reused.only) == [('{"n": 1}', "one"), ('{"n": 2}', "two")]
    assert reused.repairs == ("tool call ids repeated, numbered",)


def test_results_that_fit_no_call_are_kept_and_counted(tmp_path: Path) -> None:
    messages = [USER, tool("early"), agent(None, call({}, "a"), call({}, "b")), tool("one", "zzz"), USER, agent("Done.")]
    reading = read_rows(tmp_path, {"messages": messages})
    assert [(m.content, m.tool_call_id) for m in reading.only.messages if m.role.value == "tool"] == [("early", None), ("one", "a")]
    assert reading.repairs == ("tool call without a result", "tool result id unknown, paired by adjacency", "tool result without a call")


@pytest.mark.parametrize(
    ("content", "text", "repairs"),
    [
        ("Baked.", "Baked.", ()),
        (None, "", ()),
        ([{"type": "text", "text": "Bak"}, {"type": "text", "text": "ed."}], "Baked.", ()),
        ([{"type": "image_url", "image_url": {"url": "x"}}, "Baked."], "Baked.", ("content part that is not text left out",)),
        ([], "", ()),
    ],
)
def test_content_forms(tmp_path: Path, content: Any, text: str, repairs: tuple[str, ...]) -> None:
    reading = read_rows(tmp_path, {"messages": [USER, agent(content)]})
    assert (model_turns(reading.only)[0].content, reading.repairs) == (text, repairs)


@pytest.mark.parametrize(
    ("message", "reasoning", "content"),
    [
        (agent("Yes.", reasoning_content="Why not."), "Why not.", "Yes."),
        (agent("Yes.", reasoning="Why not."), "Why not.", "Yes."),
        (agent("<think>\nWhy not.\n</think>\n\nYes."), "Why not.", "Yes."),
        (agent("Why not.\n</think>\n\nYes."), "Why not.", "Yes."),
        (agent([{"type": "thinking", "thinking": "Why not."}, {"type": "text", "text": "Yes."}]), "Why not.", "Yes."),
        (agent("<think>\nWhy not.\n</think>\n\nYes.", reasoning_content="Why not."), "Why not.", "Yes."),
        (agent("<think>\nTwo.\n</think>\n\nYes.", reasoning_content="One."), "One.\n\nTwo.", "Yes."),
    ],
)
def test_reasoning_is_never_lost(tmp_path: Path, message: dict[str, Any], reasoning: str, content: str) -> None:
    spoken = model_turns(read_rows(tmp_path, {"messages": [USER, message]}).only)[0]
    assert (spoken.reasoning, spoken.content) == (reasoning, content)
    acting = model_turns(read_rows(tmp_path, {"messages": [USER, {**message, "tool_calls": [call("{}")]}]}).only)[0]
    assert (acting.reasoning, acting.content, acting.parse) == (reasoning, content, ParseOutcome.PARSED)


def test_calls_in_the_text_and_tools_in_the_prompt(tmp_path: Path) -> None:
    system = f"<tools>\n{orjson.dumps(TOOL).decode()}\n</tools>"
    text = 'Ok.\n<tool_call>\n{"name": "bake", "arguments": {"kind": "rye"}}\n</tool_call>'
    messages = [{"role": "system", "content": system}, USER, agent(text), {"role": "user", "content": "<tool_response>\nbaked\n</tool_response>"}]
    trajectory = read_rows(tmp_path, {"messages": messages}).only
    assert pairs(trajectory) == [('{"kind": "rye"}', "baked")]
    assert (model_turns(trajectory)[0].content, trajectory.tools[0].name, trajectory.tool_origin) == ("Ok.", "bake", ToolOrigin.ROW)
    xml = "<tool_call>\n<function=bake>\n<parameter=kind>\n5\n</parameter>\n</function>\n</tool_call>"
    typed = read_rows(tmp_path, {"messages": [USER, agent(xml)], "tools": [TOOL]}).only
    assert model_turns(typed)[0].tool_calls[0].arguments == '{"kind": "5"}'


def test_tools_in_the_row_beside_it_or_inferred(tmp_path: Path) -> None:
    messages = [USER, agent(None, call('{"kind": "rye"}'))]
    given = (Tool("other", "", {"type": "object"}),)
    for key, value in (("tools", [TOOL]), ("functions", [TOOL["function"]]), ("tools", orjson.dumps([TOOL]).decode())):
        trajectory = read_rows(tmp_path, {"messages": messages, key: value}, tools=given).only
        assert ([tool.name for tool in trajectory.tools], trajectory.tool_origin) == (["bake"], ToolOrigin.ROW)
    assert read_rows(tmp_path, {"messages": messages}, tools=given).only.tool_origin is ToolOrigin.FILE
    inferred = read_rows(tmp_path, {"messages": messages}).only
    assert (inferred.tools[0].parameters["properties"], inferred.tool_origin) == ({"kind": {"type": "string"}}, ToolOrigin.INFERRED)


@pytest.mark.parametrize(
    ("extra", "outcome", "reward"),
    [
        ({}, Outcome.UNKNOWN, None),
        ({"reward": 1}, Outcome.SUCCESS, 1.0),
        ({"reward": 0.3}, Outcome.FAILURE, 0.3),
        ({"success": True}, Outcome.SUCCESS, None),
        ({"success": False, "reward": 1.0}, Outcome.FAILURE, 1.0),
        ({"outcome": "success", "reward": 0.0}, Outcome.SUCCESS, 0.0),
        ({"outcome": "unknown", "reward": 0.0}, Outcome.UNKNOWN, 0.0),
        ({"outcome": "great"}, Outcome.UNKNOWN, None),
    ],
)
def test_outcomes(tmp_path: Path, extra: dict[str, Any], outcome: Outcome, reward: float | None) -> None:
    trajectory = read_rows(tmp_path, {"messages": [USER, agent("Done.")], **extra}).only
    assert (trajectory.outcome, trajectory.reward) == (outcome, reward)


def test_turns_that_are_not_to_be_learned_from(tmp_path: Path) -> None:
    messages = [{"role": "developer", "content": "Rules."}, agent("Welcome!"), USER, agent("Skip.", weight=0), USER, agent("Learn.", weight=1)]
    trajectory = read_rows(tmp_path, {"messages": messages}).only
    assert [turn.content for turn in harness_turns(trajectory)] == ["Welcome!", "Skip."]
    assert [turn.content for turn in model_turns(trajectory)] == ["Learn."]
    assert said(trajectory)[0] == ("system", "Rules.")


def test_arrays_documents_and_the_other_key(tmp_path: Path) -> None:
    row = {"conversations": [USER, agent("Done.")], "task_id": "t1", "domain": "search", "parallel_tool_calls": False}
    for value in ([row], row):
        trajectory = read_value(tmp_path, value).only
        assert (trajectory.task_id, trajectory.domain, trajectory.parallel_tool_calls) == ("t1", Domain.SEARCH, False)


def test_bad_rows_do_not_stop_the_good_ones(tmp_path: Path) -> None:
    good = {"messages": [USER, agent("Done.")]}
    bad = [
        {"messages": [{"role": "wizard", "content": "x"}]},
        {"messages": ["x"]},
        {"messages": [USER, agent(5)]},
        {"messages": [USER, agent([{"type": "tool_use", "id": "t", "name": "n", "input": {}}])]},
        {"texts": []},
    ]
    reading = read_rows(tmp_path, good, *bad, {"messages": []}, {"messages": [USER]}, good)
    assert len(reading.kept) == 2
    assert reading.dropped == ["no messages", "no assistant turn written by the model"]
    assert reading.quarantined == [
        "wrong schema: message role is 'wizard'",
        "wrong schema: a message is not an object",
        "wrong schema: content is a int",
        "content part of type 'tool_use': calls inside content are not supported",
        "wrong schema: a row is not an object with messages",
    ]
