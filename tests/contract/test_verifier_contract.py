"""One suite for every verifier: accepts the expert, judges without raising, does not mind how JSON is spelled, treats both sides alike."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pivotrl.config.verifiers import SearchVerifierConfig, SweVerifierConfig, TerminalVerifierConfig, ToolCallVerifierConfig
from pivotrl.types import Action, ParseOutcome, State, Tool, ToolCall, ToolOrigin, VerdictKind
from pivotrl.verifiers.exact import ExactVerifier
from pivotrl.verifiers.protocol import Verifier
from pivotrl.verifiers.search import SearchVerifier
from pivotrl.verifiers.swe import SweVerifier
from pivotrl.verifiers.terminal import TerminalVerifier
from pivotrl.verifiers.tool_call import ToolCallVerifier

SCHEMA = {
    "type": "object",
    "properties": {
        "a": {"type": "integer"},
        "b": {"type": "string"},
        "c": {"type": "array", "uniqueItems": True, "items": {"type": ["string", "null"]}},
        "d": {"type": "boolean", "default": False},
        "e": {"type": "object", "properties": {"f": {"type": "number", "default": 1.5}}},
        "g": {"type": "string", "enum": ["x", "Y"]},
    },
    "required": ["a"],
}
STATES = [State((), (Tool("f", "", SCHEMA),), origin) for origin in (ToolOrigin.ROW, ToolOrigin.INFERRED)] + [State((), (), ToolOrigin.NONE)]

BUILDERS: dict[str, Callable[[], Verifier]] = {
    "exact": ExactVerifier,
    "tool_call": lambda: ToolCallVerifier(ToolCallVerifierConfig(type="tool_call", message="similarity")),
    "tool_call_exact_message": lambda: ToolCallVerifier(ToolCallVerifierConfig(type="tool_call", message="exact", ordered_calls=True)),
    "search": lambda: SearchVerifier(SearchVerifierConfig(type="search")),
    "swe_arguments": lambda: SweVerifier(SweVerifierConfig(type="swe", granularity="arguments")),
    "terminal": lambda: TerminalVerifier(TerminalVerifierConfig(type="terminal")),
}
# Those whose verdict must not change with the spelling of JSON.
FUNCTIONAL = [name for name in BUILDERS if name.startswith(("tool_call", "search", "swe", "terminal"))]

_TEXT = st.text(max_size=10) | st.sampled_from(
    ["Y", "x", "1", "1.0", "true", "a long text of six words", "a long text of 7 words here", "ls -la /tmp"]
)
_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 3) | st.sampled_from([0.0, 1.0, 1.5, 1e300]) | _TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from("abcdefg"), inner, max_size=3),
    max_leaves=6,
)
_ARGUMENTS = st.dictionaries(st.sampled_from("abcdefg"), _VALUES, max_size=5)
_CALL = st.builds(lambda name, arguments: ToolCall(name, json.dumps(arguments)), st.sampled_from("fg"), _ARGUMENTS)
_ACTS = st.lists(_CALL, min_size=1, max_size=3).map(lambda calls: Action("", tuple(calls), None, ParseOutcome.PARSED))
_SPEAKS = _TEXT.filter(str.strip).map(lambda text: Action(text, (), None, ParseOutcome.ABSENT))
_ACTIONS = _ACTS | _SPEAKS


@pytest.fixture(params=BUILDERS)
def verifier(request: pytest.FixtureRequest) -> Verifier:
    return BUILDERS[request.param]()


@pytest.mark.parametrize("name", BUILDERS)
@settings(max_examples=150)
@given(action=_ACTIONS, state=st.sampled_from(STATES))
def test_accepts_the_expert(name: str, action: Action, state: State) -> None:
    verdict = BUILDERS[name]().verify(state, action, action)
    assert (verdict.kind, verdict.reward) == (VerdictKind.OK, 1.0), verdict


@pytest.mark.parametrize("name", BUILDERS)
@settings(max_examples=200)
@given(first=_ACTIONS, second=_ACTIONS, state=st.sampled_from(STATES))
def test_treats_both_sides_alike(name: str, first: Action, second: Action, state: State) -> None:
    verifier = BUILDERS[name]()
    assert verifier.verify(state, first, second).reward == verifier.verify(state, second, first).reward


@pytest.mark.parametrize("name", FUNCTIONAL)
@settings(max_examples=150)
@given(arguments=_ARGUMENTS, other=_ARGUMENTS, state=st.sampled_from(STATES), data=st.data())
def test_does_not_mind_how_json_is_spelled(
    name: str, arguments: dict[str, object], other: dict[str, object], state: State, data: st.DataObject
) -> None:
    """Key order, spaces and escapes change no verdict, be it 1 or 0."""
    shuffled = dict(data.draw(st.permutations(list(arguments.items()))))
    plain, respelled = json.dumps(arguments), json.dumps(shuffled, indent=2, ensure_ascii=False)
    expert, verifier = _acts(json.dumps(other)), BUILDERS[name]()
    assert verifier.verify(state, _acts(plain), _acts(respelled)).reward == 1
    assert verifier.verify(state, expert, _acts(plain)).reward == verifier.verify(state, expert, _acts(respelled)).reward


def _acts(arguments: str, name: str = "f") -> Action:
    return Action("", (ToolCall(name, arguments),), None, ParseOutcome.PARSED)


def _says(text: str) -> Action:
    return Action(text, (), None, ParseOutcome.ABSENT)


MUTATIONS = {
    "another value": _acts('{"a": 2, "b": "Rome"}'),
    "another text": _acts('{"a": 1, "b": "Oslo"}'),
    "another tool": _acts('{"a": 1, "b": "Rome"}', "g"),
    "a missing argument": _acts('{"a": 1}'),
    "an invented argument": _acts('{"a": 1, "b": "Rome", "z": 1}'),
    "no arguments": _acts("{}"),
    "a surplus call": Action("", (*_acts('{"a": 1, "b": "Rome"}').tool_calls, ToolCall("f", '{"a": 5}')), None, ParseOutcome.PARSED),
    "the same call twice": Action("", _acts('{"a": 1, "b": "Rome"}').tool_calls * 2, None, ParseOutcome.PARSED),
    "words": _says("I would look for Rome."),
    "nothing": _says(" \n"),
    "malformed": Action("<tool_call>", (), None, ParseOutcome.MALFORMED),
}


@pytest.mark.parametrize("mutation", MUTATIONS)
def test_rejects_a_mutated_expert_with_a_reason(verifier: Verifier, mutation: str) -> None:
    expert = _acts('{"a": 1, "b": "Rome"}')
    verdict = verifier.verify(STATES[0], expert, MUTATIONS[mutation])
    assert verdict.reward == 0
    assert verdict.kind is (VerdictKind.INVALID if mutation in ("nothing", "malformed") else VerdictKind.OK)
    assert 0 < len(verdict.reason) <= 40
    assert verdict.reason == verifier.verify(STATES[0], expert, MUTATIONS[mutation]).reason


@pytest.mark.parametrize("mutation", MUTATIONS)
def test_no_mutation_passes_where_the_expert_speaks(verifier: Verifier, mutation: str) -> None:
    verdict = verifier.verify(STATES[0], _says("Your order W12 was cancelled as you asked."), MUTATIONS[mutation])
    assert verdict.reward == 0


HOSTILE = {
    "deep lists": '{"a": ' + "[" * 900 + "]" * 900 + "}",
    "deeper than JSON is read": '{"a": ' + "[" * 100_000 + "]" * 100_000 + "}",
    "deep objects": '{"a":' * 500 + "1" + "}" * 500,
    "a long word": json.dumps({"a": 1, "b": "x" * 1_000_000}),
    "a long text": json.dumps({"a": 1, "b": "word " * 200_000}),
    "a long number": '{"a": ' + "9" * 100_000 + "}",
    "a long number in a string": json.dumps({"a": "9" * 100_000}),
    "an infinite number in a string": '{"a": "1e999"}',
    "a long list": json.dumps({"c": ["some words here to compare " + str(i) for i in range(20_000)]}),
    "many arguments": json.dumps({str(i): i for i in range(50_000)}),
    "not an object": "[1]",
    "broken": '{"a": ',
    "lone surrogates": '{"a": "\ud800"}',
}


@pytest.mark.parametrize("hostile", HOSTILE)
def test_hostile_arguments_get_a_verdict(verifier: Verifier, hostile: str) -> None:
    """On either side, and against a slight variant of themselves; nothing raises, nothing runs into the timeout."""
    action, variant, expert = _acts(HOSTILE[hostile]), _acts(HOSTILE[hostile][:-1] + " }"), _acts('{"a": 1, "b": "some text of five words"}')
    assert verifier.verify(STATES[0], expert, action).reward == 0
    assert verifier.verify(STATES[0], action, expert).reward == 0
    assert verifier.verify(STATES[0], action, variant).kind in VerdictKind
    many = Action("", action.tool_calls[:1] * 200, None, ParseOutcome.PARSED) if len(HOSTILE[hostile]) < 10_000 else action
    assert verifier.verify(STATES[0], many, many).kind in VerdictKind


def test_many_calls_in_another_order_get_a_verdict(verifier: Verifier) -> None:
    calls = tuple(ToolCall("f", json.dumps({"b": f"find the answer to question number {i}"})) for i in range(300))
    forward, backward = (Action("", order, None, ParseOutcome.PARSED) for order in (calls, calls[::-1]))
    assert verifier.verify(STATES[0], forward, backward).reward == 0
