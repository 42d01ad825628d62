"""The tool-call verifier's table of equal and unequal, and the reasons it counts."""

from __future__ import annotations

import json
from typing import Any

import pytest
from fakes.processor_time import processor_seconds

from pivotrl.config.schema import ToolCallVerifierConfig
from pivotrl.types import Action, ParseOutcome, State, Tool, ToolCall, ToolOrigin, Verdict, VerdictKind
from pivotrl.verifiers.tool_call import ToolCallVerifier

PROPERTIES: dict[str, Any] = {
    "integer": {"type": "integer"},
    "number": {"type": ["number", "null"]},
    "text": {"type": "string"},
    "flag": {"type": "boolean"},
    "either": {"anyOf": [{"type": "string"}, {"type": "integer"}]},
    "maybe": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
    "cabin": {"type": "string", "enum": ["economy", "Economy"]},
    "user_id": {"type": "string"},
    "day": {"type": "string", "format": "date"},
    "tags": {"type": "array", "items": {"type": "string"}, "uniqueItems": True},
    "steps": {"type": "array", "items": {"type": "integer"}},
    "nested": {"$ref": "#/$defs/inner"},
    "limit": {"type": "integer", "default": 10},
    "nullable": {"type": ["integer", "null"], "default": 3},
}
SCHEMA = {
    "type": "object",
    "properties": PROPERTIES,
    "required": ["user_id"],
    "$defs": {"inner": {"type": "object", "properties": {"x": {"type": "integer"}, "again": {"$ref": "#/$defs/inner"}}}},
}
TOOL = Tool("f", "", SCHEMA)


def _state(origin: ToolOrigin = ToolOrigin.ROW) -> State:
    return State((), (TOOL,), origin)


def _acts(*arguments: object, name: str = "f") -> Action:
    return Action("", tuple(ToolCall(name, json.dumps(one)) for one in arguments), None, ParseOutcome.PARSED)


def _says(text: str) -> Action:
    return Action(text, (), None, ParseOutcome.ABSENT)


def _verify(expert: Action, action: Action, *, origin: ToolOrigin = ToolOrigin.ROW, **config: Any) -> Verdict:
    verifier = ToolCallVerifier(ToolCallVerifierConfig.model_validate({"type": "tool_call", "message": "similarity", **config}))
    return verifier.verify(_state(origin), expert, action)


@pytest.mark.parametrize(
    ("expert", "action"),
    [
        ({"integer": 1}, {"integer": 1.0}),
        ({"integer": 1}, {"integer": "1"}),
        ({"number": 0.5}, {"number": " 0.50 "}),
        ({"maybe": 7}, {"maybe": "7"}),
        ({"text": "5"}, {"text": 5}),
        ({"flag": True}, {"flag": "True"}),
        ({"text": "Paris"}, {"text": "paris"}),
        ({"text": "SFO"}, {"text": " sfo "}),
        ({"text": "New  York city"}, {"text": "new york City"}),
        ({"text": "caf\u00e9"}, {"text": "cafe\u0301"}),
        ({"text": "Please cancel my order because it arrived late"}, {"text": "please cancel the order because it arrived late"}),
        ({"text": "the very same words in here"}, {"text": "the very same words in here"}),
        ({"cabin": "economy"}, {"cabin": " economy "}),
        ({"user_id": "u_1"}, {"user_id": "u_1\n"}),
        ({"tags": ["a", "b"]}, {"tags": ["b", "a", "b"]}),
        ({"nested": {"x": 1}}, {"nested": {"x": "1", "again": None}}),
        ({"user_id": "a"}, {"user_id": "a", "limit": 10}),
        ({"user_id": "a"}, {"user_id": "a", "text": None}),
        ({"user_id": "a"}, {"user_id": "a", "nullable": 3}),
        ({}, {"text": None}),
    ],
)
def test_equal_in_meaning(expert: object, action: object) -> None:
    for first, second in ((expert, action), (action, expert)):
        assert _verify(_acts(first), _acts(second)).reward == 1


@pytest.mark.parametrize(
    ("expert", "action", "reason"),
    [
        ({"integer": 1}, {"integer": True}, "wrong argument value"),
        ({"flag": True}, {"flag": 1}, "wrong argument value"),
        ({"either": "1"}, {"either": 1}, "wrong argument value"),
        ({"integer": 10}, {"integer": 9}, "wrong argument value"),
        ({"text": "W123"}, {"text": "w123"}, "wrong argument value"),
        ({"text": "src/Main.py"}, {"text": "src/main.py"}, "wrong argument value"),
        ({"text": "userName"}, {"text": "username"}, "wrong argument value"),
        ({"text": "rm -rf /tmp x"}, {"text": "ls -la /tmp x"}, "wrong argument value"),
        ({"text": "grep -R foo in all files"}, {"text": "grep -r foo in all files"}, "wrong argument value"),
        ({"text": "transfer 100 dollars to my friend Bob"}, {"text": "transfer 900 dollars to my friend Bob"}, "wrong argument value"),
        ({"text": "please do cancel my order today"}, {"text": "please do not cancel my order today"}, "wrong argument value"),
        ({"text": "cancel"}, {"text": "please cancel my order because it arrived late"}, "wrong argument value"),
        ({"text": "order four"}, {"text": "order five"}, "wrong argument value"),
        ({"cabin": "economy"}, {"cabin": "Economy"}, "wrong argument value"),
        ({"user_id": "anna"}, {"user_id": "Anna"}, "wrong argument value"),
        ({"day": "Monday"}, {"day": "monday"}, "wrong argument value"),
        ({"tags": ["a"]}, {"tags": ["a", "b"]}, "wrong argument value"),
        ({"steps": [1, 2]}, {"steps": [2, 1]}, "wrong argument value"),
        ({"steps": [1]}, {"steps": "1"}, "wrong argument value"),
        ({"nested": {"x": 1}}, {"nested": {"x": 2}}, "wrong argument value"),
        ({"user_id": "a"}, {"user_id": "a", "limit": 11}, "wrong argument value"),
        ({"user_id": "a"}, {"user_id": "a", "nullable": None}, "wrong argument value"),
        ({"user_id": "a"}, {"user_id": None}, "wrong argument value"),
        ({"user_id": "a"}, {}, "missing argument"),
        ({"user_id": "a"}, {"user_id": "a", "invented": 1}, "unexpected argument"),
        ({}, {"invented": None}, "unexpected argument"),
    ],
)
def test_different_in_meaning(expert: object, action: object, reason: str) -> None:
    verdict = _verify(_acts(expert), _acts(action))
    assert (verdict.kind, verdict.reward, verdict.reason) == (VerdictKind.OK, 0.0, reason)
    assert _verify(_acts(action), _acts(expert)).reward == 0


@pytest.mark.parametrize(
    ("expert", "action"),
    [({"user_id": "a"}, {"user_id": "a", "limit": 10}), ({"user_id": "a"}, {"user_id": "a", "text": None}), ({"integer": 1}, {"integer": "1"})],
)
@pytest.mark.parametrize("origin", [ToolOrigin.INFERRED, ToolOrigin.NONE])
def test_an_inferred_schema_has_no_authority(expert: object, action: object, origin: ToolOrigin) -> None:
    assert _verify(_acts(expert), _acts(action), origin=origin).reward == 0
    assert _verify(_acts(expert), _acts(action), origin=ToolOrigin.FILE).reward == 1


def test_blank_arguments_are_no_arguments_and_nothing_else() -> None:
    blank = Action("", (ToolCall("f", ""),), None, ParseOutcome.PARSED)
    assert _verify(blank, _acts({})).reward == 1
    assert _verify(_acts({"integer": 1}), blank).reason == "missing argument"


def test_calls_are_matched_in_any_order_unless_the_recipe_asks_for_it() -> None:
    forward, backward = _acts({"integer": 1}, {"integer": 2}), _acts({"integer": 2}, {"integer": 1})
    assert _verify(forward, backward).reward == 1
    assert _verify(forward, backward, ordered_calls=True).reason == "calls in another order"
    assert _verify(forward, forward, ordered_calls=True).reward == 1


def test_matching_is_maximum_not_greedy() -> None:
    """The first action fits both expert calls, the second only the first: pairing in order fails, a matching exists."""
    words = "alpha bravo charlie delta echo foxtrot golf hotel india juliet kilo lima"
    near, far = words.replace("lima", "limb"), words.replace("lima", "limb").replace("alpha", "alpho")
    expert = _acts({"text": near}, {"text": words})
    action = _acts({"text": near}, {"text": far})
    assert _verify(_acts({"text": words}), _acts({"text": near}), text_similarity=0.98).reward == 1
    assert _verify(_acts({"text": words}), _acts({"text": far}), text_similarity=0.98).reward == 0
    assert _verify(expert, action, text_similarity=0.98).reward == 1


@pytest.mark.parametrize(
    ("action", "reason"),
    [
        (_acts({"integer": 1}, {"integer": 2}, {"integer": 3}), "surplus call"),
        (_acts({"integer": 1}), "missing call"),
        (Action("", (*_acts({"integer": 1}).tool_calls, ToolCall("g", "{}")), None, ParseOutcome.PARSED), "wrong tool"),
        (_acts({"integer": 1}, {"integer": 1}), "wrong argument value"),
        (_says("Let me see."), "spoke instead of calling"),
    ],
)
def test_reasons_for_several_calls(action: Action, reason: str) -> None:
    assert _verify(_acts({"integer": 1}, {"integer": 2}), action).reason == reason


@pytest.mark.parametrize(
    ("action", "reward"),
    [
        (_acts({"integer": 1}, {"integer": 2}), 1.0),
        (_acts({"integer": 3}, {"integer": 2}, {"integer": 1}), 0.75),
        (_acts({"integer": 1}, {"integer": 2}, {"integer": 2}, {"integer": 1}), 0.5),
        (_acts(*({"integer": number} for number in range(1, 7))), 0.0),
        (_acts({"integer": 1}, {"integer": 3}, {"integer": 4}), 0.0),
        (_acts({"integer": 1}), 0.0),
        (Action("", (*_acts({"integer": 1}, {"integer": 2}).tool_calls, ToolCall("g", "{}")), None, ParseOutcome.PARSED), 0.75),
        (Action("", (*_acts({"integer": 1}, {"integer": 2}).tool_calls, ToolCall("deleteAll", "{}")), None, ParseOutcome.PARSED), 0.0),
        (Action("", (*_acts({"integer": 1}, {"integer": 2}).tool_calls, ToolCall("settle_up", "{}")), None, ParseOutcome.PARSED), 0.0),
    ],
)
def test_surplus_calls_cost_what_the_recipe_says_unless_they_destroy(action: Action, reward: float) -> None:
    expert = _acts({"integer": 1}, {"integer": 2})
    assert _verify(expert, action, surplus_call_cost=0.25, destructive_words=["settle"]).reward == reward
    assert _verify(expert, action).reward == (1 if len(action.tool_calls) == 2 else 0)


def test_a_surplus_call_that_cannot_be_read_is_malformed() -> None:
    action = Action("", (*_acts({"integer": 1}).tool_calls, ToolCall("f", "{")), None, ParseOutcome.PARSED)
    assert _verify(_acts({"integer": 1}), action, surplus_call_cost=0.25).kind is VerdictKind.INVALID


def test_many_parallel_calls_with_long_texts_stay_within_the_time_bound() -> None:
    text = "find the blue garden chair with a loose left arm that the customer bought in a shop and sent back by post number"
    forward = [{"text": f"{text} {'abcdefgh'[number % 8] * (1 + number // 8)}"} for number in range(64)]
    elapsed_s, verdict = processor_seconds(lambda: _verify(_acts(*forward), _acts(*forward[::-1])))
    assert verdict.reward == 1
    assert elapsed_s < 3


def test_text_beside_a_call_does_not_matter() -> None:
    talkative = Action("Let me look that up.", _acts({"integer": 1}).tool_calls, "thinking", ParseOutcome.PARSED)
    assert _verify(_acts({"integer": 1}), talkative).reward == 1


@pytest.mark.parametrize(
    ("message", "text", "reward"),
    [
        ("similarity", "Your order W12 has been cancelled.", 1),
        ("similarity", "your order W12 has now been cancelled!", 1),
        ("similarity", "Your order W13 has been cancelled.", 0),
        ("similarity", "Your order W12 has not been cancelled.", 0),
        ("similarity", "Your", 0),
        ("similarity", "Have a nice day.", 0),
        ("exact", " Your order W12 has been cancelled.\n", 1),
        ("exact", "your order W12 has been cancelled.", 0),
        ("any", "Have a nice day.", 1),
    ],
)
def test_messages(message: str, text: str, reward: float) -> None:
    assert _verify(_says("Your order W12 has been cancelled."), _says(text), message=message).reward == reward


def test_a_subset_of_the_words_is_not_similar() -> None:
    """rapidfuzz's token_set_ratio is 100 here; ours must not be."""
    expert = _says("The refund goes to the card you paid with and takes five days.")
    assert _verify(expert, _says("the")).reward == 0


def test_nesting_beyond_the_bound_is_invalid_not_an_error() -> None:
    deep = Action("", (ToolCall("f", '{"nested": ' + "[" * 100 + "]" * 100 + "}"),), None, ParseOutcome.PARSED)
    assert _verify(_acts({"nested": {}}), deep).kind is VerdictKind.INVALID


def test_an_expert_that_cannot_be_read_accepts_nothing() -> None:
    broken = Action("", (ToolCall("f", '{"a": '),), None, ParseOutcome.PARSED)
    assert _verify(broken, _acts({})).reason == "expert call is malformed"
    assert _verify(_acts({}), broken).kind is VerdictKind.INVALID
