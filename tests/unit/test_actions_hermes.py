"""Hermes calls: what is read, what is refused, and that arguments stay as they were written."""

from __future__ import annotations

import pytest

from pivotrl.actions.hermes import HermesFormat
from pivotrl.actions.protocol import InexpressibleAction
from pivotrl.types import Action, ParseOutcome, ToolCall

hermes = HermesFormat()


def _call(body: str) -> str:
    return f"<tool_call>\n{body}\n</tool_call>"


def _acts(content: str, *calls: ToolCall, reasoning: str | None = None) -> Action:
    return Action(content, calls, reasoning, ParseOutcome.PARSED)


def test_writes_text_thinking_and_several_calls_as_the_models_do() -> None:
    action = _acts("I will look.", ToolCall("f", '{"a": 1}'), ToolCall("g", "{}"), reasoning="Two things.")
    written = (
        "<think>\nTwo things.\n</think>\n\nI will look.\n"
        '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>\n<tool_call>\n{"name": "g", "arguments": {}}\n</tool_call>'
    )
    assert hermes.render(action) == written
    assert hermes.parse(written) == action


@pytest.mark.parametrize(
    "arguments",
    [
        '{"a": "} { \\" }"}',
        '{"a": "</tool_call>"}',
        '{"a": "<tool_call>"}',
        '{"a":1,\n "b": [1.0, 1e3]}',
        '{"a": "\u2028\\u00e9"}',
        '{"a": "</think>"}',
    ],
)
def test_arguments_survive_as_written(arguments: str) -> None:
    action = _acts("", ToolCall("f", arguments))
    assert hermes.parse(hermes.render(action)) == action


@pytest.mark.parametrize(
    ("text", "calls"),
    [
        (_call('{"name": "f", "arguments": {"a": 1}'), 0),
        (_call('{"name": "f", "arguments": null}'), 0),
        (_call('{"name": "f", "arguments": [1]}'), 0),
        (_call('{"name": "f", "arguments": "word"}'), 0),
        (_call('{"name": "f", "arguments": {"a": NaN}}'), 0),
        (_call('{"name": "f", "arguments": {"a": "\\ud800"}}'), 0),
        (_call('{"name": "f"}'), 0),
        (_call('{"arguments": {}}'), 0),
        (_call('{"name": "", "arguments": {}}'), 0),
        (_call('{"name": 1, "arguments": {}}'), 0),
        (_call('{{"name": "f", "arguments": {}}}'), 0),
        (_call('{"name": "f", "arguments": {}}\n{"name": "g", "arguments": {}}'), 1),
        ('<tool_call>\n{"name": "f", "arguments": {}}', 1),
        (_call('{"name": "f", "arguments": {}}') + "\n<tool_call>\n", 1),
        (_call("oops") + _call('{"name": "g", "arguments": {}}'), 1),
        ("<think>\nnever closed " + _call('{"name": "f", "arguments": {}}'), 0),
    ],
)
def test_malformed_keeps_the_text_and_the_calls_that_can_be_read(text: str, calls: int) -> None:
    action = hermes.parse(text)
    assert action.parse is ParseOutcome.MALFORMED
    assert action.content == text
    assert len(action.tool_calls) == calls


def test_a_call_encoded_twice_is_unwrapped() -> None:
    """Search trajectories hold calls that are JSON strings, whose arguments are JSON strings."""
    text = _call('"{\\"name\\": \\"search\\", \\"arguments\\": \\"{\\\\\\"query\\\\\\": [\\\\\\"x\\\\\\"]}\\"}"')
    assert hermes.parse(text).tool_calls == (ToolCall("search", '{"query": ["x"]}'),)


def test_prose_between_calls_is_content() -> None:
    first, second = _call('{"name": "f", "arguments": {}}'), _call('{"name": "g", "arguments": {}}')
    action = hermes.parse(f"One.\n{first}\n\nTwo.\n{second}\n")
    assert action == _acts("One.\nTwo.", ToolCall("f", "{}"), ToolCall("g", "{}"))


def test_calls_inside_thinking_are_not_actions() -> None:
    inner, real = _call('{"name": "wrong", "arguments": {}}'), _call('{"name": "right", "arguments": {}}')
    assert hermes.parse(f"<think>\nmaybe {inner}\n</think>\n\n{real}").tool_calls == (ToolCall("right", "{}"),)
    assert hermes.parse(f"maybe {inner}</think>\n\n{real}").tool_calls == (ToolCall("right", "{}"),)
    assert hermes.parse(f"maybe <tool_call> tags</think>\n\n{real}").tool_calls == (ToolCall("right", "{}"),)
    later = hermes.parse(f"<think>\na\n</think>\n\nSo <think>{inner}</think>\n{real}")
    assert later.tool_calls == (ToolCall("right", "{}"),)
    assert hermes.parse(f"<think>\nmaybe {inner}\n</think>\n\nNo.") == Action("No.", (), f"\nmaybe {inner}\n"[1:-1], ParseOutcome.ABSENT)


def test_a_lone_closing_tag_ends_thinking() -> None:
    assert hermes.parse("I think.\n</think>\n\nYes.") == Action("Yes.", (), "I think.", ParseOutcome.ABSENT)


def test_an_empty_thinking_block_is_no_thinking() -> None:
    assert hermes.parse("<think>\n\n</think>\n\nYes.") == Action("Yes.", (), None, ParseOutcome.ABSENT)


@pytest.mark.parametrize("content", ["Use <tool_call> tags.", "<think>", "a </think> b"])
def test_a_message_that_would_be_read_as_something_else_is_refused(content: str) -> None:
    with pytest.raises(InexpressibleAction, match="reads back as another action"):
        hermes.render(Action(content, (), None, ParseOutcome.ABSENT))


def test_broken_arguments_stay_in_the_history_and_are_never_empty() -> None:
    broken = Action("", (ToolCall("f", '{"q": '),), None, ParseOutcome.MALFORMED)
    assert hermes.transcribe(broken) == '<tool_call>\n{"name": "f", "arguments": {"q": }\n</tool_call>'


def test_nesting_beyond_any_parser_is_malformed() -> None:
    assert hermes.parse(_call('{"name": "f", "arguments": {"a": ' + "[" * 200_000)).parse is ParseOutcome.MALFORMED
