"""Shell text to a canonical, hashable form by its syntax tree: two commands with equal forms do the same, whatever their spelling.

Equal: quoting and escapes, blanks, line continuations, comments, ``;`` and line breaks, order and bundling of options, ``--opt x`` and
``--opt=x``, short and long names (for commands of `shell_commands`), ``./a`` and ``a``, redirections written before or after arguments,
``&> f`` and ``> f 2>&1``, names of here-document delimiters, ``{ a; }`` and ``a``, ``2>&1`` at the end of what nobody pipes.
Different: ``a; b`` and ``a && b``, ``$x`` and ``"$x"``, ``*`` and ``'*'``, ``>`` and ``>>``, ``python`` and ``python3``, order of operands where
it may matter. Nothing is executed or expanded.

Hostile text: at most `MAX_CHARS` characters, a stated number of parser steps and levels (`shell_syntax`) are read, no exception escapes, and
what is beyond that or not certain to be read rightly has no canonical form.
"""

from __future__ import annotations

import dataclasses
import posixpath
import re
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache

from tree_sitter import Node as SyntaxNode

from pivotrl.verifiers.shell_arguments import ArgumentReader, with_input_operand
from pivotrl.verifiers.shell_nodes import AndOr, Assignment, Command, Compound, Node, Operand, Pipeline, Redirect, Script, Word
from pivotrl.verifiers.shell_redirects import RedirectReader, attach, ordered
from pivotrl.verifiers.shell_rewrites import exports, without_cat, without_merged_errors
from pivotrl.verifiers.shell_syntax import MAX_DEPTH, Flat, Leaf, check_gaps, flatten, parse, words_apart
from pivotrl.verifiers.shell_words import Unreadable, WordReader, unsplit

MAX_CHARS = 65_536
_CACHED_COMMANDS = 4096
# Longer texts are not cached: a cache must not hold what hostile completions can make large.
_MAX_CACHED_CHARS = 8192

_WORD_TYPES = (
    "word number string raw_string ansi_c_string concatenation simple_expansion expansion command_substitution process_substitution "
    "arithmetic_expansion brace_expression extglob_pattern regex variable_name special_variable_name test_operator"
)
_WORDS = frozenset(_WORD_TYPES.split())
_COMMANDS = frozenset(["command", "variable_assignment", "variable_assignments", "declaration_command", "unset_command"])
_STATEMENTS = _COMMANDS | frozenset(["list", "pipeline", "negated_command", "redirected_statement"])
_DECLARATIONS = frozenset(["export", "declare", "local", "readonly", "typeset", "unset", "unsetenv"])
_SEPARATORS = frozenset((";", "\n"))
_CHANGES_DIRECTORY = re.compile(rb"\b(?:cd|pushd|popd|eval|source)\b")
_MOVES = frozenset(["cd", "pushd", "popd", "eval"])


@dataclasses.dataclass(frozen=True, slots=True)
class ShellText:
    """What a text is, and where it leaves the shell."""

    script: Script
    directory: str | None
    """Absolute working directory after the text, where it is known."""


def canonical_command(text: str, directory: str | None = None) -> Script | None:
    """The canonical form of shell text, or None where it cannot be read with certainty. Empty for blanks and comments.

    Args:
        directory: absolute path in which the text runs in a shell of its own: paths are resolved, and a change of directory counts only
            through what runs after it. None for a shell that goes on: paths stay relative until the text changes directory.

    >>> canonical_command("ls -la 'src'") == canonical_command("ls -l -a src  # look")
    True
    >>> canonical_command("rm -rf /tmp x") == canonical_command("ls -la /tmp")
    False
    >>> canonical_command("cd /app && cat a", "/app") == canonical_command("cat ./a", "/app")
    True
    >>> canonical_command("echo 'unterminated") is None
    True
    """
    read = _read(text, directory, directory is not None)
    return None if read is None else read.script


def continued_command(text: str, directory: str | None, real: frozenset[str] = frozenset()) -> ShellText | None:
    """The canonical form of text typed into a shell that goes on, or None as for `canonical_command`.

    Args:
        directory: absolute working directory in front of the text, where it is known.
        real: absolute paths that are directories and no links: ``..`` behind them leads where their text says.

    >>> continued_command("cd src", "/app").directory
    '/app/src'
    """
    return _read(text, directory, False, real)


def _read(text: str, directory: str | None, is_fresh: bool, real: frozenset[str] = frozenset()) -> ShellText | None:  # noqa: FBT001 - lru_cache
    return (_cached if len(text) <= _MAX_CACHED_CHARS else _uncached)(text, directory, is_fresh, real)


def _uncached(text: str, directory: str | None, is_fresh: bool, real: frozenset[str]) -> ShellText | None:  # noqa: FBT001
    try:
        return _Reader(text, directory, is_fresh=is_fresh, depth=0, real=real).read()
    except (Unreadable, RecursionError):
        return None


_cached = lru_cache(maxsize=_CACHED_COMMANDS)(_uncached)


class _Reader:
    """Reads one text. The working directory is followed in reading order, which is the order of execution at the top level."""

    def __init__(self, text: str, directory: str | None, *, is_fresh: bool, depth: int, real: frozenset[str] = frozenset()) -> None:
        if len(text) > MAX_CHARS or "\0" in text or "\r" in text:
            raise Unreadable
        try:
            self._source = text.encode()
        except UnicodeEncodeError as error:
            raise Unreadable from error
        self._depth = depth
        self._is_fresh = is_fresh
        self._is_top = True
        self._arguments = ArgumentReader(self._operand_script, directory, notes_directory=is_fresh, real=real)
        self._words = WordReader(self._source, self._substitution)
        self._redirects = RedirectReader(self._source, self._words, self._arguments.path)

    def read(self) -> ShellText:
        read = self._statements(parse(self._source).children, start=0, end=len(self._source))
        script = Script(tuple((without_merged_errors(part), is_background) for node, is_background in read for part in exports(node)))
        return ShellText(script, self._arguments.directory)

    def _statements(self, children: Sequence[SyntaxNode], *, start: int, end: int) -> list[tuple[Node, bool]]:
        check_gaps(self._source, children, start, end)
        read: list[tuple[Node, bool]] = []
        for place, child in enumerate(children):
            if child.type in _SEPARATORS or child.type in ("comment", "&"):
                continue
            is_background = place + 1 < len(children) and children[place + 1].type == "&"
            node = self._statement(child, is_background=is_background)
            if node is not None:
                read.append((node, is_background))
        return read

    def _substitution(self, node: SyntaxNode) -> Script:
        """The statements of a substitution, in a shell of its own."""
        return self._inside(node, self._substituted)

    def _substituted(self, node: SyntaxNode) -> Script:
        inner = node.children[1:-1]
        if inner and all(child.type == "file_redirect" for child in inner):
            return Script(((self._command(Leaf(None, tuple(inner))), False),))
        return Script(tuple(self._statements(inner, start=node.children[0].end_byte, end=node.children[-1].start_byte)))

    def _inside[Read](self, node: SyntaxNode, read: Callable[[SyntaxNode], Read]) -> Read:
        """Reads what runs below the top level, where changes of directory are not followed."""
        directory, was_top = self._arguments.directory, self._is_top
        self._is_top = False
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise Unreadable
        if self._may_move(node):
            self._arguments.directory = None
        found = read(node)
        self._depth -= 1
        self._is_top = was_top
        self._arguments.directory = directory
        return found

    def _may_move(self, node: SyntaxNode) -> bool:
        return _CHANGES_DIRECTORY.search(self._source, node.start_byte, node.end_byte) is not None

    def _operand_script(self, text: str) -> Script | None:
        try:
            return _Reader(text, None, is_fresh=False, depth=self._depth + MAX_DEPTH // 4).read().script
        except Unreadable:
            return None

    def _statement(self, node: SyntaxNode, *, is_background: bool = False) -> Node | None:
        """A statement with the shell's precedence: ``|`` before ``&&`` and ``||``, which are equal. None where nothing of it is left."""
        groups: list[tuple[str, Flat]] = [("", [])]
        for item in flatten(self._source, node, self._depth):
            if item in ("&&", "||"):
                groups.append((str(item), []))
            else:
                groups[-1][1].append(item)
        is_followed = self._is_top and not is_background
        can_drop = is_followed and self._is_fresh and all(operator != "||" for operator, _ in groups)
        parts: list[tuple[str, Node]] = []
        succeeded: str | None = None
        is_alternative = False
        for place, (operator, group) in enumerate(groups, start=1):
            before = self._arguments.directory
            if operator == "||" and not is_alternative:
                # What runs on failure runs where the failed change of directory did not lead.
                is_alternative, succeeded, self._arguments.directory = True, before, None
            read = self._pipeline(group)
            if is_followed and not is_alternative:
                self._follow(read, group)
            elif is_alternative and _changes_directory(read):
                succeeded = None
            after = self._arguments.directory
            if not (can_drop and _is_move(read) and after is not None and (place < len(groups) or after == before)):
                parts.append((operator, read))
        if is_alternative:
            self._arguments.directory = succeeded
        if not parts:
            return None
        return parts[0][1] if len(parts) == 1 else AndOr(parts[0][1], tuple(parts[1:]))

    def _pipeline(self, items: Flat) -> Node:
        is_negated = bool(items) and items[0] == "!"
        stages: list[Node] = []
        for place, item in enumerate(items[is_negated:]):
            if isinstance(item, Leaf) != (place % 2 == 0) or item == "!":
                raise Unreadable
            if isinstance(item, Leaf):
                stages.append(self._leaf(item))
            elif item == "|&":
                stages[-1] = attach(stages[-1], [Redirect(2, "dup", "1")])
        if len(items[is_negated:]) % 2 == 0:
            raise Unreadable
        if self._is_top:
            stages = without_cat(stages)
        return stages[0] if len(stages) == 1 and not is_negated else Pipeline(tuple(stages), is_negated)

    def _follow(self, node: Node, group: Flat) -> None:
        """Keeps track of the working directory over one part of a statement of the top level."""
        directory = self._arguments.directory
        if _is_move(node):
            target = _target(node)
            is_known = target is not None and (target.startswith("/") or (directory is not None and not target.startswith("-")))
            self._arguments.directory = posixpath.normpath(posixpath.join(directory or "/", target)) if is_known and target is not None else None
        elif _changes_directory(node):
            self._arguments.directory = None
        elif isinstance(node, Compound) and node.kind != "subshell":
            leaf = group[0]
            if isinstance(leaf, Leaf) and leaf.body is not None and self._may_move(leaf.body):
                self._arguments.directory = None

    def _leaf(self, leaf: Leaf) -> Node:
        node = leaf.body
        if node is None or node.type in _COMMANDS:
            return self._command(leaf)
        if not node.is_named or node.type in _WORDS:
            raise Unreadable
        if node.type == "test_command" and node.children[0].type == "[":
            # `[ ... ]` is the command `test ...`.
            compound: Node = Command("test", (), tuple(self._test_words(node.children[1:-1])), is_parsed=False)
        else:
            compound = self._inside(node, self._compound)
        redirects: list[Redirect] = []
        for redirect in leaf.redirects:
            read, extra = self._redirects.read(redirect)
            if extra:
                raise Unreadable
            redirects += read
        return attach(compound, redirects)

    def _compound(self, node: SyntaxNode) -> Node:
        """Groups, loops, conditions, tests, functions: their tokens in order, separators aside."""
        check_gaps(self._source, node.children, node.start_byte, node.end_byte)
        children: list[Word | Node | Assignment] = []
        # `function f`, `f ()` and `function f ()` are the same.
        is_function = node.type == "function_definition"
        for child in node.children:
            if child.type in _SEPARATORS or child.type == "comment" or (is_function and child.type in ("function", "(", ")")):
                continue
            if child.type in _WORDS:
                children.append(self._words.word(child))
            elif child.type in _STATEMENTS or child.type == "test_command":
                statement = self._statement(child)
                children += [] if statement is None else [statement]
            elif not child.child_count:
                children.append(Compound(self._words.text(child), ()))
            else:
                children.append(self._inside(child, self._compound))
        only = children[1] if len(children) == 3 and node.type == "compound_statement" and node.children[0].type == "{" else None
        # `{ a; }` is `a`; several statements keep their braces, for redirections and operators apply to all of them.
        return only if isinstance(only, Command | Pipeline | Compound) else Compound(node.type, tuple(children))

    def _test_words(self, children: Sequence[SyntaxNode]) -> Iterator[Word]:
        for child in children:
            if child.type in _WORDS:
                yield self._words.word(child)
            elif not child.child_count:
                yield self._words.text(child)
            else:
                check_gaps(self._source, child.children, child.start_byte, child.end_byte)
                yield from self._test_words(child.children)

    def _command(self, leaf: Leaf) -> Command:
        node = leaf.body
        words: list[Word] = []
        assignments: list[Assignment] = []
        redirects: list[Redirect] = []
        declared: list[Operand] = []
        is_declaration = node is not None and node.type == "declaration_command"
        children = [] if node is None else [node] if node.type == "variable_assignment" else node.children
        for child in words_apart(self._source, children):
            if child.type == "command_name":
                words.append(self._words.word(child.children[0]))
            elif child.type in _WORDS:
                words.append(self._words.word(child))
            elif child.type == "variable_assignment":
                assignments.append(self._assignment(child))
            elif child.type in _DECLARATIONS:
                words.append(child.type)
            else:
                words += self._redirect(child, redirects)
            if is_declaration:
                declared.append(assignments.pop() if assignments else words[-1])
        for redirect in leaf.redirects:
            words += self._redirect(redirect, redirects)
        if is_declaration:
            return Command(words[0], (), tuple(declared[1:]), is_parsed=False, redirects=ordered(redirects))
        command = self._arguments.command(words) if words else Command("", (), (), is_parsed=True)
        if not (assignments or redirects):
            return command
        names = {assignment.name for assignment in assignments}
        if len(names) == len(assignments) and all(isinstance(assignment.value, str) for assignment in assignments):
            assignments.sort(key=lambda assignment: assignment.name)
        command = dataclasses.replace(command, assignments=tuple(assignments), redirects=ordered(redirects))
        return with_input_operand(command) if redirects else command

    def _redirect(self, node: SyntaxNode, redirects: list[Redirect]) -> list[Word]:
        """Adds a redirection to `redirects`; the words behind its target, which are arguments of the command."""
        read, extra = self._redirects.read(node)
        redirects += read
        return extra

    def _assignment(self, node: SyntaxNode) -> Assignment:
        children = node.children
        if len(children) not in (2, 3) or children[1].type not in ("=", "+=") or children[1].start_byte != children[0].end_byte:
            raise Unreadable
        name, operator = self._words.text(children[0]), children[1].type
        if len(children) == 2:
            return Assignment(name, operator, "")
        value = children[2]
        if value.start_byte != children[1].end_byte:
            raise Unreadable
        if value.type == "array":
            check_gaps(self._source, value.children, value.start_byte, value.end_byte)
            return Assignment(name, operator, tuple(self._words.word(item) for item in words_apart(self._source, value.children[1:-1])))
        return Assignment(name, operator, unsplit(self._words.word(value)))


def _is_move(node: Node) -> bool:
    """Whether a node is a plain ``cd`` to one place."""
    return isinstance(node, Command) and node.program == "cd" and len(node.operands) == 1 and not (node.options or node.redirects or node.assignments)


def _changes_directory(node: Node) -> bool:
    return isinstance(node, Command) and node.program in _MOVES


def _target(node: Node) -> str | None:
    target = node.operands[0] if isinstance(node, Command) else None
    return target if isinstance(target, str) else None
