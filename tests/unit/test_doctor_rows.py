"""The doctor's pass over the data by one process and by several: the same findings, counts and sample, whoever reads which rows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pivotrl.config.schema import IngestConfig
from pivotrl.doctor import rows
from pivotrl.doctor.data import Seen, check_data
from pivotrl.doctor.findings import Findings

TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {"at": {"type": "integer"}}}}}]


def _row(number: int, *, name: str = "look", outcome: bool = True) -> dict[str, Any]:
    messages: list[dict[str, Any]] = [{"role": "user", "content": f"Find {number}."}]
    for turn in range(3):
        function = {"name": name, "arguments": json.dumps({"at": number * 10 + turn})}
        messages += [
            {"role": "assistant", "content": "", "tool_calls": [{"id": f"c{turn}", "type": "function", "function": function}]},
            {"role": "tool", "tool_call_id": f"c{turn}", "content": "nothing"},
        ]
    messages.append({"role": "assistant", "content": f"{number} is nowhere."})
    return {"messages": messages, "tools": TOOLS, "task_id": f"task-{number}", "success": outcome}


def _write(path: Path) -> None:
    """Copies at every distance, broken lines, a tool that is not offered, and one conversation under two task ids."""
    lines = [json.dumps(_row(number)) for number in range(40)]
    lines += [lines[0], lines[7], lines[7], '{"messages": [', "[]", json.dumps(_row(50, name="fly"))]
    lines += [json.dumps({**_row(number), "task_id": f"other-{number}"}).replace("nowhere.", "lost.") for number in range(20, 40)]
    lines += [json.dumps(_row(60, outcome=False)), json.dumps(_row(60)), lines[3]]
    path.write_text("\n".join(lines) + "\n")


def _read(paths: list[Path], monkeypatch: pytest.MonkeyPatch, num_processes: int, sample_size: int) -> tuple[Seen, Findings]:
    monkeypatch.setattr(rows, "_ALONE_BYTES", 2000)
    findings = Findings()
    config = IngestConfig(paths=tuple(map(str, paths)), held_out_frac=0.3)
    return check_data(config, paths, findings, run_seed=5, sample_size=sample_size, num_processes=num_processes), findings


@pytest.mark.parametrize("sample_size", [20, 1000])
def test_several_processes_find_what_one_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sample_size: int) -> None:
    large, small = tmp_path / "large.jsonl", tmp_path / "small.jsonl"
    _write(large)
    # Read by one process, after a task that several share; all of it copies but its last row.
    small.write_text("\n".join(json.dumps(_row(number)) for number in (1, 2, 99)) + "\n")
    alone, found_alone = _read([large, small], monkeypatch, 1, sample_size)
    shared, found_shared = _read([large, small], monkeypatch, 3, sample_size)
    assert found_alone.as_json() == found_shared.as_json()
    assert alone == shared
    # A larger sample is all turns that count, so none of a row that is a copy of one left out.
    assert len(alone.sample) == len({candidate.id for _, candidate in alone.sample}) == min(sample_size, alone.candidates.total())
    checks = {one.check for one in found_alone.found}
    assert {"data-rows", "data-duplicates", "tool-missing", "leak"} <= checks
    # What is no row at all counts as read.
    assert alone.num_rows == large.read_text().count("\n") + 3
