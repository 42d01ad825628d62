"""Calls of coding agents' tools in canonical form: shell text as syntax trees, paths normalised, edits by their effect, code exactly.

Knows the arguments of SWE-agent, SWE-smith, mini-swe-agent, OpenHands and codex by their names; everything else is compared as
`canonical.py` does by the tool's schema. Called by `swe` and `terminal`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pivotrl.config.verifiers import ShellRules
from pivotrl.types import State, ToolCall
from pivotrl.verifiers.argument_schema import RecipeRules, RuleBook
from pivotrl.verifiers.canonical import MAX_PARSED_CHARS, Prose, arguments_tree, difference, read_object
from pivotrl.verifiers.shell_arguments import normal_path
from pivotrl.verifiers.shell_commands import Effect
from pivotrl.verifiers.shell_effects import Statement, Target, effect, in_any_read_order, in_steps, same_path, same_targets, targets
from pivotrl.verifiers.shell_nodes import Script
from pivotrl.verifiers.shell_tree import canonical_command
from pivotrl.verifiers.text_similarity import fold

_SHELL_KEYS = ("command", "cmd", "script")
_PATH_KEYS = frozenset(("path", "file", "filename", "file_name", "file_path", "filepath", "dir", "directory", "workdir", "cwd"))
# Text that is written into files or looked for in them: every character counts.
_EXACT_KEYS = frozenset(
    ("file_text", "content", "contents", "text", "code", "old_str", "new_str", "old_string", "new_string", "search", "replace", "replacement_text")
)
_EDIT_KEYS = (("old_str", "new_str"), ("old_string", "new_string"), ("search", "replace"))
# Names and patterns that say what a call is about, besides paths.
_SYMBOL_KEYS = frozenset(("query", "pattern", "regex", "search_term", "symbol", "name", "url", "message"))
_EDITING = frozenset(("str_replace", "insert", "edit"))
# A shorter text to be replaced is hardly unique in a file, which an edit needs.
_MIN_UNIQUE_CHARS = 8

type Tree = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Exact:
    """Text of which every character counts."""

    text: str


@dataclass(frozen=True, slots=True)
class Edit:
    """Replace the one place where `old` stands by `new`."""

    old: str
    new: str


@dataclass(frozen=True, slots=True)
class CallTarget:
    """What a call is aimed at, whatever it does there."""

    kind: str
    """``view``, ``create``, ``edit`` and so on for editors; empty for other tools."""
    names: tuple[tuple[str, str], ...]
    """(argument, path or symbol), sorted by argument."""
    commands: tuple[Target, ...] | str
    """Targets of shell text, or the text itself where it cannot be read."""


class CodingCalls:
    """Compares calls under one set of rules.

    Args:
        shell: how shell text is read, and which arguments do not count.
    """

    def __init__(self, shell: ShellRules) -> None:
        self._shell = shell
        self._rules = RuleBook(RecipeRules(ignored=frozenset(shell.ignored_arguments)))

    def trees(self, state: State, expert: ToolCall, action: ToolCall) -> tuple[Tree | None, Tree | None]:
        """The canonical trees of both sides' arguments, None where they are not a JSON object.

        Raises:
            TooDeep: for values nested too deeply.
        """
        is_parsed = max(len(expert.arguments), len(action.arguments)) <= MAX_PARSED_CHARS
        return self._tree(state, expert, is_parsed=is_parsed), self._tree(state, action, is_parsed=is_parsed)

    def _tree(self, state: State, call: ToolCall, *, is_parsed: bool) -> Tree | None:
        values = read_object(call.arguments)
        if values is None:
            return None
        rule = self._rules.rule(state, call.name)
        tree = arguments_tree(values, rule, is_parsed=is_parsed)
        shell_key = self._shell_key(call.name, values)
        # A default that was left out is read as the same text written out.
        for key, value in {**rule.defaults, **values}.items():
            if key not in tree:
                continue
            if key == shell_key:
                tree[key] = self._command_form(value, values)
            elif key in _PATH_KEYS and isinstance(value, str):
                tree[key] = Exact(normal_path(value, self._shell.working_directory))
            elif key in _EXACT_KEYS and isinstance(value, str):
                tree[key] = Exact(value)
        for old_key, new_key in _EDIT_KEYS:
            old, new = tree.get(old_key), tree.get(new_key, Exact(""))
            if isinstance(old, Exact) and isinstance(new, Exact):
                tree[old_key] = Edit(old.text, new.text)
                tree.pop(new_key, None)
        return tree

    def difference(self, expert: Tree, action: Tree) -> tuple[str, str] | None:
        """The first difference in a stable order, (reason, argument), or None."""
        for key, old in expert.items():
            new = action.get(key)
            if isinstance(old, Edit) and isinstance(new, Edit) and old != new and same_edit(old, new):
                action = {**action, key: old}
        found = difference(expert, action, _same_prose)
        if found is not None and found[0] == "wrong argument value" and _does_more_harm(expert[found[1]], action[found[1]]):
            return "destructive command", found[1]
        return found

    def target(self, call: ToolCall) -> CallTarget | None:
        """What a call is aimed at, or None where its arguments are not a JSON object."""
        arguments = call.arguments_object()
        if arguments is None:
            if call.arguments.strip():
                return None
            arguments = {}
        shell_key = self._shell_key(call.name, arguments)
        commands: tuple[Target, ...] | str = ()
        if shell_key is not None:
            text = _shell_text(arguments[shell_key])
            script = None if text is None or _is_typed(arguments) else canonical_command(text, self._shell.working_directory)
            commands = targets(script) if script is not None else str(arguments[shell_key])
        names = {key: normal_path(value) for key, value in arguments.items() if key in _PATH_KEYS and isinstance(value, str)}
        names |= {key: value for key, value in arguments.items() if key in _SYMBOL_KEYS and isinstance(value, str)}
        kind = arguments.get("command") if shell_key is None else ""
        kind = kind if isinstance(kind, str) else ""
        return CallTarget("edit" if kind in _EDITING else kind, tuple(sorted(names.items())), commands)

    def _shell_key(self, name: str, arguments: Mapping[str, Any]) -> str | None:
        if name not in self._shell.tools:
            return None
        return next((key for key in _SHELL_KEYS if key in arguments), None)

    def _command_form(self, value: Any, arguments: Mapping[str, Any]) -> object:
        text = _shell_text(value)
        if text is None:
            return Exact(repr(value))
        script = None if _is_typed(arguments) else canonical_command(text, self._shell.working_directory)
        return Exact(text) if script is None else Script(rewritten(script.statements, self._shell))


def _same_prose(first: Prose, second: Prose) -> bool:
    return fold(first.text) == fold(second.text)


def rewritten(statements: tuple[Statement, ...], shell: ShellRules) -> tuple[Statement, ...]:
    """Statements in the form in which the recipe compares them."""
    if shell.chains == "steps":
        statements = in_steps(statements)
    return in_any_read_order(statements) if shell.read_order == "any" else statements


def same_target(expert: CallTarget, action: CallTarget) -> bool:
    """Whether two calls are aimed at the same files, commands and symbols; relative and absolute spellings of a path match."""
    if expert.kind != action.kind or len(expert.names) != len(action.names):
        return False
    if not all(a == b and same_path(first, second) for (a, first), (b, second) in zip(expert.names, action.names, strict=True)):
        return False
    if isinstance(expert.commands, str) or isinstance(action.commands, str):
        return expert.commands == action.commands
    return same_targets(expert.commands, action.commands)


def same_edit(first: Edit, second: Edit) -> bool:
    """Whether two edits of one file do the same: equal, or one is the other with the same context around both of its texts.

    An edit replaces a text that stands in the file once. Where the longer text holds the shorter one once, and differs from its own replacement only
    there, both change the same characters.

    >>> same_edit(Edit("if low < x:", "if low <= x:"), Edit("    if low < x:\\n        y", "    if low <= x:\\n        y"))
    True
    >>> same_edit(Edit("if low < x:", "if low <= x:"), Edit("    if low < x:\\n        y", "    if low <= x:\\n        z"))
    False
    """
    if first == second:
        return True
    shorter, longer = (first, second) if len(first.old) <= len(second.old) else (second, first)
    if len(shorter.old.strip()) < _MIN_UNIQUE_CHARS or longer.old.count(shorter.old) != 1:
        return False
    before, _, after = longer.old.partition(shorter.old)
    return longer.new == before + shorter.new + after


def _shell_text(value: Any) -> str | None:
    """Shell text of an argument: a string, an argument vector ``["bash", "-lc", text]``, or another vector with each of its words quoted."""
    if isinstance(value, str):
        return value
    if isinstance(value, list) and len(value) == 3 and value[0] in ("bash", "sh", "zsh") and value[1] in ("-c", "-lc") and isinstance(value[2], str):
        return value[2]
    if isinstance(value, list) and value and all(isinstance(word, str) for word in value):
        words: list[str] = value
        return " ".join("'" + word.replace("'", "'\\''") + "'" for word in words)
    return None


def _is_typed(arguments: Mapping[str, Any]) -> bool:
    """Whether the text goes to a running program instead of the shell."""
    return arguments.get("is_input") in (True, "true", "True")


def _does_more_harm(expert: Any, action: Any) -> bool:
    return isinstance(action, Script) and effect(action) is Effect.DESTROYS and not (isinstance(expert, Script) and effect(expert) is Effect.DESTROYS)
