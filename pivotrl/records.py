"""Frozen records that are made as fast as ones that are not.

A frozen dataclass stores every field through `object.__setattr__`, which is an eighth of the time that reading trajectories takes: each row is made
of some fifty messages, calls and actions. Bottom tier; used by `types.py`.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any


def quickly_made[Record](record: type[Record]) -> type[Record]:
    """The frozen dataclass with slots `record`, its `__init__` replaced by one to the same effect that takes a third of the time.

    While its fields are stored, an instance belongs to a class of the same layout that is not frozen.

    Raises:
        TypeError: for a class without slots, or one that inherits fields: the layouts would differ.
    """
    fields = dataclasses.fields(record)  # pyright: ignore[reportArgumentType] - any class at all has this type
    plain = dataclasses.make_dataclass(record.__name__, [(field.name, field.type, _declared(field)) for field in fields], slots=True)
    fill: Any = plain.__init__
    set_attribute = object.__setattr__

    @functools.wraps(fill)
    def init(self: Record, *values: Any, **named: Any) -> None:
        set_attribute(self, "__class__", plain)
        fill(self, *values, **named)
        self.__class__ = record

    blank = record.__new__(record)
    init(blank, *([None] * len(fields)))
    record.__init__ = init
    return record


def _declared(field: dataclasses.Field[Any]) -> Any:
    return dataclasses.field(default=field.default, default_factory=field.default_factory)  # pyright: ignore[reportCallIssue, reportArgumentType]
