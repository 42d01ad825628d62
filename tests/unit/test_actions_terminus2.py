"""Terminus-2 replies and plain text: the JSON as written, and everything around it kept in place."""

from __future__ import annotations

import pytest

from pivotrl.actions.plain import PlainFormat
from pivotrl.actions.protocol import InexpressibleAction
from pivotrl.actions.terminus2 import PLACEHOLDER, TOOL_NAME, Terminus2Format
from pivotrl.types import Action, ParseOutcome, ToolCall

terminus = Terminus2Format()
REPLY = '{\n  "analysis": "A {brace",\n  "plan": "P",\n  "commands": [{"keystrokes": "ls }\\n", "duration": 0.1}],\n  "task_complete": false\n}'


@pytest.mark.parametrize(
    ("before", "after"),
    [("", ""), ("First I look.\n\n", ""), ("```json\n", "\n```"), ("```json\n", "\n```  \n"), ("", "\nThat is all."), ("Use {x} and {}: ", " {y}")],
)
def test_replies_are_one_call_and_come_back_as_they_were(before: str, after: str) -> None:
    text = before + REPLY + after
    action = terminus.parse(text)
    assert action.parse is ParseOutcome.PARSED
    assert action.tool_calls == (ToolCall(TOOL_NAME, REPLY),)
    assert action.content == (f"{before}{PLACEHOLDER}{after}" if after else before)
    assert terminus.render(action) == text


def test_only_the_first_of_two_objects_acts() -> None:
    action = terminus.parse(REPLY + REPLY)
    assert action.tool_calls == (ToolCall(TOOL_NAME, REPLY),)


def test_thinking_is_split_off() -> None:
    action = terminus.parse(f"<think>\n{REPLY}?\n</think>\n\n{REPLY}")
    assert (action.reasoning, action.content) == (f"{REPLY}?", "")


def test_no_commands_is_still_an_action() -> None:
    assert terminus.parse('{"analysis": "", "plan": "", "commands": []}').parse is ParseOutcome.PARSED


@pytest.mark.parametrize(
    "text",
    [
        REPLY[:-1],
        '{"commands": []}',
        '{"analysis": "", "plan": "", "commands": "ls"}',
        '{"analysis": "", "plan": "", "commands": ["ls"]}',
        '{"analysis": "", "plan": "", "commands": [{"keystrokes": "ls", "duration": true}]}',
        '{"analysis": "", "plan": "", "commands": [{"duration": 1}]}',
        '{"analysis": "raw\nnewline", "plan": "", "commands": []}',
    ],
)
def test_malformed(text: str) -> None:
    action = terminus.parse(text)
    assert (action.parse, action.content, action.tool_calls) == (ParseOutcome.MALFORMED, text, ())


@pytest.mark.parametrize("text", ["All done.", "Set {x} to {}.", "{", ""])
def test_prose_with_braces_is_a_message(text: str) -> None:
    assert terminus.parse(text) == Action(text, (), None, ParseOutcome.ABSENT)


def test_other_tools_are_refused() -> None:
    with pytest.raises(InexpressibleAction, match="not a Terminus-2 action"):
        terminus.render(Action("", (ToolCall("bash", "{}"),), None, ParseOutcome.PARSED))
    with pytest.raises(InexpressibleAction, match="several calls"):
        terminus.render(Action("", (ToolCall(TOOL_NAME, REPLY),) * 2, None, ParseOutcome.PARSED))


def test_plain_text_never_acts_and_is_never_malformed() -> None:
    plain = PlainFormat()
    for text in ("<tool_call>", REPLY, "<think>open", ""):
        assert plain.parse(text) == Action(text, (), None, ParseOutcome.ABSENT)
    assert plain.parse("<think>\na\n</think>\n\nb") == Action("b", (), "a", ParseOutcome.ABSENT)
    with pytest.raises(InexpressibleAction):
        plain.render(Action("", (ToolCall("f", "{}"),), None, ParseOutcome.PARSED))
