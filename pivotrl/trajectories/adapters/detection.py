"""What `sniff` may look at: the first record of a file, whole or as far as its head shows it.

A head that holds no whole value is parsed as far as it goes, once for all adapters that ask.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, cast

from pivotrl.trajectories.files import head_value, record_rows
from pivotrl.trajectories.source import Probe, RawRow, RowDropped, RowQuarantined, SourceUnit


class OneFilePerUnit:
    """`Adapter.group` and `Adapter.rows` of the formats where each file stands alone and each record is a trajectory."""

    def group(self, paths: Sequence[Path], root: Path) -> Iterator[SourceUnit]:
        for path in sorted(paths, key=lambda path: path.relative_to(root).parts):
            yield SourceUnit((path,), path.relative_to(root).as_posix())

    def rows(self, unit: SourceUnit) -> Iterator[RawRow | RowQuarantined | RowDropped]:
        yield from record_rows(unit)


def shown_value(probe: Probe) -> Any:
    """The first JSON value of a file, or its beginning. Not to be changed: adapters share it."""
    return probe.first_row if probe.first_row is not None else _head_value(probe.head)


def shown_record(probe: Probe) -> dict[str, Any]:
    """The first record: the first line's object, the first element of an array, or the document itself; empty where there is none."""
    value = shown_value(probe)
    if isinstance(value, list) and value:
        value = cast("list[Any]", value)[0]
    return cast("dict[str, Any]", value) if isinstance(value, dict) else {}


def is_chat(messages: Any, role_key: str = "role") -> bool:
    """Whether a value is a list that begins with a message: an object with a role, and something said or done."""
    if not isinstance(messages, list) or not messages or not isinstance(messages[0], dict):
        return False
    first = cast("dict[str, Any]", messages[0])
    return isinstance(first.get(role_key), str) and any(key in first for key in ("content", "value", "tool_calls"))


def chat_text(messages: Any, num_messages: int = 3) -> str:
    """The text of the first messages, for formats that are told by what the agent writes."""
    if not isinstance(messages, list):
        return ""
    contents = [message.get("content") for message in cast("list[Any]", messages)[:num_messages] if isinstance(message, dict)]
    return "\n".join(content for content in contents if isinstance(content, str))


@lru_cache(maxsize=2)
def _head_value(head: bytes) -> Any:
    return head_value(Probe(name="", suffix="", head=head, first_row=None))
