"""WebDancer chatml: thinking, Hermes calls in the text, responses as user turns, tools in the row or in the first user message."""

from pathlib import Path
from typing import Any

from fakes.adapter_files import model_turns, pairs, read_rows, said

from pivotrl.types import Domain, Outcome, ParseOutcome, ToolOrigin

FUNCTIONS = [
    {
        "name_for_human": "look",
        "name_for_model": "look",
        "description_for_model": "Look things up",
        "parameters": {"type": "object", "properties": {"query": {"type": "array", "items": {"type": "string"}}}, "required": ["query"]},
    }
]
QUESTION = """Use these tools.
<tools>
{
  "name": "look",
  "description": "Look things up",
  "parameters": {"type": "object", "properties": {"query": {"type": "array"}}}
},
{"name": "open", "description": "Open a page", "parameters": {"type": "object", "properties": {}}}
</tools>
User: Who baked it?"""
CALL = '<think>\nI should look.\n</think>\n<tool_call>\n{"name": "look", "arguments": {"query": ["bread", "baker"]}}\n</tool_call>'
ANSWER = "<think>\nClear.\n</think>\n<answer>\nAda.\n</answer>"


def row(*contents: str, **extra: Any) -> dict[str, Any]:
    roles = ("assistant", "user")
    turns = [{"role": roles[index % 2], "content": content} for index, content in enumerate(contents)]
    opening = [{"role": "system", "content": "Search well."}, {"role": "user", "content": QUESTION}]
    return {"type": "chatml", "task": "t", "messages": [*opening, *turns], "functions": FUNCTIONS, "tool_calls": [], "answer": [["Ada"]], **extra}


def test_think_call_response_answer(tmp_path: Path) -> None:
    trajectory = read_rows(tmp_path, row(CALL, "<tool_response>\nA page\n\nabout Ada.\n</tool_response>", ANSWER)).only
    call, answer = model_turns(trajectory)
    assert (call.content, call.reasoning, call.tool_calls[0].name) == ("", "I should look.", "look")
    assert (answer.content, answer.reasoning, answer.parse) == ("<answer>\nAda.\n</answer>", "Clear.", ParseOutcome.ABSENT)
    assert pairs(trajectory) == [('{"query": ["bread", "baker"]}', "A page\n\nabout Ada.")]
    assert (trajectory.domain, trajectory.outcome, trajectory.task_id) == (Domain.SEARCH, Outcome.UNKNOWN, trajectory.id)
    assert said(trajectory)[1] == ("user", QUESTION)


def test_parallel_calls_and_responses_in_one_turn(tmp_path: Path) -> None:
    call = '<tool_call>\n{"name": "open", "arguments": {"n": 1}}\n</tool_call>\n<tool_call>\n{"name": "open", "arguments": {"n": 2}}\n</tool_call>'
    responses = "<tool_response>\none\n</tool_response>\n<tool_response>\ntwo\n</tool_response>"
    assert pairs(read_rows(tmp_path, row(call, responses, ANSWER)).only) == [('{"n": 1}', "one"), ('{"n": 2}', "two")]


def test_arguments_as_a_json_string(tmp_path: Path) -> None:
    call = '<tool_call>\n{"name": "look", "arguments": "{\\"query\\": [\\"x\\"]}"}\n</tool_call>'
    (turn,) = model_turns(read_rows(tmp_path, row(call)).only)
    assert turn.tool_calls[0].arguments == '{"query": ["x"]}'


def test_a_broken_call_keeps_its_text(tmp_path: Path) -> None:
    broken = '<think>\nHm.\n</think>\n<tool_call>\n{"name": "look", "arguments": {\n</tool_call>'
    (turn,) = model_turns(read_rows(tmp_path, row(broken)).only)
    assert (turn.parse, turn.content) == (ParseOutcome.MALFORMED, broken)


def test_tools_of_the_row_else_of_the_prompt(tmp_path: Path) -> None:
    with_functions = read_rows(tmp_path, row(CALL)).only
    assert [(tool.name, tool.description, tool.parameters["required"]) for tool in with_functions.tools] == [("look", "Look things up", ["query"])]
    in_prompt = read_rows(tmp_path, row(CALL, functions=[])).only
    assert ([tool.name for tool in in_prompt.tools], in_prompt.tool_origin) == (["look", "open"], ToolOrigin.ROW)


def test_wrong_shapes(tmp_path: Path) -> None:
    reading = read_rows(tmp_path, row(CALL), row(CALL, messages=[]), row(CALL, messages=None))
    assert (len(reading.kept), reading.dropped) == (1, ["no messages"])
    assert reading.quarantined == ["wrong schema: a row is not an object with messages"]
