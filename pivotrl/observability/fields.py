"""Typed access to the JSON that stages leave behind: an absent key is None, a value of the wrong type is an error that names it.

A report is written for unfinished and for older runs too, so it must do without keys; it must not do with nonsense.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from pivotrl.errors import UserError
from pivotrl.pivots.statistics import Interval


@dataclass(frozen=True, slots=True)
class Fields:
    """One JSON object of a file.

    >>> Fields("scores.json", {"n": 12, "nested": {"score": 0.5}}).child("nested").number("score")
    0.5
    >>> Fields("scores.json", {}).number("score") is None
    True
    """

    source: str
    """File the object comes from, for error messages."""
    values: Mapping[str, Any]

    def number(self, key: str) -> float | None:
        """A finite number; null reads as absent."""
        value = self.values.get(key)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int | float)):
            raise self._wrong(key, value, "a number")
        return value

    def count(self, key: str) -> int | None:
        """A whole number of things."""
        value = self.number(key)
        if value is not None and value != int(value):
            raise self._wrong(key, value, "a whole number")
        return None if value is None else int(value)

    def text(self, key: str) -> str | None:
        """A string."""
        value = self.values.get(key)
        if value is not None and not isinstance(value, str):
            raise self._wrong(key, value, "a string")
        return value

    def child(self, key: str) -> Fields:
        """An object inside this one; without keys where it is absent."""
        value = self.values.get(key, {})
        if not isinstance(value, dict):
            raise self._wrong(key, value, "an object")
        return Fields(f"{self.source}: {key}", value)

    def children(self, key: str) -> list[Fields]:
        """A list of objects; empty where it is absent."""
        value = self.values.get(key, [])
        if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
            raise self._wrong(key, value, "a list of objects")
        return [Fields(f"{self.source}: {key}", item) for item in value]

    def counts(self) -> dict[str, int]:
        """All values of this object as whole numbers."""
        return {key: count for key in self.values if (count := self.count(key)) is not None}

    def interval(self, value_key: str = "value") -> Interval | None:
        """The object as a number with n and bounds; None where the number is absent, no width where the bounds are."""
        value = self.number(value_key)
        if value is None:
            return None
        low, high = self.number("low"), self.number("high")
        return Interval(value, value if low is None else low, value if high is None else high, self.count("n") or 0)

    def _wrong(self, key: str, value: Any, kind: str) -> UserError:
        return UserError(f"{self.source}: {key} is {str(value)[:60]!r}", rule=f"it must be {kind}", fix="run the stage that wrote the file again")


def read_object(path: Path, *, name: str) -> Fields:
    """The object of a JSON file; without keys where there is no file.

    Raises:
        UserError: for a file that is not one JSON object.
    """
    if not path.exists():
        return Fields(name, {})
    return Fields(name, _parsed(path.read_bytes(), name))


def read_lines(path: Path, *, name: str) -> Iterator[Fields]:
    """The objects of a JSONL file; none where there is no file. A last line without its end is one being written: left out.

    Raises:
        UserError: for a line that is not a JSON object.
    """
    if not path.exists():
        return
    with path.open("rb") as stream:
        for number, line in enumerate(stream, start=1):
            if line.endswith(b"\n"):
                where = f"{name}:{number}"
                yield Fields(where, _parsed(line, where))


def _parsed(data: bytes, name: str) -> Mapping[str, Any]:
    try:
        value = orjson.loads(data)
    except orjson.JSONDecodeError as error:
        raise UserError(f"{name} is not JSON ({error})", rule="stages write JSON", fix="run the stage that wrote the file again") from error
    if not isinstance(value, dict):
        raise UserError(f"{name} holds {type(value).__name__}", rule="it must be a JSON object", fix="run the stage that wrote the file again")
    return value
