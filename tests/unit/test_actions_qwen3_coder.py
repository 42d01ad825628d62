"""Qwen3-Coder calls: how text gets a type, and which strings survive."""

from __future__ import annotations

import json

import pytest

from pivotrl.actions.protocol import InexpressibleAction, same_action
from pivotrl.actions.qwen3_coder import Qwen3CoderFormat
from pivotrl.types import Action, ParseOutcome, Tool, ToolCall

qwen = Qwen3CoderFormat()
TOOLS = (Tool("f", "", {"type": "object", "properties": {"path": {"type": "string"}, "size": {"type": "integer"}}}),)


def _acts(arguments: object, content: str = "") -> Action:
    return Action(content, (ToolCall("f", json.dumps(arguments)),), None, ParseOutcome.PARSED)


def test_writes_the_models_own_layout() -> None:
    written = (
        "Looking.\n\n<tool_call>\n<function=f>\n<parameter=path>\n/a b\n</parameter>\n<parameter=size>\n5\n</parameter>\n</function>\n</tool_call>"
    )
    action = _acts({"path": "/a b", "size": 5}, "Looking.")
    assert qwen.render(action) == written
    assert qwen.parse(written) == action


@pytest.mark.parametrize(
    "value", ["5", "true", "null", "[1]", '{"a": 1}', '"quoted"', "", "\n", "\n\nx\n", "</parameter>", "a</parameter> b", "<parameter=x>", "\u2028"]
)
def test_strings_that_look_like_something_else_survive(value: str) -> None:
    for tools in ((), TOOLS):
        action = _acts({"path": value, "size": 1})
        assert same_action(qwen.parse(qwen.render(action, tools), tools), action)


@pytest.mark.parametrize("value", [5, 1.5, True, None, [1, "a"], {"a": {"b": "c"}}])
def test_values_keep_their_type(value: object) -> None:
    action = _acts({"x": value})
    assert same_action(qwen.parse(qwen.render(action)), action)


def test_a_string_parameter_is_raw_under_its_schema_and_quoted_json_without() -> None:
    """With the tool's schema the text is what a server would read; without it only quotes can tell the string 5 from the number."""
    action = _acts({"path": "5"})
    assert "<parameter=path>\n5\n</parameter>" in qwen.render(action, TOOLS)
    assert '<parameter=path>\n"5"\n</parameter>' in qwen.render(action)
    assert qwen.parse("<function=f><parameter=path>5</parameter></function>", TOOLS).tool_calls[0].arguments == '{"path": "5"}'
    assert qwen.parse("<function=f><parameter=path>5</parameter></function>").tool_calls[0].arguments == '{"path": 5}'


def test_a_number_under_a_string_schema_is_refused() -> None:
    with pytest.raises(InexpressibleAction):
        qwen.render(_acts({"path": 5}), TOOLS)


def test_bare_functions_are_read() -> None:
    text = "First.\n\n<function=bash>\n<parameter=command>ls -la | head</parameter>\n<parameter=body>\nx\ny\n</parameter>\n</function>"
    action = qwen.parse(text)
    assert action.content == "First."
    assert action.tool_calls == (ToolCall("bash", '{"command": "ls -la | head", "body": "x\\ny"}'),)


@pytest.mark.parametrize(("newlines", "kept"), [("", ""), ("\n", ""), ("\n\n", ""), ("\n\n\n", "\n")])
def test_newlines_between_content_and_call_are_the_formats(newlines: str, kept: str) -> None:
    assert qwen.parse(f"First.{newlines}<function=f>\n</function>").content == f"First.{kept}"


def test_no_parameters_are_no_arguments() -> None:
    assert qwen.parse("<tool_call>\n<function=f>\n</function>\n</tool_call>").tool_calls == (ToolCall("f", "{}"),)


@pytest.mark.parametrize(
    "text",
    [
        "<tool_call>",
        '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>',
        "<function=f>",
        "<function=f>\n<parameter=a>\nx",
        "<function=f>\n<parameter=a>\nx\n</parameter>",
        "<function=f>\n<parameter=a>\nx\n</parameter>\nstray\n</function>",
        "<function=f>\n<parameter=a>1</parameter>\n<parameter=a>2</parameter>\n</function>",
        "<tool_call>\n<function=f>\n</function>",
        "<function=>\n</function>",
    ],
)
def test_malformed(text: str) -> None:
    action = qwen.parse(text)
    assert (action.parse, action.content) == (ParseOutcome.MALFORMED, text)
