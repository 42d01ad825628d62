"""The canonical form of SQL statements: the tree of sqlglot's parser as nested tuples, without what does not change the result.

Not part of it: spelling of keywords and unquoted names, brackets (the tree is the grouping), comments, the final semicolon, INNER, ASC, AS, the
order of the operands of AND, OR, = and <>, the order of an IN list, and the side from which an inequality is read. Column order, join order
and literals are. Nothing is executed.
"""

from __future__ import annotations

import re
from collections.abc import Hashable
from functools import lru_cache
from typing import Any

import sqlglot
from sqlglot.errors import SqlglotError

_MAX_CHARS = 2000
# sqlglot tries several readings of an opening bracket, and its recursion depth is Python's.
_MAX_NESTING_MARKS = 40
_MAX_OPERATORS = 200
_CACHED_STATEMENTS = 8192
_NESTING = re.compile(r"[(\[{]|\bcase\b|\bnot\b|[-+~]{2}", re.IGNORECASE)
_OPERATOR = re.compile(r"[-+*/%|.]")
_LOOKS_LIKE_SQL = re.compile(r"\s*(?:select|insert|update|delete|drop|create|alter|truncate|with|merge|replace)\s", re.IGNORECASE)
_MIRRORED = {"GT": "LT", "GTE": "LTE"}
_SYMMETRIC = frozenset({"EQ", "NEQ", "NullSafeEQ"})


def looks_like_sql(text: str) -> bool:
    """Whether a text begins as a statement does; for arguments named `query`, which hold SQL or words."""
    return _LOOKS_LIKE_SQL.match(text) is not None


@lru_cache(maxsize=_CACHED_STATEMENTS)
def sql_form(text: str) -> Hashable | None:
    """The form of one or more statements, or None where sqlglot cannot read them or they are beyond the bounds."""
    if len(text) > _MAX_CHARS or len(_NESTING.findall(text)) > _MAX_NESTING_MARKS or len(_OPERATOR.findall(text)) > _MAX_OPERATORS:
        return None
    try:
        statements = [tree for tree in sqlglot.parse(text) if tree is not None]
        return ("sql", *(_form(tree) for tree in statements)) if statements else None
    except (SqlglotError, RecursionError, ValueError, TypeError, AttributeError):
        # The last two are bugs of the parser on broken statements; the text is hostile, so they are answers like the others.
        return None


def _form(node: Any) -> Hashable:
    if isinstance(node, list):
        return tuple(_form(item) for item in node)
    name, parts = type(node).__name__, getattr(node, "args", None)
    if parts is None:
        return node if isinstance(node, Hashable) else repr(node)
    match name:
        case "Paren":
            return _form(parts["this"])
        case "Identifier":
            return parts["this"] if parts.get("quoted") else parts["this"].lower()
        case "And" | "Or":
            return name, tuple(sorted((_form(operand) for operand in _operands(node, name)), key=repr))
        case "GT" | "GTE":
            return _MIRRORED[name], _form(parts["expression"]), _form(parts["this"])
        case "LT" | "LTE":
            return name, _form(parts["this"]), _form(parts["expression"])
        case "In" if parts.get("expressions"):
            return name, _form(parts["this"]), tuple(sorted((_form(item) for item in parts["expressions"]), key=repr))
        case _ if name in _SYMMETRIC:
            return name, tuple(sorted((_form(parts["this"]), _form(parts["expression"])), key=repr))
        case _:
            # Absent, empty and false parts are spelled in several ways; INNER is a join's default.
            stated = (
                (key, value) for key, value in parts.items() if value not in (None, False, "", []) and not (name == "Join" and value == "INNER")
            )
            return (name, *sorted((key, _form(value)) for key, value in stated))


def _operands(node: Any, name: str) -> list[Any]:
    while type(node).__name__ == "Paren":
        node = node.this
    if type(node).__name__ != name:
        return [node]
    return _operands(node.this, name) + _operands(node.expression, name)
