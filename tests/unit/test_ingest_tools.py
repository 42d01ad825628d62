"""Tool lists in every form users have, cleaned and inferred."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import orjson
import pytest

from pivotrl.errors import UserError
from pivotrl.trajectories.source import RowQuarantined
from pivotrl.trajectories.tools import drop_null_padding, infer_tools, load_tools, parse_tools, resolve_tools
from pivotrl.types import Message, Origin, Role, Tool, ToolCall, ToolOrigin

SCHEMA: dict[str, Any] = {"type": "object", "properties": {"x": {"type": "string"}}}
BARE: dict[str, Any] = {"name": "f", "description": "does f", "parameters": SCHEMA}


@pytest.mark.parametrize(
    "value",
    [
        [{"type": "function", "function": BARE}],
        [BARE],
        BARE,
        {"type": "function", "function": BARE},
        {"f": {"description": "does f", "parameters": SCHEMA}},
        {"f": {"type": "function", "function": {"description": "does f", "parameters": SCHEMA}}},
        [{"name": "f", "description": "does f", "input_schema": SCHEMA}],
        [{"name_for_human": "F", "name_for_model": "f", "description_for_model": "does f", "parameters": SCHEMA}],
        [{**BARE, "parameters": orjson.dumps(SCHEMA).decode()}],
        orjson.dumps([BARE]).decode(),
    ],
)
def test_every_form_reads_the_same(value: Any, tmp_path: Path) -> None:
    assert parse_tools(value) == (Tool("f", "does f", SCHEMA),)
    (tmp_path / "tools.json").write_bytes(orjson.dumps(value))
    assert load_tools(tmp_path / "tools.json") == parse_tools(value)


@pytest.mark.parametrize("value", [None, "", [], {}])
def test_nothing_is_no_tools(value: Any) -> None:
    assert parse_tools(value) == ()


@pytest.mark.parametrize(
    "value", [[{"description": "no name"}], [3], 3, "not json", [{"name": "f", "parameters": 3}], [{"name": "f", "parameters": "{"}]]
)
def test_what_is_no_tool_is_quarantined(value: Any) -> None:
    with pytest.raises(RowQuarantined, match="wrong schema"):
        parse_tools(value)


@pytest.mark.parametrize("content", [None, b"{", b"[]", b"[3]"])
def test_a_tools_file_that_cannot_be_used_is_the_users_error(content: bytes | None, tmp_path: Path) -> None:
    path = tmp_path / "tools.json"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(UserError, match=r"tools\.json"):
        load_tools(path)


def test_null_padding_goes_at_every_depth_and_values_stay() -> None:
    padded = {
        "type": "object",
        "additionalProperties": False,
        "properties": {
            "a": {"type": "string", "enum": [None, "x"], "items": None, "default": None},
            "b": None,
            "c": {"type": "array", "items": {"type": "object", "properties": {"d": None, "e": {"type": "null"}}}},
            "f": {"anyOf": [{"type": "string", "title": None}, {"type": "null"}]},
            "g": {"type": ["string", "null"], "default": None},
        },
        "required": ["a"],
    }
    assert drop_null_padding(padded) == {
        "type": "object",
        "additionalProperties": False,
        "properties": {
            "a": {"type": "string", "enum": [None, "x"]},
            "c": {"type": "array", "items": {"type": "object", "properties": {"e": {"type": "null"}}}},
            "f": {"anyOf": [{"type": "string"}, {"type": "null"}]},
            "g": {"type": ["string", "null"], "default": None},
        },
        "required": ["a"],
    }


def test_inference_uses_the_agents_calls_only_and_promises_nothing() -> None:
    messages = (
        Message(Role.USER, "", (ToolCall("users_phone", '{"on": true}'),)),
        Message(Role.ASSISTANT, "", (ToolCall("z", '{"n": 1, "s": "x"}'), ToolCall("a", "{}")), origin=Origin.MODEL),
        Message(
            Role.ASSISTANT, "", (ToolCall("z", '{"n": 1.5, "s": null, "l": [], "o": {}, "b": true}'), ToolCall("a", "broken")), origin=Origin.MODEL
        ),
    )
    z = {"b": "boolean", "l": "array", "n": "number", "o": "object", "s": ["null", "string"]}
    assert infer_tools(messages) == (
        Tool("a", "", {"type": "object", "properties": {}}),
        Tool("z", "", {"type": "object", "properties": {name: {"type": kind} for name, kind in z.items()}}),
    )


def test_precedence_row_file_inferred_none() -> None:
    row, file = Tool("row", "", {}), Tool("file", "", {})
    messages = (Message(Role.ASSISTANT, "", (ToolCall("seen", "{}"),), origin=Origin.MODEL),)
    assert resolve_tools([row], [file], messages) == ((row,), ToolOrigin.ROW)
    assert resolve_tools([], [file], messages) == ((file,), ToolOrigin.FILE)
    tools, origin = resolve_tools([], None, messages)
    assert ([tool.name for tool in tools], origin) == (["seen"], ToolOrigin.INFERRED)
    assert resolve_tools([], None, ()) == ((), ToolOrigin.NONE)
