"""OpenHands: a file per call, each repeating the prefix; only the newest is the trajectory."""

from pathlib import Path
from typing import Any

import orjson
from fakes.adapter_files import Reading, model_turns, read, said

from pivotrl.types import Domain, Role, ToolOrigin

TOOLS = [
    {"type": "function", "function": {"name": "execute_bash", "description": "Run", "parameters": {"type": "object", "properties": {"command": {}}}}},
    {"type": "function", "function": {"name": "finish", "description": "End"}},
]


def text(content: str, *, cached: bool = False) -> list[dict[str, Any]]:
    return [{"type": "text", "text": content, **({"cache_control": {"type": "ephemeral"}} if cached else {})}]


def ask(call_id: str, command: str, content: str | None = "Next.") -> dict[str, Any]:
    call = {"id": call_id, "type": "function", "function": {"name": "execute_bash", "arguments": orjson.dumps({"command": command}).decode()}}
    return {"role": "assistant", "tool_calls": [call], **({} if content is None else {"content": text(content)})}


def answer(call_id: str, content: str, *, cached: bool = False) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": call_id, "name": "execute_bash", "content": text(content, cached=cached)}


OPENING = [{"role": "system", "content": text("You are an agent.")}, {"role": "user", "content": text("Fix it.")}]
FULL = [
    *OPENING,
    ask("a", "ls"),
    answer("a", "src\n[Command finished with exit code 0]"),
    ask("b", "x", None),
    answer("b", "no\n[Command finished with exit code 127]"),
]


def write_call(folder: Path, time: float, messages: list[dict[str, Any]], reply: dict[str, Any], **extra: Any) -> None:
    folder.mkdir(exist_ok=True)
    call = {"messages": messages, "response": {"choices": [{"message": {**reply, "role": "assistant"}}]}, "args": [], "kwargs": {"tools": TOOLS}}
    (folder / f"model-{time}.json").write_bytes(orjson.dumps({**call, "timestamp": time, "cost": 0.1, **extra}))


def session(folder: Path) -> None:
    write_call(folder, 1733339377.9, OPENING, ask("a", "ls"))
    write_call(folder, 1733339388.25, [*FULL[:3], answer("a", "src\n[Command finished with exit code 0]", cached=True)], ask("b", "x", None))
    write_call(folder, 1733339388.5, FULL, {"content": "It is fixed."})


def test_only_the_newest_counts_and_its_reply_is_in_the_response(tmp_path: Path) -> None:
    session(tmp_path / "proj__proj-1")
    session(tmp_path / "proj__proj-2")
    reading = read(tmp_path)
    assert reading.dropped == ["superseded prefix"] * 4
    assert [converted.trajectory.task_id for converted in reading.kept] == ["proj__proj-1", "proj__proj-2"]
    trajectory = reading.kept[0].trajectory
    assert [turn.content for turn in model_turns(trajectory)] == ["Next.", "", "It is fixed."]
    assert said(trajectory)[:2] == [("system", "You are an agent."), ("user", "Fix it.")]
    assert [message.is_error for message in trajectory.messages if message.role is Role.TOOL] == [False, True]
    assert (trajectory.domain, trajectory.tool_origin, len(trajectory.tools)) == (Domain.SWE, ToolOrigin.ROW, 2)
    assert trajectory.tools[1].parameters == {"type": "object", "properties": {}}
    assert trajectory.source_file == "proj__proj-1/model-1733339388.5.json"


def test_order_is_by_time_not_by_name(tmp_path: Path) -> None:
    folder = tmp_path / "proj"
    write_call(folder, 1733339421.16129, OPENING, ask("a", "ls"))
    write_call(folder, 1733339421.9, FULL, {"content": "Done."})
    write_call(folder, 999999999.5, OPENING[:1], {"content": "Hm."})
    reading = read(tmp_path)
    assert (len(reading.kept), reading.dropped) == (1, ["superseded prefix"] * 2)
    assert model_turns(reading.kept[0].trajectory)[-1].content == "Done."


def counts(reading: Reading) -> tuple[int, int, int]:
    return len(reading.kept), len(reading.dropped), len(reading.quarantined)


def test_a_broken_newest_file_gives_way_to_the_one_before(tmp_path: Path) -> None:
    session(tmp_path / "proj")
    newest = tmp_path / "proj" / "model-1733339388.5.json"
    newest.write_bytes(newest.read_bytes()[:-40])
    reading = read(tmp_path)
    assert counts(reading) == (1, 1, 1)
    assert [turn.content for turn in model_turns(reading.kept[0].trajectory)] == ["Next.", ""]


def test_a_condensed_history_loses_no_turn(tmp_path: Path) -> None:
    session(tmp_path / "proj")
    condensed = [*OPENING, {"role": "user", "content": text("Summary: ls was run.")}]
    write_call(tmp_path / "proj", 1733339399.0, condensed, {"content": "Finished."})
    reading = read(tmp_path)
    assert counts(reading) == (2, 2, 0)
    assert [model_turns(converted.trajectory)[-1].content for converted in reading.kept] == ["Finished.", "It is fixed."]


def test_calls_written_in_the_text(tmp_path: Path) -> None:
    xml = {"role": "assistant", "content": text("Run.\n<function=execute_bash>\n<parameter=command>5</parameter>\n</function>")}
    messages = [*OPENING, xml, {"role": "user", "content": text("ERROR:\nno such command")}]
    write_call(tmp_path / "proj", 1733339399.0, messages, {"content": "Stop."}, kwargs={})
    trajectory = read(tmp_path).only
    assert [(message.content, message.is_error) for message in trajectory.messages if message.role is Role.TOOL] == [
        ("ERROR:\nno such command", True)
    ]
    assert model_turns(trajectory)[0].tool_calls[0].name == "execute_bash"


def test_a_file_beyond_the_head_is_detected_by_its_name(tmp_path: Path) -> None:
    long = [*OPENING, ask("a", "ls"), answer("a", "x" * 80_000)]
    write_call(tmp_path / "proj", 1733339399.0, long, {"content": "Done."})
    reading = read(tmp_path)
    assert list(reading.formats.values()) == ["openhands"]
    assert len(reading.kept) == 1
