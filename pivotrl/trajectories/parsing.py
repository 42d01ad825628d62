"""JSON bytes to values: orjson first, the standard library for what orjson is too strict about, and a reason for what neither reads.

Called by `files.py` for every line and document. Repairs are named so that the audit can count them.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any, cast

import orjson

from pivotrl.trajectories.source import RowQuarantined

REPAIR_SURROGATE = "lone surrogate replaced by U+FFFD"
REPAIR_NOT_A_NUMBER = "NaN or infinity read as null"
REPAIR_NUMBER_RANGE = "number beyond 64 bits read as float"

_SURROGATE = re.compile("[\ud800-\udfff]")
_INT64_LIMIT = 1 << 64


@dataclass(frozen=True, slots=True)
class Parsed:
    """A JSON value and the names of the repairs it needed."""

    value: Any
    repairs: tuple[str, ...] = ()


def parse_json(data: bytes) -> Parsed:
    """The value of one JSON text. Duplicate keys: the last one wins.

    Lone surrogates are replaced (no tokenizer can encode them), NaN and infinities become null and integers beyond 64 bits become floats, each
    recorded as a repair.

    Raises:
        RowQuarantined: for NUL bytes, text that is not UTF-8, nesting beyond what can be handled, and anything that is not JSON.
    """
    try:
        return Parsed(orjson.loads(data))
    except orjson.JSONDecodeError as error:
        strict_reason = str(error)
    if (position := data.find(b"\0")) >= 0:
        raise RowQuarantined(f"NUL byte at byte {position}")
    if "depth limit" in strict_reason:
        raise RowQuarantined("nested deeper than 1,024 levels")
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise RowQuarantined(f"not UTF-8: byte {error.start}") from error
    return _parse_leniently(text, strict_reason)


def _parse_leniently(text: str, strict_reason: str) -> Parsed:
    repairs: set[str] = set()

    def constant(_name: str) -> None:
        repairs.add(REPAIR_NOT_A_NUMBER)

    def integer(digits: str) -> int | float | None:
        if len(digits) < 19:
            return int(digits)
        return number(digits) if len(digits) > 20 or not -(_INT64_LIMIT >> 1) <= int(digits) < _INT64_LIMIT else int(digits)

    def number(digits: str) -> float | None:
        value = float(digits)
        if value - value != 0.0:
            return constant(digits)
        if digits.lstrip("-").isdigit():
            repairs.add(REPAIR_NUMBER_RANGE)
        return value

    try:
        value = json.loads(text, parse_constant=constant, parse_int=integer, parse_float=number)
    except RecursionError as error:
        raise RowQuarantined("nested too deeply") from error
    except ValueError as error:
        raise RowQuarantined(f"invalid JSON: {strict_reason}") from error
    value = _replace_surrogates(value, repairs)
    return Parsed(value, tuple(sorted(repairs)))


def _replace_surrogates(value: Any, repairs: set[str]) -> Any:
    """Edits `value` in place, with a stack of its own because nesting may be deep."""

    def clean(text: str) -> str:
        if text.isascii() or not _SURROGATE.search(text):
            return text
        repairs.add(REPAIR_SURROGATE)
        return _SURROGATE.sub("\ufffd", text)

    if isinstance(value, str):
        return clean(value)
    stack: list[Any] = [value]
    while stack:
        node = stack.pop()
        if isinstance(node, dict):
            items = cast("dict[str, Any]", node)
            cleaned = {clean(key): clean(item) if isinstance(item, str) else item for key, item in items.items()}
            items.clear()
            items.update(cleaned)
            stack.extend(item for item in items.values() if isinstance(item, dict | list))
        elif isinstance(node, list):
            elements = cast("list[Any]", node)
            elements[:] = [clean(item) if isinstance(item, str) else item for item in elements]
            stack.extend(item for item in elements if isinstance(item, dict | list))
    return value
