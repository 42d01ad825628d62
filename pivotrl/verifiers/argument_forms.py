"""Canonical forms of strings by kind, each by a parser of its language. Nothing is evaluated, compiled or opened.

A form is a hashable value: equal forms mean the same. None means that the parser refuses the text or that it is longer than the bound; the text
is then compared exactly. The bounds keep a verdict below its time bound: parsers of hostile text can be slow.
"""

from __future__ import annotations

import ast
import posixpath
import re
import unicodedata
import warnings
from collections.abc import Callable, Hashable
from datetime import date, datetime, time
from functools import lru_cache
from pathlib import PureWindowsPath
from typing import Any
from urllib.parse import parse_qsl, quote, unquote, urlencode, urlsplit
from uuid import UUID

from pivotrl.verifiers.argument_kinds import Kind
from pivotrl.verifiers.shell_tree import canonical_command
from pivotrl.verifiers.sql_form import sql_form

_MAX_CHARS = {Kind.PATH: 4096, Kind.URL: 8192, Kind.PAGE: 8192, Kind.SQL: 2000, Kind.REGEX: 500, Kind.EXPRESSION: 200, Kind.SHELL: 4000}
_MAX_SHORT_CHARS = 64
_CACHED_FORMS = 8192

_WINDOWS_PATH = re.compile(r"[A-Za-z]:[\\/]|\\\\")
_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*:(?://|[^\d])")
_HOST = re.compile(r"[A-Za-z0-9-]+(?:\.[A-Za-z0-9-]+)+(?::\d+)?(?:[/?#]|$)")
_DEFAULT_PORTS = {"http": 80, "https": 443, "ftp": 21, "ws": 80, "wss": 443}
# Of the characters that a path may hold unescaped (RFC 3986, pchar), and those whose escape means something else.
_PATH_SAFE = "/:@!$&'()*+,;=-._~%"


def canonical_form(kind: Kind, text: str) -> Hashable | None:
    """The form of a stripped text, or None where it has none.

    >>> canonical_form(Kind.PATH, "./src//main.py") == canonical_form(Kind.PATH, "src/main.py")
    True
    >>> canonical_form(Kind.DATE, "2024-05-01T10:00:00Z") == canonical_form(Kind.DATE, "2024-05-01 12:00+02:00")
    True
    >>> canonical_form(Kind.SQL, "select a from t where b=1") == canonical_form(Kind.SQL, "SELECT a FROM t WHERE (1 = b);")
    True
    """
    parse = _PARSERS.get(kind)
    if parse is None or not text or len(text) > _MAX_CHARS.get(kind, _MAX_SHORT_CHARS):
        return None
    return parse(text)


def _path(text: str) -> Hashable | None:
    if "\0" in text or "\n" in text:
        return None
    if _WINDOWS_PATH.match(text):
        return "windows", str(PureWindowsPath(text)).casefold()
    # normpath keeps exactly two leading slashes apart, as POSIX allows; no file system in use does.
    return "path", posixpath.normpath(re.sub(r"^/+", "/", text))


def _url(text: str) -> Hashable | None:
    if any(character.isspace() for character in text):
        return None
    if not _SCHEME.match(text):
        if not _HOST.match(text):
            return None
        text = f"http://{text}"
    try:
        parts = urlsplit(text)
        port = parts.port
    except ValueError:
        return None
    if not parts.netloc:
        return None
    scheme, host = parts.scheme.lower(), (parts.hostname or "").rstrip(".")
    user, at, _ = parts.netloc.rpartition("@")
    path = _without_dots(quote(unquote(parts.path.replace("%2F", "%252F").replace("%2f", "%252F")), safe=_PATH_SAFE))
    query = urlencode(sorted(parse_qsl(parts.query, keep_blank_values=True), key=lambda pair: pair[0]))
    return "url", scheme, f"{user}{at}{host}", None if port == _DEFAULT_PORTS.get(scheme) else port, path, query, parts.fragment


def _without_dots(path: str) -> str:
    """A URL's path with `.` and `..` resolved (RFC 3986, 5.2.4); unlike a file's, its final slash and double slashes stay."""
    kept: list[str] = []
    for part in path.split("/")[1:]:
        if part == "..":
            kept = kept[:-1]
        elif part != ".":
            kept.append(part)
    if path.endswith(("/.", "/..")):
        kept.append("")
    return "/" + "/".join(kept)


def _page(text: str) -> Hashable | None:
    form = _url(text)
    if not isinstance(form, tuple) or form[1] not in ("http", "https"):
        return form
    _, _, host, port, path, query, _ = form
    return "page", host.removeprefix("www."), port, path.rstrip("/"), query


def _date(text: str) -> Hashable | None:
    """ISO 8601. Times with a zone are compared as instants; those without one never equal them."""
    is_day = "-" in text[1:] or (len(text) == 8 and text.isdigit())
    for read, is_possible in ((date.fromisoformat, is_day), (datetime.fromisoformat, is_day), (time.fromisoformat, ":" in text)):
        if is_possible:
            try:
                return read.__qualname__, read(text)
            except ValueError:
                continue
    return None


def _uuid(text: str) -> Hashable | None:
    try:
        return "uuid", UUID(text).int
    except ValueError:
        return None


def _email(text: str) -> Hashable:
    return "email", unicodedata.normalize("NFC", text.casefold())


def _shell(text: str) -> Hashable | None:
    script = canonical_command(text)
    return None if script is None else ("shell", script)


@lru_cache(maxsize=_CACHED_FORMS)
def _regex(text: str) -> Hashable | None:
    """The tree of Python's own parser; the pattern is never compiled or run."""
    parser: Any = re._parser  # pyright: ignore[reportAttributeAccessIssue] - the standard library has no public door to its parser
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            tree = parser.parse(text)
            return "regex", repr(tree.data), tree.state.flags, tuple(sorted(tree.state.groupdict.items()))
        except (re.error, RecursionError, OverflowError, ValueError):
            return None


@lru_cache(maxsize=_CACHED_FORMS)
def _expression(text: str) -> Hashable | None:
    try:
        return "expression", _expression_form(ast.parse(text.replace("^", "**"), mode="eval").body)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def _expression_form(node: ast.expr) -> str:
    match node:
        case ast.BinOp(op=ast.Add() | ast.Mult()):
            sign = "+" if isinstance(node.op, ast.Add) else "*"
            return f"({f' {sign} '.join(sorted(_operands(node, type(node.op))))})"
        case ast.BinOp():
            return f"({_expression_form(node.left)} {type(node.op).__name__} {_expression_form(node.right)})"
        case ast.UnaryOp():
            return f"({type(node.op).__name__} {_expression_form(node.operand)})"
        case ast.Constant(value=int() | float()) if not isinstance(node.value, bool):
            value = node.value
            return str(int(value)) if isinstance(value, float) and value.is_integer() else str(value)
        case _:
            return ast.dump(node)


def _operands(node: ast.expr, operator: type[ast.operator]) -> list[str]:
    if isinstance(node, ast.BinOp) and isinstance(node.op, operator):
        return _operands(node.left, operator) + _operands(node.right, operator)
    return [_expression_form(node)]


_PARSERS: dict[Kind, Callable[[str], Hashable | None]] = {
    Kind.PATH: _path,
    Kind.URL: _url,
    Kind.PAGE: _page,
    Kind.DATE: _date,
    Kind.UUID: _uuid,
    Kind.EMAIL: _email,
    Kind.SQL: sql_form,
    Kind.SHELL: _shell,
    Kind.REGEX: _regex,
    Kind.EXPRESSION: _expression,
}
