"""Completions and arguments that broke other parsers and graders: each is read by our own format and judged, in both directions."""

from __future__ import annotations

import json
from typing import Any

import pytest

from pivotrl.actions.hermes import HermesFormat
from pivotrl.actions.qwen3_coder import Qwen3CoderFormat
from pivotrl.actions.registry import action_format
from pivotrl.config.verifiers import ToolCallVerifierConfig
from pivotrl.errors import UserError
from pivotrl.trajectories.adapters.shell_text import fenced_blocks
from pivotrl.trajectories.parsing import parse_json
from pivotrl.trajectories.tools import parse_tools
from pivotrl.types import Action, ParseOutcome, State, Tool, ToolCall, ToolOrigin, Verdict, VerdictKind
from pivotrl.verifiers.tool_call import ToolCallVerifier

PROPERTIES: dict[str, Any] = {
    "code": {"type": "string"},
    "zip": {"type": "string"},
    "when": {"type": "integer"},
    "amount": {"type": "number"},
    "flag": {"type": "boolean"},
    "note": {"type": "string"},
}
TOOLS = (Tool("f", "", {"type": "object", "properties": PROPERTIES}),)
STATE = State((), TOOLS, ToolOrigin.ROW)
HERMES, QWEN = HermesFormat(), Qwen3CoderFormat()


def verify(expert: Action, action: Action, state: State = STATE, **config: Any) -> Verdict:
    return ToolCallVerifier(ToolCallVerifierConfig(type="tool_call", message="exact", **config)).verify(state, expert, action)


def acts(*arguments: object, name: str = "f") -> Action:
    calls = tuple(ToolCall(name, one if isinstance(one, str) else json.dumps(one)) for one in arguments)
    return Action("", calls, None, ParseOutcome.PARSED)


def hermes(*payloads: str, between: str = "\n") -> str:
    return between.join(f"<tool_call>\n{payload}\n</tool_call>" for payload in payloads)


@pytest.mark.parametrize("code", ["if (x) { y(", "}}}", '"}}\n</tool_call>', "[[{", 'a "quoted" \\ brace }'])
def test_unbalanced_braces_inside_a_string_argument(code: str) -> None:
    text = hermes(json.dumps({"name": "f", "arguments": {"code": code}}))
    read = HERMES.parse(text)
    assert verify(acts({"code": code}), read).reward == 1
    assert verify(acts({"code": code + "}"}), read).reward == 0


def test_a_call_inside_thinking_is_no_call() -> None:
    call = hermes('{"name": "f", "arguments": {"zip": "1"}}')
    read = HERMES.parse(f"<think>\nI could write {call} here.\n</think>\n\nWhich one do you mean?")
    assert read.tool_calls == ()
    assert verify(acts({"zip": "1"}), read).reason == "spoke instead of calling"
    assert verify(Action("Which one do you mean?", (), None, ParseOutcome.ABSENT), read).reward == 1


def test_only_a_closing_think_tag() -> None:
    """Templates that open the tag in the prompt leave a completion with the closing one only."""
    read = HERMES.parse("Let me look.\n</think>\n\n" + hermes('{"name": "f", "arguments": {"zip": "1"}}'))
    assert verify(acts({"zip": "1"}), read).reward == 1
    assert read.reasoning == "Let me look."


def test_empty_text_and_an_empty_object_are_both_no_arguments() -> None:
    assert verify(acts(""), acts({})).reward == verify(acts({}), acts("")).reward == 1
    assert verify(acts({"zip": "1"}), acts("")).reason == "missing argument"
    assert verify(acts({}), acts({"zip": "1"})).reason == "unexpected argument"


def test_a_schema_typed_postal_code_keeps_its_zero() -> None:
    text = "<tool_call>\n<function=f>\n<parameter=zip>\n03106\n</parameter>\n</function>\n</tool_call>"
    read = QWEN.parse(text, TOOLS)
    assert read.tool_calls[0].arguments_object() == {"zip": "03106"}
    assert verify(acts({"zip": "03106"}), read).reward == 1
    assert verify(acts({"zip": 3106}), read).reward == verify(acts({"zip": "3106"}), read).reward == 0


def test_an_integer_field_that_holds_a_date() -> None:
    text = "<tool_call>\n<function=f>\n<parameter=when>\n2024-05-01\n</parameter>\n</function>\n</tool_call>"
    read = QWEN.parse(text, TOOLS)
    assert verify(acts({"when": "2024-05-01"}), read).reward == 1
    for other in (2024, "2024-05-02", 20240501, 2018):
        assert verify(acts({"when": other}), read).reward == 0


def test_two_calls_with_prose_between() -> None:
    payloads = ['{"name": "f", "arguments": {"zip": "1"}}', '{"name": "f", "arguments": {"zip": "2"}}']
    read = HERMES.parse(hermes(*payloads, between="\nand then the other one:\n"))
    assert verify(acts({"zip": "2"}, {"zip": "1"}), read).reward == 1
    assert verify(acts({"zip": "1"}), read).reason == "surplus call"


@pytest.mark.parametrize(
    "payload",
    [
        json.dumps(json.dumps({"name": "f", "arguments": {"zip": "1"}})),
        json.dumps({"name": "f", "arguments": json.dumps({"zip": "1"})}),
    ],
    ids=["the call", "its arguments"],
)
def test_doubled_json(payload: str) -> None:
    read = HERMES.parse(hermes(payload))
    assert verify(acts({"zip": "1"}), read).reward == 1
    assert verify(acts({"zip": "2"}), read).reward == 0


@pytest.mark.parametrize("arguments", ["null", "[1]", '"zip"', "5", "true", '{"zip": ', "{} {}", '{"zip": NaN}'])
def test_arguments_that_are_no_object_are_malformed_and_never_an_error(arguments: str) -> None:
    assert verify(acts({}), acts(arguments)).kind is VerdictKind.INVALID
    assert verify(acts(arguments), acts({})).reason == "expert call is malformed"
    read = HERMES.parse(hermes(f'{{"name": "f", "arguments": {arguments}}}'))
    assert verify(acts({}), read).kind is VerdictKind.INVALID


PADDING = dict.fromkeys(["enum", "const", "format", "items", "anyOf", "default", "pattern", "required", "properties", "uniqueItems"])


@pytest.mark.parametrize("is_cleaned", [True, False])
def test_null_padded_schemas(is_cleaned: bool) -> None:
    """Columnar data sets fill every keyword and every tool's parameters with null."""
    padded = {"type": "object", "properties": {"n": {**PADDING, "type": "integer"}, "other_tool_only": None}, "required": None, "$defs": None}
    tools = parse_tools([{"name": "f", "description": None, "parameters": padded}]) if is_cleaned else (Tool("f", "", padded),)
    state = State((), tools, ToolOrigin.ROW)
    assert verify(acts({"n": 1}), acts({"n": 1.0}), state).reward == 1
    assert verify(acts({"n": 1}), acts({"n": "1"}), state).reward == 1
    assert verify(acts({"n": 1}), acts({"n": 2}), state).reward == 0
    assert verify(acts({"n": 1}), acts({}), state).reward == 0
    assert verify(acts({}), acts({"n": None}), state).reward == 1


@pytest.mark.parametrize("opening", ["```bash", "```bash   ", "```bash\t", "``` bash"])
def test_a_fence_with_trailing_blanks(opening: str) -> None:
    (block,) = fenced_blocks(f"Look around.\n{opening}\nls -la\n```   \n")
    assert (block.language, block.body) == ("bash", "ls -la\n")


def test_line_separators_inside_json_are_text() -> None:
    """U+2028 ends a line for str.splitlines and for JavaScript, not for JSON."""
    text = hermes('{"name": "f", "arguments": {"code": "a\u2028b\u0085c"}}')
    assert verify(acts({"code": "a\u2028b\u0085c"}), HERMES.parse(text)).reward == 1
    assert verify(acts({"code": "a b c"}), HERMES.parse(text)).reward == 0
    assert parse_json('{"code": "a\u2028b"}'.encode()).value == {"code": "a\u2028b"}


@pytest.mark.parametrize("arguments", ['{"note": "\\ud800"}', '{"note": "\ud800"}', '{"\\udfff": 1}', '{"note": "see http://x.y/\\ud800"}'])
def test_lone_surrogates_get_a_verdict(arguments: str) -> None:
    """No tokenizer can encode them: such an action is the model's fault, whichever way it was written."""
    for expert in (acts({"note": "x"}), acts(arguments), Action("\ud800 x", (), None, ParseOutcome.ABSENT)):
        assert verify(expert, acts(arguments)).reward == 0
    assert verify(Action("a \ud800 b", (), None, ParseOutcome.ABSENT), Action("a \ud800 c", (), None, ParseOutcome.ABSENT)).reward == 0
    assert verify(acts({"note": "x"}), HERMES.parse(hermes(f'{{"name": "f", "arguments": {arguments}}}'))).kind is VerdictKind.INVALID


def test_harness_added_parameters_are_ignored_where_the_recipe_says_so() -> None:
    expert, action = acts({"zip": "1", "security_risk": "LOW"}), acts({"zip": "1"})
    assert verify(expert, action).reward == 0
    for place in ("f.security_risk", "*.security_risk"):
        assert verify(expert, action, ignored_arguments=[place]).reward == 1
        assert verify(action, expert, ignored_arguments=[place]).reward == 1
        assert verify(expert, acts({"zip": "2"}), ignored_arguments=[place]).reward == 0
    assert verify(expert, action, ignored_arguments=["g.security_risk"]).reward == 0


@pytest.mark.parametrize(
    ("expert", "action"),
    [({"amount": 1}, {"amount": 2}), ({"flag": True}, {"flag": False}), ({"amount": 0}, {"flag": False}), ({"amount": None}, {"amount": 0})],
)
def test_a_scalar_argument_is_compared(expert: object, action: object) -> None:
    assert verify(acts(expert), acts(action)).reward == 0
    assert verify(acts(action), acts(expert)).reward == 0


def test_an_unknown_tool_name_is_a_reason() -> None:
    assert verify(acts({}), acts({}, name="ff")).reason == "unknown tool"
    assert verify(acts({}, name="ff"), acts({}, name="ff")).reward == 1, "the expert's tool may be missing in the list"
    known = State((), (*TOOLS, Tool("g", "", {})), ToolOrigin.ROW)
    assert verify(acts({}), acts({}, name="g"), known).reason == "wrong tool"


def test_an_unknown_format_name_is_a_user_error() -> None:
    with pytest.raises(UserError, match="hermes"):
        action_format("some-model-7b")
