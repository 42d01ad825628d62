"""Mutations of shell commands, wherever an action holds one: a bash tool's argument, codex' argument list, the keystrokes of Terminus-2.

Places to edit are found in tree-sitter's syntax tree, so that text which only looks like a flag or a quote (in a heredoc, in a string) is
left alone. Only flags of common GNU tools are touched, and only those that take no value.
"""

from __future__ import annotations

import functools
import random
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from tree_sitter import Language, Node, Parser
from tree_sitter_bash import language

from pivotrl.actions.terminus2 import TOOL_NAME
from pivotrl.types import Action, State
from pivotrl.verifiers.audit.mutations import readable_calls, with_arguments

_SHELL_TOOLS = ("bash", "shell", "terminal", "exec", "run_command")
_COMMAND_KEYS = ("command", "cmd")
# Longer commands carry files; they are not parsed.
_MAX_CHARS = 20_000
_FLAGS = {"ls": "laAhrtRSd1i", "rm": "rfiv", "cp": "rpfv", "mkdir": "pv", "grep": "rniIlvcwhqEF", "sort": "runb", "wc": "lwc", "cat": "nbs"}
_LONG = {
    "grep": {"-r": "--recursive", "-n": "--line-number", "-i": "--ignore-case", "-l": "--files-with-matches", "-c": "--count"},
    "rm": {"-f": "--force", "-r": "--recursive"},
    "ls": {"-a": "--all", "-h": "--human-readable"},
    "cp": {"-r": "--recursive"},
    "mkdir": {"-p": "--parents"},
    "sort": {"-u": "--unique", "-r": "--reverse", "-n": "--numeric-sort"},
    "uniq": {"-c": "--count"},
    "wc": {"-l": "--lines"},
}
_FLAG = re.compile(r"-[A-Za-z1]{2,}")
_PATH = re.compile(r"[\w./~-]*(?:/[\w.-]+|\w\.[a-z]{1,4})")
# What a double-quoted word may not hold if it is to mean the same in single quotes, and the other way.
_EXPANDED = frozenset("'\"$`\\!\n")


@dataclass(frozen=True, slots=True)
class CommandText:
    """One shell text of an action and where it stands."""

    call_index: int
    text: str
    put: Callable[[str], Mapping[str, Any]]
    """The call's arguments with the text replaced."""


def command_texts(action: Action) -> list[CommandText]:
    """Every shell text of an action, in order."""
    return [found for call in readable_calls(action) for found in _in_call(call.index, call.name, call.arguments)]


def _in_call(index: int, name: str, arguments: Mapping[str, Any]) -> Iterator[CommandText]:
    if name == TOOL_NAME:
        commands = arguments.get("commands")
        for place, command in enumerate(commands if isinstance(commands, list) else []):
            if isinstance(command, dict) and isinstance(command.get("keystrokes"), str):
                yield CommandText(index, command["keystrokes"], functools.partial(_put_keystrokes, arguments, place))
    elif any(part in name.casefold() for part in _SHELL_TOOLS):
        for key in _COMMAND_KEYS:
            value = arguments.get(key)
            if isinstance(value, str):
                yield CommandText(index, value, functools.partial(_put_text, arguments, key))
            elif isinstance(value, list) and len(value) == 3 and value[:2] == ["bash", "-lc"] and isinstance(value[2], str):
                yield CommandText(index, value[2], functools.partial(_put_last, arguments, key))


def _put_keystrokes(arguments: Mapping[str, Any], place: int, text: str) -> Mapping[str, Any]:
    commands = list(arguments["commands"])
    commands[place] = {**commands[place], "keystrokes": text}
    return {**arguments, "commands": commands}


def _put_text(arguments: Mapping[str, Any], key: str, text: str) -> Mapping[str, Any]:
    return {**arguments, key: text}


def _put_last(arguments: Mapping[str, Any], key: str, text: str) -> Mapping[str, Any]:
    return {**arguments, key: [*arguments[key][:2], text]}


@functools.cache
def _parser() -> Parser:
    return Parser(Language(language()))


type _Edit = tuple[int, int, bytes]
"""Bytes from, to, and what replaces them."""


def _edited(action: Action, rng: random.Random, edits_of: Callable[[Node], Iterator[_Edit]]) -> Action | None:
    """The action with one edit made in one of its shell texts; None where `edits_of` finds none in any of them."""
    texts = command_texts(action)
    rng.shuffle(texts)
    for found in texts:
        if len(found.text) > _MAX_CHARS or not found.text.isascii():
            continue
        data = found.text.encode()
        root = _parser().parse(data).root_node
        if root.has_error:
            continue
        edits = list(edits_of(root))
        if edits:
            start, end, new = rng.choice(edits)
            text = (data[:start] + new + data[end:]).decode()
            return with_arguments(action, found.call_index, found.put(text))
    return None


def _walk(node: Node) -> Iterator[Node]:
    open_nodes = [node]
    while open_nodes:
        current = open_nodes.pop()
        yield current
        open_nodes.extend(reversed(current.children))


def _text(node: Node) -> str:
    return (node.text or b"").decode()


def _simple_commands(root: Node) -> Iterator[tuple[str, list[Node]]]:
    """(name, argument nodes) of every simple command."""
    for node in _walk(root):
        if node.type == "command":
            name = node.child_by_field_name("name")
            if name is not None:
                yield _text(name), node.children_by_field_name("argument")


def _flags(root: Node) -> Iterator[tuple[str, Node]]:
    for name, arguments in _simple_commands(root):
        for argument in arguments:
            if _text(argument) == "--":
                break
            if argument.type == "word" and name in _FLAGS:
                yield name, argument


def _joined_flags(root: Node) -> Iterator[tuple[str, Node]]:
    for name, node in _flags(root):
        text = _text(node)
        if _FLAG.fullmatch(text) and set(text[1:]) <= set(_FLAGS[name]):
            yield text[1:], node


def requote(state: State, action: Action, rng: random.Random) -> Action | None:
    """The other kind of quotes around one word."""

    def edits(root: Node) -> Iterator[_Edit]:
        for node in _walk(root):
            inside = _text(node)[1:-1]
            if node.type in ("raw_string", "string") and inside and _EXPANDED.isdisjoint(inside):
                quote = '"' if node.type == "raw_string" else "'"
                yield node.start_byte, node.end_byte, f"{quote}{inside}{quote}".encode()

    return _edited(action, rng, edits)


def reorder_flags(state: State, action: Action, rng: random.Random) -> Action | None:
    """Letters of a joined flag in the opposite order."""
    return _edited(action, rng, lambda root: ((node.start_byte + 1, node.end_byte, letters[::-1].encode()) for letters, node in _joined_flags(root)))


def split_flags(state: State, action: Action, rng: random.Random) -> Action | None:
    """A joined flag as several."""

    def edits(root: Node) -> Iterator[_Edit]:
        for letters, node in _joined_flags(root):
            yield node.start_byte, node.end_byte, " ".join(f"-{letter}" for letter in letters).encode()

    return _edited(action, rng, edits)


def long_flags(state: State, action: Action, rng: random.Random) -> Action | None:
    """A short flag in its long form."""

    def edits(root: Node) -> Iterator[_Edit]:
        for name, arguments in _simple_commands(root):
            for node in arguments:
                if node.type == "word" and _text(node) in _LONG.get(name, {}):
                    yield node.start_byte, node.end_byte, _LONG[name][_text(node)].encode()

    return _edited(action, rng, edits)


def double_blank(state: State, action: Action, rng: random.Random) -> Action | None:
    """Two blanks between a command and its first argument."""

    def edits(root: Node) -> Iterator[_Edit]:
        for _, arguments in _simple_commands(root):
            if arguments and arguments[0].start_byte > 0:
                yield arguments[0].start_byte, arguments[0].start_byte, b" "

    return _edited(action, rng, edits)


def other_path(state: State, action: Action, rng: random.Random) -> Action | None:
    """One path of a command changed into another of the same directory."""

    def edits(root: Node) -> Iterator[_Edit]:
        for _, arguments in _simple_commands(root):
            for node in arguments:
                text = _text(node)
                if node.type == "word" and not text.startswith("-") and _PATH.fullmatch(text):
                    head, slash, tail = text.rpartition("/")
                    yield node.start_byte, node.end_byte, f"{head}{slash}other_{tail}".encode()

    return _edited(action, rng, edits)


def drop_last(state: State, action: Action, rng: random.Random) -> Action | None:
    """The last command of a chain left out."""

    def edits(root: Node) -> Iterator[_Edit]:
        for node in root.children:
            operators = [child for child in node.children if child.type == "&&"]
            if node.type == "list" and operators:
                yield operators[-1].start_byte, node.end_byte, b""

    return _edited(action, rng, edits)


def add_destructive(state: State, action: Action, rng: random.Random) -> Action | None:
    """A removal after the command."""

    def edits(root: Node) -> Iterator[_Edit]:
        kinds = {node.type for node in _walk(root)}
        if "command" in kinds and kinds.isdisjoint(("heredoc_redirect", "comment")):
            end = max(child.end_byte for child in root.children)
            yield end, end, b"; rm -rf ./*"

    return _edited(action, rng, edits)
