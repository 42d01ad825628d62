"""What a schema contributes: references, alternatives, defaults, orders; and what the recipe adds. Each with the pair that must stay different."""

from __future__ import annotations

import json
from typing import Any

import pytest
from fakes.processor_time import processor_seconds

from pivotrl.config.verifiers import ToolCallVerifierConfig
from pivotrl.types import Action, ParseOutcome, State, Tool, ToolCall, ToolOrigin
from pivotrl.verifiers.argument_schema import RecipeRules, RuleBook
from pivotrl.verifiers.tool_call import ToolCallVerifier

DEFINITIONS = {
    "node": {
        "type": "object",
        "properties": {
            "value": {"type": "integer"},
            "depth": {"type": "integer", "default": 0},
            "children": {"type": "array", "items": {"$ref": "#/$defs/node"}},
            "next": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]},
        },
    },
    "named": {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]},
    "odd/name~": {"type": "number"},
}
PROPERTIES: dict[str, Any] = {
    "tree": {"$ref": "#/$defs/node"},
    "pointer": {"$ref": "#/$defs/odd~1name~0"},
    "dangling": {"$ref": "#/$defs/none"},
    "loop": {"$ref": "#/properties/loop"},
    "both": {"allOf": [{"$ref": "#/$defs/named"}, {"properties": {"age": {"type": "integer", "default": 3}}}], "description": "x"},
    "shape": {
        "oneOf": [
            {"type": "object", "properties": {"kind": {"const": "circle"}, "r": {"type": "number"}, "unit": {"type": "string", "default": "cm"}}},
            {"type": "object", "properties": {"kind": {"const": "square"}, "side": {"type": "number"}, "unit": {"type": "string", "default": "m"}}},
        ]
    },
    "one_or_many": {"anyOf": [{"type": "integer"}, {"type": "array", "items": {"type": "integer"}}]},
    "maybe": {"anyOf": [{"type": "integer", "minimum": 0}, {"type": "null"}], "default": 7},
    "pair": {"type": "array", "prefixItems": [{"type": "string"}, {"type": "integer"}]},
    "old_pair": {"type": "array", "items": [{"type": "string"}, {"type": "integer"}]},
    "colour": {"type": "string", "enum": ["dark_red", "light-blue"]},
    "counts": {"type": "object", "additionalProperties": {"type": "integer"}},
    "labels": {"type": "array", "items": {"type": "string"}, "uniqueItems": True},
    "day": {"type": "string", "format": "date"},
    "sku": {"type": "string", "pattern": "^[A-Z]"},
    "rows": {"type": "array", "items": {"type": "object", "properties": {"seat": {"type": "string"}}}},
}
STATE = State((), (Tool("f", "", {"type": "object", "properties": PROPERTIES, "$defs": DEFINITIONS}),), ToolOrigin.ROW)


def reward(expert: object, action: object, **config: Any) -> float:
    verifier = ToolCallVerifier(ToolCallVerifierConfig.model_validate({"type": "tool_call", "message": "exact", **config}))
    sides = [Action("", (ToolCall("f", json.dumps(one)),), None, ParseOutcome.PARSED) for one in (expert, action)]
    forth, back = verifier.verify(STATE, *sides).reward, verifier.verify(STATE, *reversed(sides)).reward
    assert forth == back
    return forth


@pytest.mark.parametrize(
    ("expert", "same", "other"),
    [
        ({"tree": {"value": 1}}, {"tree": {"value": "1", "depth": 0, "next": None}}, {"tree": {"value": 1, "depth": 1}}),
        ({"tree": {"children": [{"value": 1}]}}, {"tree": {"children": [{"value": 1.0, "depth": 0}]}}, {"tree": {"children": [{"value": 2}]}}),
        ({"tree": {"next": {"next": {"value": 2}}}}, {"tree": {"next": {"next": {"value": "2"}}}}, {"tree": {"next": {"value": 2}}}),
        ({"pointer": 1.5}, {"pointer": "1.50"}, {"pointer": "1.51"}),
        ({"dangling": {"a": 1}}, {"dangling": {"a": 1.0}}, {"dangling": {"a": "1"}}),
        ({"loop": 1}, {"loop": 1.0}, {"loop": "1"}),
        ({"both": {"name": "x"}}, {"both": {"name": "x", "age": 3}}, {"both": {"name": "x", "age": 4}}),
        (
            {"shape": {"kind": "circle", "r": 1}},
            {"shape": {"kind": "circle", "r": "1", "unit": "cm"}},
            {"shape": {"kind": "circle", "r": 1, "unit": "m"}},
        ),
        ({"shape": {"kind": "square", "side": 1}}, {"shape": {"kind": "square", "side": 1, "unit": "m"}}, {"shape": {"kind": "circle", "side": 1}}),
        ({"one_or_many": 1}, {"one_or_many": 1.0}, {"one_or_many": [1]}),
        ({"one_or_many": [1, 2]}, {"one_or_many": ["1", 2]}, {"one_or_many": [2, 1]}),
        ({"maybe": 7}, {}, {"maybe": None}),
        ({"pair": ["5", 6]}, {"pair": [5, "6"]}, {"pair": ["6", 5]}),
        ({"old_pair": ["5", 6]}, {"old_pair": [5, "6"]}, {"old_pair": ["6", 5]}),
        ({"colour": "dark_red"}, {"colour": "Dark Red"}, {"colour": "light-blue"}),
        ({"counts": {"a": 1}}, {"counts": {"a": "1"}}, {"counts": {"b": 1}}),
        ({"labels": ["a", "b"]}, {"labels": ["b", "a", "a"]}, {"labels": ["a"]}),
        ({"day": "2024-05-01"}, {"day": "20240501"}, {"day": "2024-05-02"}),
        ({"day": "2024-05-01"}, {"day": " 2024-05-01"}, {"day": 20240501}),
        ({"sku": "Abc d"}, {"sku": "Abc d "}, {"sku": "abc d"}),
    ],
)
def test_by_schema(expert: object, same: object, other: object) -> None:
    assert reward(expert, expert) == 1
    assert reward(expert, same) == 1
    assert reward(expert, other) == 0


@pytest.mark.parametrize(
    ("config", "expert", "same", "other"),
    [
        (
            {"unordered": ["f.rows"]},
            {"rows": [{"seat": "1A"}, {"seat": "1B"}]},
            {"rows": [{"seat": "1B"}, {"seat": "1A"}]},
            {"rows": [{"seat": "1A"}]},
        ),
        ({"unordered": ["*.rows"]}, {"rows": [{"seat": "1A"}] * 2}, {"rows": [{"seat": "1A"}] * 2}, {"rows": [{"seat": "1A"}]}),
        ({"kinds": {"f.rows.seat": "path"}}, {"rows": [{"seat": "a/b"}]}, {"rows": [{"seat": "a//b"}]}, {"rows": [{"seat": "a/B"}]}),
        ({"kinds": {"*.anything": "sql"}}, {"anything": "select a from t"}, {"anything": "SELECT a FROM t"}, {"anything": "select b from t"}),
        ({"ignored_arguments": ["f.rows.seat"]}, {"rows": [{"seat": "1A", "row": 1}]}, {"rows": [{"row": 1}]}, {"rows": [{"row": 2}]}),
        ({"destructive_words": ["Settle"]}, {"note": "settle the account of Ann"}, {"note": "Settle account of Ann"}, {"note": "the account of Ann"}),
    ],
)
def test_by_recipe(config: dict[str, Any], expert: object, same: object, other: object) -> None:
    assert reward(expert, same, **config) == 1
    assert reward(expert, other, **config) == 0


def test_the_recipe_is_what_makes_the_difference() -> None:
    assert reward({"rows": [{"seat": "1A"}, {"seat": "1B"}]}, {"rows": [{"seat": "1B"}, {"seat": "1A"}]}) == 0
    assert reward({"rows": [{"seat": "a/b"}]}, {"rows": [{"seat": "a//b"}]}) == 0
    assert reward({"rows": [{"seat": "1A", "row": 1}]}, {"rows": [{"row": 1}]}) == 0


def test_undecided_strings_are_strict() -> None:
    assert reward({"x": "Send the parcel to Oslo on Monday"}, {"x": "Send my parcel to Oslo on Monday"}) == 0
    assert reward({"note": "Send the parcel to Oslo on Monday"}, {"note": "Send my parcel to Oslo on Monday"}) == 1
    assert reward({"x": '{"b": 1, "a": [1.0]}'}, {"x": '{"a":[1],"b":1}'}) == 1
    assert reward({"x": '{"a": 1}'}, {"x": {"a": 1}}) == 0
    assert reward({"x": "./a//b"}, {"x": "./a/b"}) == 1
    assert reward({"x": "a//b"}, {"x": "a/b"}) == 0


def test_what_goes_into_a_file_is_compared_to_the_character() -> None:
    assert reward({"file_text": "def f():\n    pass\n"}, {"file_text": "def f():\r\n    pass"}) == 1
    assert reward({"file_text": "def f():\n    pass\n"}, {"file_text": "def f():\n  pass\n"}) == 0
    assert reward({"old_str": " x"}, {"old_str": "x"}) == 0


def test_schemas_that_branch_without_end_are_compiled_in_a_moment() -> None:
    """Three self references at every level would be 3^24 rules, were they written out."""
    again = {"$ref": "#/$defs/e"}
    expression = {"type": "object", "properties": {name: {"allOf": [again]} for name in ("left", "right", "other")}}
    wide = {"anyOf": [{"type": "array", "items": {"allOf": [again, {"$ref": "#/$defs/wide"}]}}, again]}
    tool = Tool("f", "", {"properties": {"e": again, "wide": wide}, "$defs": {"e": expression, "wide": wide}})
    state = State((), (tool,), ToolOrigin.ROW)
    elapsed_s, rule = processor_seconds(lambda: RuleBook(RecipeRules()).rule(state, "f"))
    assert elapsed_s < 2
    assert rule.members["e"].members["left"].members["right"].json_types == {"object"}


def test_a_tool_is_compiled_once() -> None:
    book = RuleBook(RecipeRules())
    assert book.rule(STATE, "f") is book.rule(STATE, "f")
    assert book.rule(State((), STATE.tools, ToolOrigin.INFERRED), "f") is not book.rule(STATE, "f")
