"""What a mutation of an expert action is, and the tools to write one: edit a call's arguments, ask what the tool's schema says.

A mutation maps (state, expert action) to another action whose label is known: `EQUIVALENT` (every engineer would accept it) or `CORRUPTION`
(nobody would). It returns None where it does not apply, which is most of the time; it must never return an action with the other label, so
it asks the schema where one has authority and leaves alone what it does not understand. Random choices come from the generator it is given.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

from pivotrl.actions.protocol import json_text
from pivotrl.types import Action, ParseOutcome, State, ToolCall, ToolOrigin


class Label(StrEnum):
    """What the verdict on a mutated expert action should be."""

    EQUIVALENT = "equivalent"
    CORRUPTION = "corruption"


type Apply = Callable[[State, Action, random.Random], Action | None]


@dataclass(frozen=True, slots=True)
class Mutation:
    """One way to change an expert action with a known effect on its meaning."""

    name: str
    label: Label
    meaning: str
    """What is changed, for the reader of a report."""
    apply: Apply
    """The changed action, or None where the mutation does not apply to this one."""


@dataclass(frozen=True, slots=True)
class CallArguments:
    """One call of an action whose arguments are a JSON object."""

    index: int
    name: str
    arguments: Mapping[str, Any]


def readable_calls(action: Action) -> Iterator[CallArguments]:
    """The calls whose arguments are a JSON object, in order."""
    for index, call in enumerate(action.tool_calls):
        arguments = call.arguments_object()
        if arguments is not None:
            yield CallArguments(index, call.name, arguments)


def with_arguments(action: Action, index: int, arguments: Mapping[str, Any] | str) -> Action:
    """The action with the arguments of one call replaced; text is taken as it is."""
    text = arguments if isinstance(arguments, str) else json_text(arguments)
    return with_call(action, index, ToolCall(action.tool_calls[index].name, text))


def with_call(action: Action, index: int, call: ToolCall) -> Action:
    """The action with one call replaced."""
    calls = list(action.tool_calls)
    calls[index] = call
    return replace(action, tool_calls=tuple(calls))


def says(text: str) -> Action:
    """An action that only speaks."""
    return Action(text, (), None, ParseOutcome.ABSENT)


def schema_of(state: State, name: str) -> Mapping[str, Any] | None:
    """The JSON schema of a tool's arguments, where it has authority: not where it was inferred from calls."""
    if state.tool_origin in (ToolOrigin.INFERRED, ToolOrigin.NONE):
        return None
    return next((tool.parameters for tool in state.tools if tool.name == name), None)


def properties_of(state: State, name: str) -> Mapping[str, Mapping[str, Any]]:
    """Schemas of a tool's arguments by name; empty where none has authority."""
    properties = (schema_of(state, name) or {}).get("properties")
    if not isinstance(properties, Mapping):
        return {}
    return {key: value for key, value in properties.items() if isinstance(value, Mapping)}


def required_of(state: State, name: str) -> frozenset[str]:
    """Arguments that a tool must be given, as far as its schema says."""
    required = (schema_of(state, name) or {}).get("required")
    return frozenset(key for key in required if isinstance(key, str)) if isinstance(required, list | tuple) else frozenset()


def allows_null(schema: Mapping[str, Any]) -> bool:
    """Whether a value's schema names null among its types."""
    types = schema.get("type")
    if types == "null" or (isinstance(types, list) and "null" in types):
        return True
    branches = schema.get("anyOf") or schema.get("oneOf") or []
    return isinstance(branches, list) and any(isinstance(branch, Mapping) and branch.get("type") == "null" for branch in branches)


def edit_one(action: Action, rng: random.Random, edit: Callable[[CallArguments], Mapping[str, Any] | str | None]) -> Action | None:
    """The action with one call edited, calls tried in random order; None where `edit` refuses all of them."""
    calls = list(readable_calls(action))
    rng.shuffle(calls)
    for call in calls:
        arguments = edit(call)
        if arguments is not None:
            return with_arguments(action, call.index, arguments)
    return None


def edit_all(action: Action, edit: Callable[[CallArguments], Mapping[str, Any] | str | None]) -> Action | None:
    """The action with every call edited that `edit` does not refuse; None where it refuses all."""
    changed = None
    for call in readable_calls(action):
        arguments = edit(call)
        if arguments is not None:
            changed = with_arguments(changed or action, call.index, arguments)
    return changed
