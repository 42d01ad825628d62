"""Reads invented files through detection, grouping, reading and conversion, as ingest does, and keeps every reason."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson

from pivotrl.trajectories.files import discover, probe
from pivotrl.trajectories.registry import all_adapters, detect
from pivotrl.trajectories.source import Adapter, Converted, RawRow, RowDropped, RowQuarantined
from pivotrl.types import Message, Origin, Role, Tool, Trajectory


@dataclass
class Reading:
    """What came of the files below a folder."""

    formats: dict[str, str] = field(default_factory=dict)
    """Format of each file, by name."""
    kept: list[Converted] = field(default_factory=list)
    dropped: list[str] = field(default_factory=list)
    quarantined: list[str] = field(default_factory=list)

    @property
    def only(self) -> Trajectory:
        """The trajectory, where nothing else was there."""
        assert len(self.kept) == 1
        assert not self.dropped
        assert not self.quarantined
        return self.kept[0].trajectory

    @property
    def repairs(self) -> tuple[str, ...]:
        return self.kept[0].repairs


def read(folder: Path, tools: Sequence[Tool] | None = None) -> Reading:
    """Everything below `folder`, each file by the one adapter that claims it."""
    reading = Reading()
    adapters = all_adapters()
    paths: dict[str, list[Path]] = {}
    for file in discover([folder]).files:
        try:
            name = detect(probe(file.path, file.root), adapters).name
        except RowQuarantined as unknown:
            reading.quarantined.append(str(unknown))
            continue
        reading.formats[file.name] = name
        paths.setdefault(name, []).append(file.path)
    for adapter in adapters:
        _read_format(adapter, paths.get(adapter.name, []), folder, tools, reading)
    return reading


def read_value(folder: Path, value: Any, name: str = "rows.json", tools: Sequence[Tool] | None = None) -> Reading:
    """One document in one file."""
    (folder / name).write_bytes(orjson.dumps(value))
    return read(folder, tools)


def read_rows(folder: Path, *rows: Any, tools: Sequence[Tool] | None = None) -> Reading:
    """Rows in one JSONL file."""
    (folder / "rows.jsonl").write_bytes(b"".join(orjson.dumps(row) + b"\n" for row in rows))
    return read(folder, tools)


def said(trajectory: Trajectory) -> list[tuple[str, str]]:
    """Role and content of every message."""
    return [(message.role.value, message.content) for message in trajectory.messages]


def model_turns(trajectory: Trajectory) -> list[Message]:
    """The assistant messages that the model wrote."""
    return [message for message in trajectory.messages if message.role is Role.ASSISTANT and message.origin is Origin.MODEL]


def harness_turns(trajectory: Trajectory) -> list[Message]:
    """The assistant messages that the harness wrote."""
    return [message for message in trajectory.messages if message.role is Role.ASSISTANT and message.origin is Origin.HARNESS]


def pairs(trajectory: Trajectory) -> list[tuple[str, str]]:
    """(arguments of the call, content of its result) for every tool message, by call id."""
    calls = {call.id: call for message in trajectory.messages for call in message.tool_calls}
    results = [message for message in trajectory.messages if message.role is Role.TOOL]
    assert len(calls) == sum(len(message.tool_calls) for message in trajectory.messages), "call ids are not unique"
    return [(calls[message.tool_call_id].arguments, message.content) for message in results]


def _read_format(adapter: Adapter, paths: Sequence[Path], root: Path, tools: Sequence[Tool] | None, reading: Reading) -> None:
    for unit in adapter.group(paths, root):
        for row in adapter.rows(unit):
            try:
                if not isinstance(row, RawRow):
                    raise row
                converted = adapter.convert(row, tools)
                repairs = tuple(sorted({*row.repairs, *converted.repairs}))
                reading.kept.append(dataclasses.replace(converted, repairs=repairs))
            except RowDropped as dropped:
                reading.dropped.append(dropped.reason)
            except RowQuarantined as broken:
                reading.quarantined.append(broken.reason)
