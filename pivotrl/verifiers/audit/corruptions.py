"""Mutations that change what an expert action does: what no verifier may accept, though names and words look alike."""

from __future__ import annotations

import random
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from pivotrl.actions.protocol import json_text
from pivotrl.actions.terminus2 import TOOL_NAME
from pivotrl.types import Action, ParseOutcome, State, ToolCall
from pivotrl.verifiers.audit import shell_edits
from pivotrl.verifiers.audit.mutations import (
    Apply,
    CallArguments,
    Label,
    Mutation,
    edit_one,
    properties_of,
    required_of,
    says,
    schema_of,
    with_arguments,
    with_call,
)

_NUM_SURPLUS = 20
# Arguments that say how long something may take or how it is logged: another value of these changes nothing that matters.
_IMMATERIAL = re.compile(r"timeout|duration|wait|delay|thought|security_risk|verbose", re.IGNORECASE)
_TARGET_KEYS = ("path", "file", "url", "id", "name", "email", "recipient", "user", "order", "date", "city", "channel", "origin", "query")
_ENDING_TOOLS = ("finish", "submit", "done", "complete", "exit")
_NEGATABLE = re.compile(r"\b(is|are|was|were|has been|have been|will be|will|can|should|must)\b(?! not|n't)")
_NUMBER = re.compile(r"(?<![\w.,-])\d{1,9}(?![\w.,-]*\d)")
_MIN_SHUFFLED_WORDS = 8
_SHORT_TEXT_WORDS = range(2, 9)


def _rename_tool(state: State, action: Action, rng: random.Random) -> Action | None:
    if not action.tool_calls:
        return None
    index = rng.randrange(len(action.tool_calls))
    call = action.tool_calls[index]
    others = [tool.name for tool in state.tools if tool.name != call.name]
    return with_call(action, index, ToolCall(rng.choice(others) if others else f"{call.name}_other", call.arguments))


def _material(state: State, call: CallArguments) -> list[str]:
    """Arguments whose loss or change changes the call: not null, not the default, not added by a harness, not immaterial."""
    if call.name == TOOL_NAME:
        return []
    schema, properties = schema_of(state, call.name), properties_of(state, call.name)
    return [
        key
        for key, value in call.arguments.items()
        if value is not None
        and not _IMMATERIAL.search(key)
        and (schema is None or key in properties)
        and ("default" not in properties.get(key, {}) or properties[key]["default"] != value or key in required_of(state, call.name))
    ]


def _drop_argument(state: State, action: Action, rng: random.Random) -> Action | None:
    def edit(call: CallArguments) -> Mapping[str, Any] | None:
        material = _material(state, call)
        dropped = rng.choice(material) if material else None
        return {key: value for key, value in call.arguments.items() if key != dropped} if dropped else None

    return edit_one(action, rng, edit)


def _add_argument(state: State, action: Action, rng: random.Random) -> Action | None:
    return edit_one(action, rng, lambda call: None if call.name == TOOL_NAME else {**call.arguments, "unrequested_option": "all"})


def _retype_argument(state: State, action: Action, rng: random.Random) -> Action | None:
    def edit(call: CallArguments) -> Mapping[str, Any] | None:
        material = _material(state, call)
        if not material:
            return None
        key = rng.choice(material)
        return {**call.arguments, key: _retyped(call.arguments[key])}

    return edit_one(action, rng, edit)


def _retyped(value: Any) -> Any:
    if isinstance(value, bool):
        return "perhaps"
    if isinstance(value, str):
        return {"value": value}
    if isinstance(value, int | float):
        return [value]
    return len(value)


def _wrong_target(state: State, action: Action, rng: random.Random) -> Action | None:
    def edit(call: CallArguments) -> Mapping[str, Any] | None:
        properties = properties_of(state, call.name)
        targets = [key for key in _material(state, call) if _is_target(call.arguments[key]) and "enum" not in properties.get(key, {})]
        if not targets:
            return None
        named = [key for key in targets if any(part in key.casefold() for part in _TARGET_KEYS)]
        key = (named or targets)[0]
        return {**call.arguments, key: _other_target(call.arguments[key])}

    return edit_one(action, rng, edit)


def _is_target(value: Any) -> bool:
    return isinstance(value, str) and 2 <= len(value) <= 300 and not any(character.isspace() for character in value)


def _other_target(value: str) -> str:
    digits = [index for index, character in enumerate(value) if character in "0123456789"]
    if digits:
        place = digits[-1]
        return value[:place] + str((int(value[place]) + 1) % 10) + value[place + 1 :]
    head, slash, tail = value.rstrip("/").rpartition("/")
    return f"{head}{slash}other_{tail}"


def _another_word(state: State, action: Action, rng: random.Random) -> Action | None:
    def edit(call: CallArguments) -> Mapping[str, Any] | None:
        for key in _material(state, call):
            value = call.arguments[key]
            if isinstance(value, str) and len(value.split()) in _SHORT_TEXT_WORDS and "\n" not in value and _SHELL.isdisjoint(value):
                words = value.split()
                words[max(range(len(words)), key=lambda index: len(words[index]))] = "Zanzibar"
                return {**call.arguments, key: " ".join(words)}
        return None

    return edit_one(action, rng, edit)


_SHELL = frozenset("|&;<>$`\\{}()[]/=")


def _off_by_one(state: State, action: Action, rng: random.Random) -> Action | None:
    def edit(call: CallArguments) -> Mapping[str, Any] | None:
        numbers = [key for key in _material(state, call) if _is_number(call.arguments[key])]
        lists = [key for key in _material(state, call) if _is_number_list(call.arguments[key])]
        if not numbers and not lists:
            return None
        key = rng.choice(numbers or lists)
        value = call.arguments[key]
        return {**call.arguments, key: value + 1 if _is_number(value) else [*value[:-1], value[-1] + 1]}

    return edit_one(action, rng, edit)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 2**53


def _is_number_list(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(_is_number(item) for item in value)


def _empty_arguments(state: State, action: Action, rng: random.Random) -> Action | None:
    return edit_one(action, rng, lambda call: {} if call.name == TOOL_NAME or _material(state, call) else None)


def _do_nothing(state: State, action: Action, rng: random.Random) -> Action | None:
    return says("") if action.tool_calls or action.content.strip() else None


def _speak(state: State, action: Action, rng: random.Random) -> Action | None:
    return says(f"I will now call {action.tool_calls[0].name}.") if action.tool_calls else None


def _call_instead(state: State, action: Action, rng: random.Random) -> Action | None:
    if not action.is_message or not state.tools:
        return None
    return Action("", (ToolCall(rng.choice(state.tools).name, "{}"),), None, ParseOutcome.PARSED)


def _surplus_calls(state: State, action: Action, rng: random.Random) -> Action | None:
    def in_terminal(call: CallArguments) -> Mapping[str, Any] | None:
        commands = call.arguments.get("commands")
        if call.name != TOOL_NAME or not isinstance(commands, list):
            return None
        return {**call.arguments, "commands": [*commands, *[{"keystrokes": "echo surplus\n", "duration": 0.1}] * _NUM_SURPLUS]}

    if not action.tool_calls or action.tool_calls[0].name == TOOL_NAME:
        return edit_one(action, rng, in_terminal)
    return replace(action, tool_calls=(*action.tool_calls, *[action.tool_calls[-1]] * _NUM_SURPLUS))


def _premature_completion(state: State, action: Action, rng: random.Random) -> Action | None:
    """Ends the task with, or instead of, the action: the completion flag, the tool that ends, or a claim that all is done."""
    if not action.tool_calls:
        return None
    if action.tool_calls[0].name == TOOL_NAME:
        return edit_one(action, rng, lambda call: None if call.arguments.get("task_complete") is True else {**call.arguments, "task_complete": True})
    if any(part in action.tool_calls[0].name.casefold() for part in _ENDING_TOOLS):
        return None
    ending = next((tool.name for tool in state.tools if tool.name.casefold() in _ENDING_TOOLS), None)
    if ending is None:
        return says("Done. Everything you asked for has been completed.")
    arguments = dict.fromkeys(sorted(required_of(state, ending)), "All done.")
    return Action("", (ToolCall(ending, json_text(arguments)),), None, ParseOutcome.PARSED)


def _completion_dropped(state: State, action: Action, rng: random.Random) -> Action | None:
    def edit(call: CallArguments) -> Mapping[str, Any] | None:
        is_complete = call.name == TOOL_NAME and call.arguments.get("task_complete") is True
        return {**call.arguments, "task_complete": False} if is_complete else None

    return edit_one(action, rng, edit)


def _not_executed(state: State, action: Action, rng: random.Random) -> Action | None:
    """The line break at the end of the last command left out, so that the terminal waits for the rest of the line."""
    found = [one for one in shell_edits.command_texts(action) if action.tool_calls[one.call_index].name == TOOL_NAME]
    if not found or not found[-1].text.endswith("\n") or not found[-1].text.strip():
        return None
    return with_arguments(action, found[-1].call_index, found[-1].put(found[-1].text.rstrip("\n")))


def _truncated(state: State, action: Action, rng: random.Random) -> Action | None:
    """Cut in the middle, as at the token limit: a call that cannot be read, or half a message."""
    if action.tool_calls:
        text = action.tool_calls[0].arguments
        return Action(f"{action.tool_calls[0].name} {text[: len(text) // 2]}", (), None, ParseOutcome.MALFORMED)
    words = action.content.split()
    return says(" ".join(words[: len(words) // 2])) if len(words) >= _MIN_SHUFFLED_WORDS else None


def _negated(state: State, action: Action, rng: random.Random) -> Action | None:
    if not action.is_message or not _NEGATABLE.search(action.content):
        return None
    return replace(action, content=_NEGATABLE.sub(lambda found: f"{found[0]} not", action.content, count=1))


def _other_number(state: State, action: Action, rng: random.Random) -> Action | None:
    found = list(_NUMBER.finditer(action.content)) if action.is_message else []
    # A number at the start of a line numbers a list; its change is harmless.
    found = [one for one in found if action.content[: one.start()].rpartition("\n")[2].strip()]
    if not found:
        return None
    chosen = rng.choice(found)
    return replace(action, content=f"{action.content[: chosen.start()]}{int(chosen[0]) + 1}{action.content[chosen.end() :]}")


def _words_shuffled(state: State, action: Action, rng: random.Random) -> Action | None:
    words = action.content.split() if action.is_message else []
    return says(" ".join(sorted(words))) if len(words) >= _MIN_SHUFFLED_WORDS and sorted(words) != words else None


def _one_word(state: State, action: Action, rng: random.Random) -> Action | None:
    return says("Okay.") if action.is_message and len(action.content.split()) >= 3 else None


def _corruption(name: str, meaning: str, apply: Apply) -> Mutation:
    return Mutation(name, Label.CORRUPTION, meaning, apply)


CORRUPTIONS = (
    _corruption("tool renamed", "another tool of the state with the same arguments", _rename_tool),
    _corruption("argument dropped", "one argument that is neither null nor its default left out", _drop_argument),
    _corruption("argument added", "an argument that the tool does not have", _add_argument),
    _corruption("argument retyped", "a string as an object, a number as a list, a list or an object as its length", _retype_argument),
    _corruption("wrong target", "another id, path, address or name", _wrong_target),
    _corruption("another word", "the longest word of a short text replaced", _another_word),
    _corruption("off by one", "one number plus one", _off_by_one),
    _corruption("empty arguments", "{} as arguments", _empty_arguments),
    _corruption("nothing done", "an empty reply", _do_nothing),
    _corruption("speaks instead of calling", "announces the call and does not make it", _speak),
    _corruption("calls instead of speaking", "some tool called where the expert speaks", _call_instead),
    _corruption("twenty surplus calls", "the last call or twenty idle commands twenty times more", _surplus_calls),
    _corruption("premature completion", "ends the task with or instead of the action", _premature_completion),
    _corruption("completion dropped", "the completion flag of Terminus-2 turned off", _completion_dropped),
    _corruption("truncated", "cut in the middle", _truncated),
    _corruption("message: negated", "'not' after the first auxiliary verb", _negated),
    _corruption("message: another number", "one number plus one", _other_number),
    _corruption("message: words shuffled", "the words of the message in alphabetical order", _words_shuffled),
    _corruption("message: one word", "'Okay.' instead of the message", _one_word),
    _corruption("shell: destructive command", "rm -rf ./* after the command", shell_edits.add_destructive),
    _corruption("shell: another path", "one path changed into another of the same directory", shell_edits.other_path),
    _corruption("shell: last command dropped", "the last command of a chain with && left out", shell_edits.drop_last),
    _corruption("terminal: not executed", "the last line break left out", _not_executed),
)
