"""Syntax trees of shell text: parsed within stated bounds, checked for characters that the grammar skips, statements taken apart.

Everything here works on tree-sitter-bash's concrete tree; `shell_tree` gives it meaning.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import tree_sitter_bash
from tree_sitter import Language, Parser
from tree_sitter import Node as SyntaxNode

from pivotrl.verifiers.shell_words import Unreadable

# The parser reports after every hundred operations. Recovery from errors takes quadratic time, so text is given up early: real commands of
# agents stay below 13 reports, and below 5 ms of CPU time, so the time bound never decides about a command that anyone means.
_MAX_STEPS = 16
_MAX_CPU_S = 0.2
MAX_DEPTH = 40

_NOT_ASCII = re.compile(rb"[\x80-\xff]")

_LANGUAGE = Language(tree_sitter_bash.language())
OPERATORS = frozenset(("&&", "||", "|", "|&", "!"))
_BLANK = frozenset(b" \t\n")

type Flat = list[Leaf | str]


@dataclass(frozen=True, slots=True)
class Leaf:
    """A command of a flattened statement: its syntax, and that of the redirections written around it."""

    body: SyntaxNode | None
    redirects: tuple[SyntaxNode, ...] = ()


def parse(source: bytes) -> SyntaxNode:
    """The root of the syntax tree.

    Raises:
        Unreadable: for syntax errors, and for text that takes too many steps.
    """
    # The grammar's scanner passes code points to C's isalpha(), which reads outside its table for those beyond Latin-1 and can crash the
    # process. To the shell they are letters of a word like any other, so letters stand in for their bytes; places stay the same.
    ascii_source = _NOT_ASCII.sub(b"x", source)
    num_steps = 0
    started_s = time.thread_time()

    def is_over(_offset: int, has_error: bool) -> bool:  # noqa: FBT001 - the parser's signature
        nonlocal num_steps
        num_steps += 1
        return has_error or num_steps > _MAX_STEPS or time.thread_time() - started_s > _MAX_CPU_S

    try:
        tree = Parser(_LANGUAGE).parse(lambda offset, _point: ascii_source[offset:], progress_callback=is_over)
    except ValueError as error:
        raise Unreadable from error
    if tree is None or tree.root_node.has_error or tree.root_node.type != "program":
        raise Unreadable
    return tree.root_node


def check_gaps(source: bytes, children: Sequence[SyntaxNode], start: int, end: int) -> None:
    """Between tokens stand only blanks and continued lines.

    Raises:
        Unreadable: for anything else: the grammar skips characters that bash does not, such as an escaped blank.
    """
    place = start
    for child in children:
        _check_gap(source[place : child.start_byte])
        place = child.end_byte
    _check_gap(source[place:end])


def words_apart(source: bytes, children: Sequence[SyntaxNode]) -> Iterator[SyntaxNode]:
    """The children of a command, each checked to be a word of its own.

    Raises:
        Unreadable: where two touch, or only a continued line is between them: bash reads one word there.
    """
    place: int | None = None
    for child in children:
        if place is not None:
            gap = source[place : child.start_byte]
            _check_gap(gap)
            if not gap.replace(b"\\\n", b""):
                raise Unreadable
        place = child.end_byte
        yield child


def _check_gap(gap: bytes) -> None:
    if gap and not _BLANK.issuperset(gap) and gap.replace(b"\\\n", b" ").strip(b" \t\n"):
        raise Unreadable


def flatten(source: bytes, node: SyntaxNode, depth: int) -> Flat:
    """A statement as commands and operators in the order of the text.

    The grammar nests ``a && b > f | c`` as a pipe of a list, which is wrong; the order is right, so lists are taken apart here and
    joined again with the shell's precedence by the caller.

    Raises:
        Unreadable: below `MAX_DEPTH`.
    """
    if depth > MAX_DEPTH:
        raise Unreadable
    match node.type:
        case "list" | "pipeline" | "negated_command":
            check_gaps(source, node.children, node.start_byte, node.end_byte)
            flat: Flat = []
            for child in node.children:
                if child.type in OPERATORS:
                    flat.append(child.type)
                elif child.type != "comment":
                    flat += flatten(source, child, depth + 1)
            return flat
        case "redirected_statement":
            return _flatten_redirected(source, node, depth)
        case _:
            return [Leaf(node)]


def _flatten_redirected(source: bytes, node: SyntaxNode, depth: int) -> Flat:
    body = node.child_by_field_name("body")
    flat: Flat = [Leaf(None)] if body is None else flatten(source, body, depth + 1)
    after: Flat = []
    found: list[SyntaxNode] = []
    for child in node.children:
        if child == body or child.type == "comment":
            continue
        found.append(child)
        if child.type != "heredoc_redirect":
            continue
        # The rest of the line on which the here-document is announced.
        for part in child.children:
            if part.type in ("file_redirect", "herestring_redirect"):
                found.append(part)
            elif part.type in OPERATORS:
                after.append(part.type)
            elif part.is_named and not part.type.startswith(("heredoc", "file_descriptor", "comment")):
                after += flatten(source, part, depth + 1)
    last = flat[-1]
    if isinstance(last, str):
        raise Unreadable
    flat[-1] = Leaf(last.body, (*last.redirects, *found))
    return flat + after
