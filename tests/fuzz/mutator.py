"""Changes to fuzz inputs that keep their structure: JSON values replaced by hostile ones, subtrees repeated, text cut and doubled.

Bytes mutated blindly rarely stay a pair of actions; these do, so that they reach the comparison behind the parsers. Pure: all choices
come from the generator that is given.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any

_SEPARATOR = b"\x00"
_MAX_TEXT = 4_000

HOSTILE_VALUES: tuple[Any, ...] = (
    None,
    True,
    0,
    -1,
    1.5,
    1e308,
    -0.0,
    2**63,
    10**60,
    float("nan"),
    float("inf"),
    "",
    " ",
    "\ud800",
    "\u2028",
    "\x00",
    "9" * 400,
    "1e999",
    "03106",
    "true",
    "null",
    "2024-02-30",
    "2024-05-16T25:61:00+99:99",
    "0001-01-01T00:00:00+14:00",
    "9999-12-31T23:59:59-12:00",
    "{" * 300,
    "[" * 300 + "]" * 300,
    '{"a": ' * 60 + "1" + "}" * 60,
    "(" * 300,
    "a" * 3_000,
    "a b " * 700,
    "(a+)+$",
    "(?P<n>[",
    "http://[::1",
    "http://a:99999999/%zz?%=&&=#",
    "../" * 300,
    "//" * 300,
    "/a/../../..",
    "SELECT " + "(" * 200,
    "select * from t where a in (" + "1," * 500 + "1)",
    "'; DROP TABLE t; --",
    "echo 'unclosed",
    "$(" * 150,
    "`" * 151,
    "cat <<EOF\n" * 60,
    "a && " * 200,
    "((((1+2)*3",
    "ls \\",
    "\\u0000",
    "<think>",
    "</think>" * 50,
    "<tool_call>" * 100,
    "```bash   \n",
    "\u202e\u0301\ufeff",
    [],
    {},
    [[[[[[]]]]]],
    {"": {"": {"": ""}}},
    ["x"] * 300,
    {str(index): index for index in range(200)},
)


def mutate(data: bytes, rng: random.Random) -> bytes:
    """One structural change to an input of `targets.check`; inputs without structure are cut, doubled or spliced as text."""
    head, rest = data[:1] or b"\x00", data[1:]
    parts = rest.split(_SEPARATOR)
    index = rng.randrange(len(parts))
    if len(parts) == 3 and rng.random() < 0.15:
        # The same action on both sides, to be told apart by the next change.
        parts[3 - max(1, index)] = parts[max(1, index)]
    try:
        value = json.loads(parts[index])
    except (ValueError, RecursionError):
        parts[index] = _mutate_text(parts[index].decode("utf-8", "surrogateescape"), rng).encode("utf-8", "surrogatepass")
    else:
        parts[index] = json.dumps(_mutate_value(value, rng)).encode()
    if rng.random() < 0.05:
        head = bytes([rng.randrange(256)])
    return head + _SEPARATOR.join(parts)


def _mutate_value(value: Any, rng: random.Random) -> Any:
    """The value with one node changed, or replaced whole."""
    if rng.random() < 0.05:
        return rng.choice(HOSTILE_VALUES)
    path = _random_path(value, rng)
    if not path:
        return _changed(value, rng)
    parent = value
    for step in path[:-1]:
        parent = parent[step]
    parent[path[-1]] = _changed(parent[path[-1]], rng)
    return value


def _random_path(value: Any, rng: random.Random) -> list[Any]:
    path: list[Any] = []
    while isinstance(value, dict | list) and value and rng.random() < 0.85:
        step = rng.choice(list(value)) if isinstance(value, dict) else rng.randrange(len(value))
        path.append(step)
        value = value[step]
    return path


def _changed(value: Any, rng: random.Random) -> Any:
    if rng.random() < 0.3:
        return rng.choice(HOSTILE_VALUES)
    if isinstance(value, str):
        return _mutate_text(value, rng)
    if isinstance(value, list):
        return rng.choice((value + value, value[::-1], value[1:], [value], [*value, rng.choice(HOSTILE_VALUES)]))
    if isinstance(value, dict):
        keys = list(value)
        if keys and rng.random() < 0.5:
            return {key: value[key] for key in keys if key != rng.choice(keys)}
        return {**value, rng.choice(("", "path", "command", "query", "x" * 300, "\ud800")): rng.choice(HOSTILE_VALUES)}
    if isinstance(value, int | float) and not isinstance(value, bool):
        return rng.choice((-value, value + 1, str(value), [value]))
    return rng.choice(HOSTILE_VALUES)


def _mutate_text(text: str, rng: random.Random) -> str:
    start, end = sorted((rng.randint(0, len(text)), rng.randint(0, len(text))))
    texts = [one for one in HOSTILE_VALUES if isinstance(one, str)]
    change: Callable[[], str] = rng.choice(
        (
            lambda: text[:start] + text[end:],
            lambda: text[:end] + text[start:],
            lambda: text[:start] + text[start:end] * rng.choice((2, 8, 64)) + text[end:],
            lambda: text[:start] + rng.choice(texts) + text[start:],
            lambda: text[:start] + rng.choice("'\"\\{}[]()<>|&;$`#\n\t \ud800\u2028") + text[start:],
            lambda: text[:start] + text[start:end][::-1] + text[end:],
            lambda: text.swapcase(),
        )
    )
    return change()[:_MAX_TEXT]
