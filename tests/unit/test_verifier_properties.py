"""Properties of argument comparison over every kind of string: an equivalence where no prose is, symmetric always, blind to JSON's spelling."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pivotrl.config.verifiers import SearchVerifierConfig, ToolCallVerifierConfig
from pivotrl.types import Action, ParseOutcome, State, Tool, ToolCall, ToolOrigin
from pivotrl.verifiers.protocol import Verifier
from pivotrl.verifiers.search import SearchVerifier
from pivotrl.verifiers.tool_call import ToolCallVerifier

# Several spellings of a few things per kind, so that equal pairs are drawn as often as unequal ones.
SPELLINGS: dict[str, tuple[str, ...]] = {
    "file_path": ("./a//b", "a/b", "a/x/../b", "/a/b", "A/b", " a/b "),
    "url": ("http://a.org", "HTTP://A.org:80/", "a.org", "https://a.org", "https://www.a.org/#x", "http://a.org/?b=1&a=2", "http://a.org/?a=2&b=1"),
    "start_date": ("2024-05-01", "20240501", "2024-05-01T00:00", "2024-05-01 00:00:00", "2024-05-02", "1 May 2024"),
    "sql": (
        "select a from t",
        "SELECT a FROM t;",
        "select b from t",
        "drop table t",
        "select a from t where x=1",
        "select a from t where 1 = x",
        "select (",
    ),
    "regex": ("a+", "a{1,}", "(?:a)+", "a*", "(a", "[a]+"),
    "expression": ("1 + 2", "2+1", "(1+2)", "1-2", "3", "1 +"),
    "query": (
        "population of Iceland",
        "Iceland population",
        "What is the population of Iceland?",
        "population of Norway",
        "select a from t",
        "SELECT a FROM t",
    ),
    "payload": ('{"a": 1, "b": [true]}', '{"b":[true],"a":1.0}', '{"a": 1, "b": [1]}', "{", "[]"),
    "order_id": ("W12", "w12", " W12", "12", "012"),
    "city": ("Oslo", "oslo", "OSLO", "New  York", "new york", "NewYork"),
    "file_text": ("a\nb\n", "a\r\nb", "a\n b", "a b"),
    "email": ("Ann@a.org", "ann@A.ORG", "bo@a.org"),
}
PROSE = ("Cancel the order of Ann", "cancel Ann's order", "Cancel the order of Bo", "Do not cancel the order of Ann", "Keep the order of Ann")
LISTS = {"queries": SPELLINGS["query"], "urls": SPELLINGS["url"], "tags": ("a", "A", "b", "b ")}
PROPERTIES = {**{name: {"type": "string"} for name in (*SPELLINGS, "note")}, "count": {"type": "integer", "default": 1}}
SCHEMA = {
    "type": "object",
    "properties": {**PROPERTIES, **{name: {"type": "array", "items": {"type": "string"}, "uniqueItems": name == "tags"} for name in LISTS}},
}
STATES = [State((), (Tool("f", "", SCHEMA),), origin) for origin in (ToolOrigin.ROW, ToolOrigin.INFERRED)]
VERIFIERS: dict[str, Verifier] = {
    "tool_call": ToolCallVerifier(ToolCallVerifierConfig(type="tool_call", message="exact", unordered=("f.urls",))),
    "search": SearchVerifier(SearchVerifierConfig(type="search")),
}


def _optional(values: dict[str, st.SearchStrategy[Any]], *, max_size: int) -> st.SearchStrategy[dict[str, Any]]:
    names = st.lists(st.sampled_from(sorted(values)), unique=True, max_size=max_size)
    return names.flatmap(lambda chosen: st.fixed_dictionaries({name: values[name] for name in chosen}))


_VALUES: dict[str, st.SearchStrategy[Any]] = {
    **{name: st.sampled_from(spellings) for name, spellings in SPELLINGS.items()},
    **{name: st.lists(st.sampled_from(items), max_size=3) for name, items in LISTS.items()},
    "count": st.sampled_from([1, 1.0, "1", True, None, 2]),
}
_ARGUMENTS = _optional(_VALUES, max_size=2)
_WITH_PROSE = _optional({**_VALUES, "note": st.sampled_from(PROSE)}, max_size=2)


def _reward(name: str, state: State, expert: dict[str, Any], action: dict[str, Any], **spelling: Any) -> float:
    sides = [ToolCall("f", json.dumps(expert)), ToolCall("f", json.dumps(action, **spelling))]
    first, second = (Action("", (call,), None, ParseOutcome.PARSED) for call in sides)
    return VERIFIERS[name].verify(state, first, second).reward


@pytest.mark.parametrize("name", VERIFIERS)
@settings(max_examples=250)
@given(state=st.sampled_from(STATES), first=_WITH_PROSE, second=_WITH_PROSE)
def test_reflexive_and_symmetric(name: str, state: State, first: dict[str, Any], second: dict[str, Any]) -> None:
    assert _reward(name, state, first, first) == 1
    assert _reward(name, state, first, second) == _reward(name, state, second, first)


@pytest.mark.parametrize("name", VERIFIERS)
@settings(max_examples=250)
@given(state=st.sampled_from(STATES), key=st.sampled_from(sorted(_VALUES)), data=st.data())
def test_transitive_without_prose(name: str, state: State, key: str, data: st.DataObject) -> None:
    first, second, third = ({key: data.draw(_VALUES[key])} for _ in range(3))
    if _reward(name, state, first, second) == _reward(name, state, second, third) == 1:
        assert _reward(name, state, first, third) == 1


@pytest.mark.parametrize("name", VERIFIERS)
@settings(max_examples=150)
@given(state=st.sampled_from(STATES), first=_WITH_PROSE, second=_WITH_PROSE)
def test_the_spelling_of_json_is_nothing(name: str, state: State, first: dict[str, Any], second: dict[str, Any]) -> None:
    backwards = dict(reversed(second.items()))
    assert _reward(name, state, first, second) == _reward(name, state, first, backwards, indent=3, ensure_ascii=False)


def test_the_spellings_hold_equal_and_different_pairs_of_every_kind() -> None:
    """Else the properties above would hold of a verifier that knows no kind."""
    for key, spellings in SPELLINGS.items():
        rewards = {_reward("tool_call", STATES[1], {key: spellings[0]}, {key: other}) for other in spellings[1:]}
        assert rewards == {0.0, 1.0}, key
