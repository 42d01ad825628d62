"""Mutations that change how an expert action is written and not what it does: what a functional verifier must accept."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from pivotrl.actions.protocol import json_text
from pivotrl.actions.terminus2 import TOOL_NAME
from pivotrl.types import Action, State
from pivotrl.verifiers.audit import shell_edits
from pivotrl.verifiers.audit.mutations import (
    Apply,
    CallArguments,
    Label,
    Mutation,
    allows_null,
    edit_all,
    edit_one,
    properties_of,
    required_of,
)

# Above this a float no longer holds every integer.
_MAX_EXACT_INT = 2**53
_PATH_KEYS = ("path", "file_path", "filename", "source", "destination")
_PROSE = "I will do that."


def _reorder_keys(state: State, action: Action, rng: random.Random) -> Action | None:
    return edit_all(action, lambda call: json_text(reordered) if json_text(reordered := _reversed_keys(call.arguments)) != _plain(call) else None)


def _plain(call: CallArguments) -> str:
    return json_text(call.arguments)


def _reversed_keys(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _reversed_keys(value[key]) for key in reversed(list(value))}
    if isinstance(value, list):
        return [_reversed_keys(item) for item in value]
    return value


def _json_formatting(state: State, action: Action, rng: random.Random) -> Action | None:
    return edit_all(action, lambda call: json.dumps(call.arguments, indent=2, ensure_ascii=True) if call.arguments else None)


def _whole_numbers(state: State, action: Action, rng: random.Random) -> Action | None:
    def edit(call: CallArguments) -> Mapping[str, Any] | None:
        properties = properties_of(state, call.name)
        changed = {key: value if _type_of(properties, key) == "string" else _as_floats(value) for key, value in call.arguments.items()}
        return None if json_text(changed) == _plain(call) else changed

    return edit_all(action, edit)


def _type_of(properties: Mapping[str, Mapping[str, Any]], key: str) -> Any:
    return properties.get(key, {}).get("type")


def _as_floats(value: Any) -> Any:
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) < _MAX_EXACT_INT:
        return float(value)
    if isinstance(value, list):
        return [_as_floats(item) for item in value]
    if isinstance(value, Mapping):
        return {key: _as_floats(item) for key, item in value.items()}
    return value


def _defaults_filled(state: State, action: Action, rng: random.Random) -> Action | None:
    def edit(call: CallArguments) -> Mapping[str, Any] | None:
        required = required_of(state, call.name)
        missing = {
            key: schema["default"]
            for key, schema in properties_of(state, call.name).items()
            if key not in required and key not in call.arguments and schema.get("default") is not None
        }
        return {**call.arguments, **missing} if missing else None

    return edit_all(action, edit)


def _defaults_omitted(state: State, action: Action, rng: random.Random) -> Action | None:
    def edit(call: CallArguments) -> Mapping[str, Any] | None:
        required, properties = required_of(state, call.name), properties_of(state, call.name)
        kept = {
            key: value
            for key, value in call.arguments.items()
            if key in required or "default" not in properties.get(key, {}) or json_text(value) != json_text(properties[key]["default"])
        }
        return kept if len(kept) < len(call.arguments) else None

    return edit_all(action, edit)


def _optional_nulls(state: State, action: Action, rng: random.Random) -> Action | None:
    def edit(call: CallArguments) -> Mapping[str, Any] | None:
        required = required_of(state, call.name)
        nulls: dict[str, Any] = {
            key: None
            for key, schema in properties_of(state, call.name).items()
            if key not in required and key not in call.arguments and allows_null(schema) and schema.get("default") is None
        }
        return {**call.arguments, **nulls} if nulls else None

    return edit_all(action, edit)


def _sets_reordered(state: State, action: Action, rng: random.Random) -> Action | None:
    def edit(call: CallArguments) -> Mapping[str, Any] | None:
        properties = properties_of(state, call.name)
        changed = {
            key: value[::-1] if isinstance(value, list) and properties.get(key, {}).get("uniqueItems") is True else value
            for key, value in call.arguments.items()
        }
        return None if changed == call.arguments else changed

    return edit_all(action, edit)


def _reads_reordered(state: State, action: Action, rng: random.Random) -> Action | None:
    """Only calls of one tool whose name says that it reads: the order of writes may matter."""
    names = {call.name for call in action.tool_calls}
    if len(action.tool_calls) < 2 or len(names) != 1 or not names.pop().casefold().startswith(("get", "search", "find", "read", "view", "list")):
        return None
    return replace(action, tool_calls=action.tool_calls[::-1])


def _paths(state: State, action: Action, rng: random.Random) -> Action | None:
    def edit(call: CallArguments) -> Mapping[str, Any] | None:
        for key in _PATH_KEYS:
            value = call.arguments.get(key)
            if isinstance(value, str) and value.startswith("/") and value.count("/") >= 2 and not any(part.isspace() for part in value):
                head, _, tail = value.rpartition("/")
                return {**call.arguments, key: f"{head}/./{tail}"}
        return None

    return edit_one(action, rng, edit)


def _other_prose(state: State, action: Action, rng: random.Random) -> Action | None:
    if not action.tool_calls or action.tool_calls[0].name == TOOL_NAME or action.content == _PROSE:
        return None
    return replace(action, content=_PROSE)


def _other_thinking(state: State, action: Action, rng: random.Random) -> Action | None:
    return replace(action, reasoning="Let me think about what to do first.") if action.tool_calls or action.content.strip() else None


def _terminal_prose(state: State, action: Action, rng: random.Random) -> Action | None:
    prose = {"analysis": "The last command has finished.", "plan": "Take the next step."}
    return edit_one(action, rng, lambda call: {**call.arguments, **prose} if call.name == TOOL_NAME else None)


def _terminal_durations(state: State, action: Action, rng: random.Random) -> Action | None:
    """Half a second more for each command: never less, so that nothing is read before it is there."""

    def edit(call: CallArguments) -> Mapping[str, Any] | None:
        commands = call.arguments.get("commands")
        if call.name != TOOL_NAME or not isinstance(commands, list) or not commands:
            return None
        slower: list[dict[str, Any]] = []
        for command in commands:
            duration = command.get("duration", 1.0) if isinstance(command, dict) else None
            if not isinstance(duration, int | float):
                return None
            slower.append({**command, "duration": duration + 0.5})
        return {**call.arguments, "commands": slower}

    return edit_one(action, rng, edit)


def _surrounding_blanks(state: State, action: Action, rng: random.Random) -> Action | None:
    return replace(action, content=f"\n{action.content} \n") if action.is_message and action.content.strip() else None


def _emphasis(state: State, action: Action, rng: random.Random) -> Action | None:
    text = action.content.strip()
    if not action.is_message or not text or any(character in text for character in "\n*_`#<|["):
        return None
    return replace(action, content=f"**{text}**")


def _equivalent(name: str, meaning: str, apply: Apply) -> Mutation:
    return Mutation(name, Label.EQUIVALENT, meaning, apply)


EQUIVALENTS = (
    _equivalent("keys reordered", "keys of the arguments in the opposite order, at every level", _reorder_keys),
    _equivalent("JSON formatting", "arguments indented, letters beyond ASCII escaped", _json_formatting),
    _equivalent("whole numbers as floats", "2 as 2.0", _whole_numbers),
    _equivalent("defaults filled in", "missing optional arguments given their default of the schema", _defaults_filled),
    _equivalent("defaults left out", "arguments that equal their default left out", _defaults_omitted),
    _equivalent("optional nulls", "missing nullable arguments given as null", _optional_nulls),
    _equivalent("sets reordered", "lists that the schema calls unique in the opposite order", _sets_reordered),
    _equivalent("reads reordered", "parallel calls of one reading tool in the opposite order", _reads_reordered),
    _equivalent("path spelling", "an absolute path with a /./ in it", _paths),
    _equivalent("other prose", "other words beside the call", _other_prose),
    _equivalent("other thinking", "other reasoning before the action", _other_thinking),
    _equivalent("terminal: other prose", "another analysis and plan", _terminal_prose),
    _equivalent("terminal: durations", "half a second more for each command", _terminal_durations),
    _equivalent("message: blanks", "blanks around a message", _surrounding_blanks),
    _equivalent("message: emphasis", "a message in bold type", _emphasis),
    _equivalent("shell: quotes", "'word' as \"word\" or the other way, where nothing would be expanded", shell_edits.requote),
    _equivalent("shell: flag order", "-la as -al", shell_edits.reorder_flags),
    _equivalent("shell: flags apart", "-la as -l -a", shell_edits.split_flags),
    _equivalent("shell: long flags", "grep -n as grep --line-number", shell_edits.long_flags),
    _equivalent("shell: blanks", "two blanks between a command and its first argument", shell_edits.double_blank),
)
