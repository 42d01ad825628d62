"""ShareGPT function calling: the action is a role of its own, tools are a JSON string."""

from pathlib import Path
from typing import Any

import orjson
from fakes.adapter_files import harness_turns, model_turns, pairs, read_rows, read_value, said

from pivotrl.types import Domain, Outcome, ParseOutcome, ToolOrigin

TOOLS = '[{"name": "bake", "description": "Bake", "parameters": {"type": "object", "properties": {"kind": {"type": "string"}}}}]'


def turns(*said: tuple[str, str]) -> list[dict[str, str]]:
    return [{"from": speaker, "value": value} for speaker, value in said]


def test_call_and_observation(tmp_path: Path) -> None:
    conversation = turns(
        ("human", "Bake rye."),
        ("function_call", '{"name": "bake", "arguments": {"kind": "rye"}}'),
        ("observation", '{"ok": true}'),
        ("gpt", "Baked."),
    )
    reading = read_value(tmp_path, [{"conversations": conversation, "tools": TOOLS}])
    trajectory = reading.only
    assert pairs(trajectory) == [('{"kind": "rye"}', '{"ok": true}')]
    assert [(turn.content, turn.parse) for turn in model_turns(trajectory)] == [("", ParseOutcome.PARSED), ("Baked.", ParseOutcome.ABSENT)]
    assert (trajectory.tool_origin, trajectory.tools[0].name) == (ToolOrigin.ROW, "bake")
    assert (trajectory.domain, trajectory.outcome) == (Domain.CONVERSATIONAL, Outcome.UNKNOWN)
    assert reading.repairs == ()


def test_rows_without_tools_and_other_names_for_roles(tmp_path: Path) -> None:
    talk = {"conversations": turns(("system", "Be kind."), ("user", "Hi."), ("assistant", "Hello.")), "tools": "[]"}
    framed = {"conversations": turns(("human", "Hi."), ("gpt", "Hello.")), "system": "Be brief.", "tools": None, "id": 5, "success": True}
    reading = read_rows(tmp_path, talk, framed)
    first, second = (converted.trajectory for converted in reading.kept)
    assert said(first) == [("system", "Be kind."), ("user", "Hi."), ("assistant", "Hello.")]
    assert (first.tools, first.tool_origin) == ((), ToolOrigin.NONE)
    assert said(second)[0] == ("system", "Be brief.")
    assert (second.task_id, second.outcome) == ("5", Outcome.SUCCESS)


def test_broken_calls_keep_their_text(tmp_path: Path) -> None:
    conversation = turns(("human", "x"), ("function_call", '{"name": "bake", "arg'), ("function_call", '{"name": "bake", "arguments": "kind"}'))
    first, second = model_turns(read_value(tmp_path, [{"conversations": conversation, "tools": TOOLS}]).only)
    assert (first.parse, first.content, first.tool_calls) == (ParseOutcome.MALFORMED, '{"name": "bake", "arg', ())
    assert (second.parse, second.tool_calls[0].arguments) == (ParseOutcome.MALFORMED, "kind")


def test_parallel_calls_as_a_list(tmp_path: Path) -> None:
    calls = orjson.dumps([{"name": "bake", "arguments": {"kind": kind}} for kind in ("rye", "oat")]).decode()
    conversation = turns(("human", "x"), ("function_call", calls), ("observation", "1"), ("observation", "2"))
    assert pairs(read_value(tmp_path, [{"conversations": conversation, "tools": TOOLS}]).only) == [('{"kind": "rye"}', "1"), ('{"kind": "oat"}', "2")]


def test_tagged_calls_inside_gpt_turns(tmp_path: Path) -> None:
    call = '<tool_call>\n{"name": "bake", "arguments": {"kind": "rye"}}\n</tool_call>'
    system = f"Tools: <tools>{orjson.dumps(orjson.loads(TOOLS)[0]).decode()}</tools>"
    conversation = turns(("system", system), ("human", "x"), ("gpt", call), ("tool", "<tool_response>\nok\n</tool_response>"), ("gpt", "Done."))
    trajectory = read_value(tmp_path, [{"conversations": conversation}]).only
    assert pairs(trajectory) == [('{"kind": "rye"}', "ok")]
    assert [tool.name for tool in trajectory.tools] == ["bake"]


def test_a_greeting_in_front_of_the_user_is_scripted(tmp_path: Path) -> None:
    trajectory = read_value(tmp_path, [{"conversations": turns(("gpt", "How can I help?"), ("human", "Hi."), ("gpt", "Hello."))}]).only
    assert [turn.content for turn in harness_turns(trajectory)] == ["How can I help?"]


def test_unknown_speakers_are_quarantined(tmp_path: Path) -> None:
    good: Any = {"conversations": turns(("human", "Hi."), ("gpt", "Hello."))}
    reading = read_rows(tmp_path, good, {"conversations": turns(("ghost", "Boo."))}, {"conversations": []})
    assert (len(reading.kept), reading.dropped) == (1, ["no messages"])
    assert reading.quarantined == ["wrong schema: turn from 'ghost'"]
