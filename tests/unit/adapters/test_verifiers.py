"""verifiers results: calls as JSON strings in JSON strings, tool messages without ids, null-padded schemas."""

from pathlib import Path
from typing import Any

import orjson
from fakes.adapter_files import harness_turns, model_turns, pairs, read_rows

from pivotrl.types import Domain, Outcome, ParseOutcome, ToolOrigin

TOOL = {
    "type": "function",
    "function": {
        "name": "look",
        "description": "Look",
        "parameters": {
            "type": "object",
            "properties": {"query": {"type": "string", "enum": None}, "page": None},
            "required": ["query"],
            "additionalProperties": False,
        },
    },
}


def call(call_id: str, arguments: str, name: str = "look") -> str:
    return orjson.dumps({"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}).decode()


def agent(content: str, *calls: str) -> dict[str, Any]:
    return {"role": "assistant", "content": content, "tool_calls": list(calls) or None}


def tool(content: str) -> dict[str, Any]:
    return {"role": "tool", "content": content, "tool_calls": None}


def row(*completion: dict[str, Any], **extra: Any) -> dict[str, Any]:
    prompt = [{"role": "system", "content": "Search."}, {"role": "user", "content": "Who?"}]
    return {
        "example_id": 0,
        "prompt": prompt,
        "completion": list(completion),
        "reward": 1.0,
        "task": "default",
        "info": {"oai_tools": [TOOL]},
        **extra,
    }


def test_calls_are_unwrapped_and_paired_by_adjacency(tmp_path: Path) -> None:
    completion = (agent("", call("a", '{"query":"x"}'), call("b", '{"query":"y"}')), tool("for x"), tool("for y"), agent("Ada."))
    reading = read_rows(tmp_path, row(*completion))
    trajectory = reading.only
    assert pairs(trajectory) == [('{"query":"x"}', "for x"), ('{"query":"y"}', "for y")]
    assert len(model_turns(trajectory)) == 2
    assert reading.repairs == ()
    assert (trajectory.domain, trajectory.outcome, trajectory.task_id) == (Domain.SEARCH, Outcome.SUCCESS, "0")


def test_null_padding_is_taken_off_the_tools(tmp_path: Path) -> None:
    for info in ({"oai_tools": [TOOL]}, orjson.dumps({"oai_tools": [TOOL]}).decode()):
        trajectory = read_rows(tmp_path, row(agent("Ada."), info=info)).only
        assert trajectory.tool_origin is ToolOrigin.ROW
        assert trajectory.tools[0].parameters["properties"] == {"query": {"type": "string"}}


def test_broken_calls_stay_as_written(tmp_path: Path) -> None:
    completion = (agent("", call("a", '{"query":')), tool("error"), agent("", "not json"), agent("", call("c", "{}", name="")))
    turns = model_turns(read_rows(tmp_path, row(*completion)).only)
    assert [turn.parse for turn in turns] == [ParseOutcome.MALFORMED] * 3
    assert [turn.tool_calls[0].arguments for turn in turns] == ['{"query":', "not json", "{}"]


def test_assistant_turns_of_the_prompt_are_context(tmp_path: Path) -> None:
    prompt = [{"role": "user", "content": "Example?"}, agent("Like so."), {"role": "user", "content": "Who?"}]
    trajectory = read_rows(tmp_path, row(agent("Ada."), prompt=prompt, id=4, example_id=None)).only
    assert [turn.content for turn in harness_turns(trajectory)] == ["Like so."]
    assert trajectory.task_id == "4"


def test_outcomes_and_empty_completions(tmp_path: Path) -> None:
    rows = (row(agent("A."), reward=0.5), row(agent("A."), reward=None), row(), row(agent("A."), prompt="text"))
    reading = read_rows(tmp_path, row(agent("A.")), *rows)
    assert [converted.trajectory.outcome for converted in reading.kept] == [Outcome.SUCCESS, Outcome.FAILURE, Outcome.UNKNOWN]
    assert reading.dropped == ["empty completion"]
    assert reading.quarantined == ["wrong schema: a row is not an object with prompt and completion"]
