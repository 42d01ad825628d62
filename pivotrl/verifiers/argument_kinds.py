"""What kind of thing a string argument holds, and so how two spellings of it are compared.

Decided in this order: the recipe (`verifier.kinds`), the schema (`format`, `contentMediaType`), the argument's name (`_NAME_HINTS`: the last words of
the name, split at case and underscores). What none of them decides is `PLAIN`, which is strict.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from enum import StrEnum
from functools import lru_cache
from typing import Any


class Kind(StrEnum):
    """How a string is compared."""

    PLAIN = "plain"
    """Undecided: JSON objects and lists by value, words and prose without case and with single spaces, everything else exactly."""
    EXACT = "exact"
    """As written, outer space apart: ids, keys, names of users and branches, patterns."""
    CODE = "code"
    """As written: file contents, patches, source. Only line ends and space at the very end are forgiven."""
    TEXT = "text"
    """Prose for a person: words may be put another way, up to the recipe's threshold (`text_similarity.py`)."""
    QUERY = "query"
    """Search words: a text whose order does not count, or SQL where it begins as SQL does."""
    PATH = "path"
    URL = "url"
    PAGE = "page"
    """The page behind a URL: without scheme, leading www, fragment and final slash."""
    EMAIL = "email"
    DATE = "date"
    JSON = "json"
    SQL = "sql"
    REGEX = "regex"
    SHELL = "shell"
    EXPRESSION = "expression"
    """Arithmetic: spaces, outer brackets and the order of sums and products do not count."""
    UUID = "uuid"


_FORMATS = {
    "uri": Kind.URL,
    "url": Kind.URL,
    "iri": Kind.URL,
    "uri-reference": Kind.URL,
    "date": Kind.DATE,
    "date-time": Kind.DATE,
    "time": Kind.DATE,
    "email": Kind.EMAIL,
    "idn-email": Kind.EMAIL,
    "uuid": Kind.UUID,
    "regex": Kind.REGEX,
    "path": Kind.PATH,
    "file-path": Kind.PATH,
    "directory-path": Kind.PATH,
}

_NAME_HINTS: dict[Kind, tuple[str, ...]] = {
    Kind.EXACT: (
        *(
            "id",
            "ids",
            "uuid",
            "key",
            "keys",
            "token",
            "password",
            "secret",
            "hash",
            "sha",
            "checksum",
            "signature",
            "username",
            "user name",
            "login",
        ),
        *("user name", "branch", "tag", "symbol name", "function name", "class name", "variable name", "codename", "iban", "coupon", "promo code"),
    ),
    Kind.CODE: (
        *("file text", "file content", "file contents", "old str", "new str", "old string", "new string", "code", "source code", "script", "patch"),
        *("diff", "snippet", "html", "css", "yaml", "toml", "xml", "replacement text", "insert text", "stdin"),
    ),
    Kind.TEXT: (
        *("text", "message", "body", "note", "notes", "description", "summary", "reason", "subject", "title", "comment", "comments", "content"),
        *("caption", "details", "explanation", "feedback", "goal", "thought", "thoughts", "prompt", "instruction", "instructions", "question"),
        *("answer", "remarks", "request", "task", "plan", "analysis", "memo", "announcement"),
    ),
    Kind.QUERY: ("query", "queries", "search term", "search terms", "keywords", "search text", "statement"),
    Kind.PATH: (
        *("path", "paths", "file", "files", "filename", "file name", "filepath", "dir", "dirs", "directory", "folder", "workdir", "cwd", "root"),
        *("working dir", "pathname", "glob"),
    ),
    Kind.URL: ("url", "urls", "uri", "link", "href", "website", "webpage", "endpoint", "webhook"),
    Kind.EMAIL: ("email", "emails", "mail", "email address", "mail address"),
    Kind.DATE: ("date", "day", "datetime", "timestamp", "time", "dob", "birthday", "birthdate", "deadline", "created at", "updated at", "due"),
    Kind.SQL: ("sql", "sql query", "sql statement"),
    Kind.REGEX: ("regex", "regexp", "re pattern", "regular expression"),
    Kind.SHELL: ("command", "commands", "cmd", "shell command", "bash command", "shell", "bash", "command line"),
    Kind.JSON: ("json", "payload json", "json body", "json data"),
    Kind.EXPRESSION: ("expression", "formula", "equation"),
}
_KIND_BY_NAME = {name: kind for kind, names in _NAME_HINTS.items() for name in names}
# In these tools `content` and `text` are what goes into a file, where every character counts.
_FILE_TOOL_WORDS = frozenset({"file", "files", "write", "edit", "insert", "append", "editor", "replace", "patch"})
_AMBIGUOUS_IN_FILE_TOOLS = frozenset({"content", "contents", "text", "body"})
_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+")
_MAX_NAME_CHARS = 100
_CACHED_NAMES = 16_384


def kind_by_schema(schema: Mapping[str, Any]) -> Kind | None:
    """The kind that a schema states; a format that is not known here is exact, no format is no statement."""
    declared = schema.get("format")
    if isinstance(declared, str):
        return _FORMATS.get(declared, Kind.EXACT)
    media_type = schema.get("contentMediaType")
    return Kind.JSON if isinstance(media_type, str) and media_type.endswith("json") else None


@lru_cache(maxsize=_CACHED_NAMES)
def kind_by_name(name: str, tool: str) -> Kind:
    """The kind that an argument's name hints at: its last two words, else its last one.

    >>> kind_by_name("sourceUrl", "fetch"), kind_by_name("order_id", "cancel"), kind_by_name("colour", "paint")
    (<Kind.URL: 'url'>, <Kind.EXACT: 'exact'>, <Kind.PLAIN: 'plain'>)
    >>> kind_by_name("content", "write_file"), kind_by_name("content", "send_mail")
    (<Kind.CODE: 'code'>, <Kind.TEXT: 'text'>)
    """
    words = words_of_name(name)
    if not words:
        return Kind.PLAIN
    if words[-1] in _AMBIGUOUS_IN_FILE_TOOLS and not _FILE_TOOL_WORDS.isdisjoint(words_of_name(tool)):
        return Kind.CODE
    return _KIND_BY_NAME.get(" ".join(words[-2:])) or _KIND_BY_NAME.get(words[-1], Kind.PLAIN)


def words_of_name(name: str) -> list[str]:
    """The words of an identifier, split at case, digits and everything that is no letter."""
    return [word.lower() for word in _WORD.findall(name[:_MAX_NAME_CHARS])]
