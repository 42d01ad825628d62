"""One suite for every action format: reading never raises, writing reads back, history is never lost."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pivotrl.actions.protocol import ActionFormat, InexpressibleAction, same_action
from pivotrl.actions.registry import ACTION_FORMAT_NAMES, action_format
from pivotrl.actions.terminus2 import TOOL_NAME
from pivotrl.errors import UserError
from pivotrl.types import Action, ParseOutcome, ToolCall

# Pieces of every format's syntax, so that fuzzing meets half-open tags, nested JSON and stray markers, not only noise.
_PIECES = [
    "<tool_call>", "</tool_call>", "<think>", "</think>", "<function=f>", "</function>", "<parameter=a>", "</parameter>", "\n", " ", "{", "}",
    '{"name": "f", "arguments": ', '{"a": "}"}', "[", "]", '"', "\\", '"name"', ":", ",", "null", "1e999", "NaN", "\u2028", "\ud800", "\\ud800",
    "\x00",
    '{"analysis": "x", "plan": "y", "commands": []}', "```json\n", "\n```  ", "\ufffc", "word",
]  # fmt: skip
_TEXTS = st.lists(st.sampled_from(_PIECES) | st.text(max_size=5), max_size=25).map("".join)
_JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
_ARGUMENTS = st.dictionaries(st.text(max_size=6), _JSON, max_size=4)
_CALLS = st.builds(
    lambda name, arguments, indent: ToolCall(name, json.dumps(arguments, indent=indent)),
    st.text("abc_", min_size=1, max_size=6) | st.just(TOOL_NAME),
    _ARGUMENTS,
    st.none() | st.just(1),
)
_REASONING = st.none() | st.text(min_size=1, max_size=12)
_MESSAGES = st.builds(lambda content, reasoning: Action(content, (), reasoning, ParseOutcome.ABSENT), _TEXTS, _REASONING)
_ACTS = st.builds(
    lambda content, calls, reasoning: Action(content, tuple(calls), reasoning, ParseOutcome.PARSED),
    _TEXTS,
    st.lists(_CALLS, min_size=1, max_size=3),
    _REASONING,
)


@pytest.fixture(params=ACTION_FORMAT_NAMES)
def chosen(request: pytest.FixtureRequest) -> ActionFormat:
    return action_format(request.param)


@pytest.mark.parametrize("name", ACTION_FORMAT_NAMES)
@settings(max_examples=150)
@given(text=_TEXTS)
def test_parse_never_raises_and_keeps_its_promises(name: str, text: str) -> None:
    """Parsed has calls, absent has none, malformed keeps the whole text; every call of a parsed action has a JSON object."""
    action = action_format(name).parse(text)
    if action.parse is ParseOutcome.MALFORMED:
        assert (action.content, action.reasoning) == (text, None)
    else:
        assert bool(action.tool_calls) == (action.parse is ParseOutcome.PARSED)
        assert all(call.arguments_object() is not None and call.name for call in action.tool_calls)


@pytest.mark.parametrize("name", ACTION_FORMAT_NAMES)
@settings(max_examples=150)
@given(action=_MESSAGES | _ACTS)
def test_what_renders_reads_back_equal(name: str, action: Action) -> None:
    chosen = action_format(name)
    try:
        text = chosen.render(action)
    except InexpressibleAction:
        return
    assert same_action(chosen.parse(text), action)
    assert chosen.transcribe(action) == text


@pytest.mark.parametrize("name", ACTION_FORMAT_NAMES)
@settings(max_examples=150)
@given(text=_TEXTS)
def test_a_malformed_completion_stays_in_the_history_as_it_was(name: str, text: str) -> None:
    chosen = action_format(name)
    action = chosen.parse(text)
    if action.parse is ParseOutcome.MALFORMED:
        assert chosen.transcribe(action) == text


def test_plain_words_are_a_message_in_every_format(chosen: ActionFormat) -> None:
    action = Action("Your order was cancelled.\n\nAnything else?", (), "The user is done.", ParseOutcome.ABSENT)
    assert chosen.parse(chosen.render(action)) == action


def test_a_malformed_action_is_never_rendered_as_a_target(chosen: ActionFormat) -> None:
    broken = Action("", (ToolCall("f", '{"q": '),), None, ParseOutcome.MALFORMED)
    with pytest.raises(InexpressibleAction, match="malformed action"):
        chosen.render(broken)


def test_calls_and_outcome_must_agree(chosen: ActionFormat) -> None:
    with pytest.raises(InexpressibleAction):
        chosen.render(Action("hi", (), None, ParseOutcome.PARSED))


@pytest.mark.parametrize(
    "piece",
    ['<tool_call>{"name": "f", "arguments": {}}</tool_call>', "<tool_call>", '<tool_call>{"', "<think></think>", "<think>", "{", '{"a":', "[[",
     "</think>",
     "<function=f><parameter=a>x</parameter>", "<tool_call><function=f><parameter=a>x</parameter></function></tool_call>", '{"a":"\\'],
)  # fmt: skip
def test_a_megabyte_of_any_piece_is_read(chosen: ActionFormat, piece: str) -> None:
    """Quadratic reading would run into the suite's timeout here (minutes), linear reading takes a second at most."""
    text = piece * (1_000_000 // len(piece)) + "<tool_call>"
    assert chosen.parse(text).parse in ParseOutcome


def test_an_unknown_format_is_a_user_error() -> None:
    with pytest.raises(UserError, match=r"render.action_format is 'xml'"):
        action_format("xml")
