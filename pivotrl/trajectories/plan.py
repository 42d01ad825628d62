"""What ingest is going to read: files to formats, formats to units of reading, small units together into work units.

The same files give the same plan, which is what lets a killed run find its finished work units again. Called by `ingest.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from pivotrl.trajectories import registry
from pivotrl.trajectories.audit import FormatCounts
from pivotrl.trajectories.files import FoundFile, printable_name, probe
from pivotrl.trajectories.source import Adapter, RowQuarantined, SourceUnit


@dataclass(frozen=True, slots=True)
class ReadTask:
    """One unit of reading with the adapter that reads it."""

    adapter: Adapter
    unit: SourceUnit
    num_bytes: int


def plan_tasks(files: Sequence[FoundFile], format_name: str, unknown: FormatCounts) -> list[ReadTask]:
    """Files sorted into units by adapter, in a stable order.

    Args:
        format_name: a format for all files, or ``auto`` to detect each file's.
        unknown: counts and lists the files that cannot be read or that no adapter claims.
    """
    adapters = registry.all_adapters() if format_name == registry.AUTO else (registry.adapter(format_name),)
    by_place: dict[tuple[Path, str], list[FoundFile]] = {}
    for file in files:
        try:
            seen = probe(file.path, file.root)
            adapter = registry.detect(seen, adapters) if format_name == registry.AUTO else adapters[0]
        except RowQuarantined as broken:
            unknown.files += 1
            unknown.rows += 1
            unknown.quarantine(broken.reason, file=printable_name(file.name), line=None)
            continue
        by_place.setdefault((file.root, adapter.name), []).append(file)
    by_name = {adapter.name: adapter for adapter in adapters}
    sizes = {file.path: file.num_bytes for file in files}
    tasks: list[ReadTask] = []
    for (root, name), found in by_place.items():
        units = by_name[name].group([file.path for file in found], root)
        tasks.extend(ReadTask(by_name[name], unit, sum(sizes[path] for path in unit.paths)) for unit in units)
    return tasks


def work_units(tasks: Sequence[ReadTask], *, max_bytes: int) -> Iterator[list[ReadTask]]:
    """Consecutive tasks together up to `max_bytes`; a larger task stands alone."""
    group: list[ReadTask] = []
    num_bytes = 0
    for task in tasks:
        if group and num_bytes + task.num_bytes > max_bytes:
            yield group
            group, num_bytes = [], 0
        group.append(task)
        num_bytes += task.num_bytes
    if group:
        yield group
