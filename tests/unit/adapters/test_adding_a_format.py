"""The example of docs/adding_a_format.md runs as it is printed and does what the page says."""

from pathlib import Path
from typing import Any

import orjson
import pytest

from pivotrl.trajectories.source import Probe, RawRow, RowQuarantined
from pivotrl.types import Outcome, ToolOrigin

PAGE = Path(__file__).resolve().parents[3] / "docs" / "adding_a_format.md"


def example() -> Any:
    (code,) = [block.split("```")[0] for block in PAGE.read_text("utf-8").split("```python\n")[1:]]
    module: dict[str, Any] = {}
    exec(compile(code, str(PAGE), "exec"), module)
    return module["ADAPTER"]


def test_the_example_reads_its_own_format() -> None:
    adapter = example()
    call = {"id": "c1", "function": {"name": "refund", "arguments": '{"order": 1}'}}
    turns = [{"who": "user", "text": "Refund me."}, {"who": "bot", "text": None, "calls": [call]}, {"who": "tool", "text": "ok"}]
    row = {"dialog": turns, "solved": True, "ticket": "T-1"}
    assert adapter.sniff(Probe("a.jsonl", ".jsonl", orjson.dumps(row), row))
    trajectory = adapter.convert(RawRow("a.jsonl", 0, 1, row), None).trajectory
    assert [message.role.value for message in trajectory.messages] == ["user", "assistant", "tool"]
    assert (trajectory.task_id, trajectory.outcome, trajectory.tool_origin) == ("T-1", Outcome.SUCCESS, ToolOrigin.INFERRED)
    assert trajectory.messages[2].tool_call_id == "c1"


@pytest.mark.parametrize("value", [None, {"dialog": 5}, {"dialog": [1]}, {"dialog": [{"who": "ghost"}]}])
def test_the_example_quarantines_what_is_broken(value: Any) -> None:
    with pytest.raises(RowQuarantined):
        example().convert(RawRow("a.jsonl", 0, 1, value), None)
