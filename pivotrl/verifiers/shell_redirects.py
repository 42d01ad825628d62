"""Redirections of a command from its syntax tree, here-documents included. Called by `shell_tree`.

POSIX.1-2024, Shell Command Language 2.7, and bash's ``&>`` and ``<<<``.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Sequence

from tree_sitter import Node as SyntaxNode

from pivotrl.verifiers.shell_nodes import Command, Compound, Node, Redirect, Word
from pivotrl.verifiers.shell_words import Unreadable, WordReader

_BARE_DESCRIPTOR = re.compile(rb"(?:^|[\s;&|()])[0-9]+$")
_OPENS = {"<": 0, ">": 1, ">>": 1, ">|": 1, "<>": 0}
MERGED_ERRORS = Redirect(2, "dup", "1")
"""``2>&1``."""


class RedirectReader:
    """Reads the redirections of one source text.

    Args:
        path: brings a file name to its canonical form.
    """

    def __init__(self, source: bytes, words: WordReader, path: Callable[[Word], Word]) -> None:
        self._source, self._words, self._path = source, words, path

    def read(self, node: SyntaxNode) -> tuple[list[Redirect], list[Word]]:
        """The redirections that a node is, and the words behind its target, which are arguments of the command.

        Raises:
            Unreadable: for anything else.
        """
        if _BARE_DESCRIPTOR.search(self._source, max(0, node.start_byte - 8), node.start_byte):
            # The grammar takes the number of `0<f` for an argument.
            raise Unreadable
        match node.type:
            case "file_redirect":
                return self._file(node)
            case "herestring_redirect" if node.child_count == 2:
                return [Redirect(0, "<<<", self._words.word(node.children[1]))], []
            case "heredoc_redirect":
                return [self._heredoc(node)], []
            case _:
                raise Unreadable

    def _file(self, node: SyntaxNode) -> tuple[list[Redirect], list[Word]]:
        descriptor: int | None = None
        operator = ""
        destinations: list[Word] = []
        for child in node.children:
            if child.type == "file_descriptor":
                text = self._words.text(child)
                if not text.isdigit() or len(text) > 3:
                    raise Unreadable
                descriptor = int(text)
            elif not operator and not child.is_named:
                operator = child.type
            else:
                destinations.append(self._words.word(child))
        if operator in ("<&-", ">&-"):
            return [Redirect(_given(descriptor, int(operator == ">&-")), "close", "")], destinations
        if not destinations:
            raise Unreadable
        return self._to(descriptor, operator, destinations[0]), destinations[1:]

    def _to(self, descriptor: int | None, operator: str, target: Word) -> list[Redirect]:
        is_number = isinstance(target, str) and target.isdigit()
        match operator:
            case "<" | ">" | ">>" | ">|" | "<>":
                return [Redirect(_given(descriptor, _OPENS[operator]), operator, self._path(target))]
            case ">&" | "<&" if is_number:
                return [Redirect(_given(descriptor, int(operator == ">&")), "dup", target)]
            case ">&" | "&>" if descriptor in (None, 1):
                return [Redirect(1, ">", self._path(target)), MERGED_ERRORS]
            case "&>>" if descriptor is None:
                return [Redirect(1, ">>", self._path(target)), MERGED_ERRORS]
            case _:
                raise Unreadable

    def _heredoc(self, node: SyntaxNode) -> Redirect:
        parts = {child.type: child for child in node.children}
        if not {"heredoc_start", "heredoc_body", "heredoc_end"} <= parts.keys():
            raise Unreadable
        on_the_line = [child for child in node.children if child.type not in ("heredoc_body", "heredoc_end")]
        if b"\n" in self._source[node.start_byte : on_the_line[-1].end_byte]:
            # Where an operator ends the line, the grammar takes the document's first line for what follows it.
            raise Unreadable
        line_end = self._source.find(b"\n", on_the_line[-1].end_byte)
        end = parts["heredoc_end"].start_byte
        if line_end == -1 or line_end >= end:
            raise Unreadable
        body = self._source[line_end + 1 : end].decode()
        mark = self._words.text(parts["heredoc_start"])
        delimiter = self._words.text(parts["heredoc_end"])
        if "<<-" in parts:
            body = "\n".join(line.lstrip("\t") for line in body.split("\n"))
        lines = body.split("\n")
        after = self._source[parts["heredoc_end"].end_byte : parts["heredoc_end"].end_byte + 1]
        # The end mark must stand alone on its line and be the first such line.
        if lines[-1] or delimiter in lines[:-1] or after not in (b"", b"\n"):
            raise Unreadable
        bare = mark.replace("'", "").replace('"', "").replace("\\", "")
        if bare != delimiter:
            raise Unreadable
        is_expanded = mark == delimiter and any(character in body for character in "$`\\")
        return Redirect(_descriptor_before(node), "heredoc$" if is_expanded else "heredoc", body)


def _given(descriptor: int | None, usual: int) -> int:
    return usual if descriptor is None else descriptor


def _descriptor_before(node: SyntaxNode) -> int:
    first = node.children[0]
    if first.type == "file_descriptor":
        raise Unreadable
    return 0


def ordered(redirects: Sequence[Redirect]) -> tuple[Redirect, ...]:
    """Redirections by descriptor where they are independent: no duplication, no descriptor and no file twice."""
    descriptors = {redirect.descriptor for redirect in redirects}
    targets = {redirect.target for redirect in redirects}
    if len(descriptors) < len(redirects) or len(targets) < len(redirects) or any(redirect.operator == "dup" for redirect in redirects):
        return tuple(redirects)
    return tuple(sorted(redirects, key=lambda redirect: redirect.descriptor))


def attach(node: Node, redirects: Sequence[Redirect]) -> Node:
    """`node` with redirections after its own.

    Raises:
        Unreadable: where it can have none.
    """
    if not redirects:
        return node
    if isinstance(node, Command | Compound):
        return dataclasses.replace(node, redirects=ordered([*node.redirects, *redirects]))
    raise Unreadable
