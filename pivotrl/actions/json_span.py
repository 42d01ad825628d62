"""JSON values at a place inside a longer text, with the places of an object's members.

A call's arguments are kept as they were written, so their span is needed, not only their value; and a closing tag inside
a JSON string must not end a call, so the JSON is read from its first character instead of being cut out first.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

# Attempts to read JSON at a wrong place are each linear in the text (the standard library counts lines for its message), so their
# number per completion is bounded. A completion with more broken pieces is malformed whatever the rest says.
MAX_FAILED_READS = 32

_WHITESPACE = re.compile(r"[ \t\n\r]*")


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


_DECODER = json.JSONDecoder(parse_constant=_refuse_constant)


@dataclass(frozen=True, slots=True)
class Span:
    """A JSON value and where it was read: ``text[start:end]``."""

    value: Any
    start: int
    end: int


def skip_whitespace(text: str, start: int) -> int:
    """The first place at or after `start` that is not JSON whitespace."""
    match = _WHITESPACE.match(text, start)
    assert match is not None
    return match.end()


def read_value(text: str, start: int) -> Span | None:
    """The JSON value that begins exactly at `start`, or None where there is none (broken, too deep, NaN).

    >>> read_value('x {"a": "}"} y', 2).end
    12
    """
    try:
        value, end = _DECODER.raw_decode(text, start)
    except (ValueError, RecursionError):
        return None
    return Span(value, start, end)


def read_members(text: str, start: int) -> tuple[dict[str, Span], int] | None:
    """Members of the JSON object at `start` with their spans, and the object's end; the last of equal keys wins.

    >>> members, end = read_members('{"name": "f", "arguments": {"a":1}}', 0)
    >>> members["arguments"].start, end
    (27, 35)
    """
    if text[start : start + 1] != "{":
        return None
    members: dict[str, Span] = {}
    place = skip_whitespace(text, start + 1)
    if text[place : place + 1] == "}":
        return members, place + 1
    while True:
        key = read_value(text, place)
        if key is None or not isinstance(key.value, str):
            return None
        place = skip_whitespace(text, key.end)
        if text[place : place + 1] != ":":
            return None
        value = read_value(text, skip_whitespace(text, place + 1))
        if value is None:
            return None
        members[key.value] = value
        place = skip_whitespace(text, value.end)
        separator = text[place : place + 1]
        if separator == "}":
            return members, place + 1
        if separator != ",":
            return None
        place = skip_whitespace(text, place + 1)
