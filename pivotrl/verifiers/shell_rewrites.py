"""Statements that are other statements written longer. Called by `shell_tree` for what runs at the top level, where nothing captures the output."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from pivotrl.verifiers.shell_arguments import reading_file
from pivotrl.verifiers.shell_nodes import AndOr, Assignment, Command, Compound, Expanded, Node, Pipeline, Word
from pivotrl.verifiers.shell_redirects import MERGED_ERRORS


def without_merged_errors(node: Node) -> Node:
    """`node` without ``2>&1`` where both streams go to the terminal already: its only redirection, and nothing reads the output."""
    match node:
        case Command(redirects=(redirect,)) | Compound(redirects=(redirect,)) if redirect == MERGED_ERRORS:
            return dataclasses.replace(node, redirects=())
        case Pipeline():
            return dataclasses.replace(node, stages=(*node.stages[:-1], without_merged_errors(node.stages[-1])))
        case AndOr():
            return AndOr(without_merged_errors(node.first), tuple((operator, without_merged_errors(part)) for operator, part in node.rest))
        case _:
            return node


def exports(node: Node) -> Sequence[Node]:
    """``export A=1 B=2`` as one statement per variable."""
    if not isinstance(node, Command) or node.program != "export" or node.redirects:
        return [node]
    if len(node.operands) < 2 or not all(isinstance(operand, Assignment) for operand in node.operands):
        return [node]
    return [dataclasses.replace(node, operands=(operand,)) for operand in node.operands]


def without_cat(stages: list[Node]) -> list[Node]:
    """``cat f | grep x`` as ``grep x f``, for filters, where nothing captures the output."""
    while len(stages) > 1:
        first, second = stages[:2]
        is_cat = isinstance(first, Command) and first.program == "cat" and len(first.operands) == 1 and first.operands != ("-",)
        if not is_cat or not isinstance(first, Command) or first.options or first.redirects or first.assignments or not isinstance(second, Command):
            break
        file = first.operands[0]
        read = reading_file(second, file) if isinstance(file, str | Expanded) and not _may_be_several(file) else None
        if read is None:
            break
        stages = [read, *stages[2:]]
    return stages


def _may_be_several(word: Word) -> bool:
    return isinstance(word, Expanded) and any(not isinstance(part, str) and getattr(part, "kind", "") != "tilde" for part in word.parts)
