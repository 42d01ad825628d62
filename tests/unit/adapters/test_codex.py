"""Codex sessions: only response items count, reasoning is encrypted, events repeat them."""

from pathlib import Path
from typing import Any

import orjson
from fakes.adapter_files import Reading, model_turns, pairs, read, said

from pivotrl.types import Domain, Origin, ParseOutcome, Role


def event(kind: str, **payload: Any) -> dict[str, Any]:
    return {"timestamp": "2025-01-01T00:00:00Z", "type": kind, "payload": payload}


def item(kind: str, **payload: Any) -> dict[str, Any]:
    return event("response_item", type=kind, **payload)


def user(text: str) -> dict[str, Any]:
    return item("message", role="user", content=[{"type": "input_text", "text": text}])


def reasoning(summary: str) -> dict[str, Any]:
    return item("reasoning", summary=[{"type": "summary_text", "text": summary}], content=None, encrypted_content="gAAA")


def shell(call_id: str, command: str) -> dict[str, Any]:
    return item("function_call", name="shell", arguments=orjson.dumps({"command": ["bash", "-lc", command]}).decode(), call_id=call_id)


def result(call_id: str, output: Any) -> dict[str, Any]:
    return item("function_call_output", call_id=call_id, output=output)


META = event("session_meta", id="s", cwd="project", instructions=None)
OPENING = (META, user("<environment_context>\n</environment_context>"), user("Fix it."), event("event_msg", type="user_message", message="Fix it."))
STEP = (
    event("turn_context", cwd="project"),
    event("event_msg", type="agent_reasoning", text="**Looking**"),
    reasoning("**Looking**"),
    item("ghost_snapshot", ghost_commit={}),
    shell("c1", "ls"),
    result("c1", '{"output":"src","metadata":{"exit_code":0}}'),
    event("event_msg", type="token_count", info=None),
)


def write(folder: Path, *events: dict[str, Any], tail: bytes = b"") -> Reading:
    (folder / "session.jsonl").write_bytes(b"".join(orjson.dumps(entry) + b"\n" for entry in events) + tail)
    return read(folder)


def test_events_are_not_counted_twice(tmp_path: Path) -> None:
    speech = item("message", role="assistant", content=[{"type": "output_text", "text": "Done."}])
    reading = write(tmp_path, *OPENING, *STEP, event("event_msg", type="agent_message", message="Done."), speech)
    trajectory = reading.only
    assert [(turn.content, len(turn.tool_calls)) for turn in model_turns(trajectory)] == [("", 1), ("Done.", 0)]
    assert [content for role, content in said(trajectory) if role == "user"] == ["<environment_context>\n</environment_context>", "Fix it."]
    assert [message.origin for message in trajectory.messages if message.role is Role.USER] == [Origin.HARNESS, Origin.ENVIRONMENT]
    assert pairs(trajectory) == [('{"command":["bash","-lc","ls"]}', '{"output":"src","metadata":{"exit_code":0}}')]
    assert trajectory.domain is Domain.SWE


def test_encrypted_reasoning_keeps_its_summary(tmp_path: Path) -> None:
    reading = write(tmp_path, *OPENING, *STEP)
    assert model_turns(reading.only)[0].reasoning == "**Looking**"
    assert reading.repairs == ("reasoning is encrypted, its summary kept",)


def test_exit_codes_tell_errors(tmp_path: Path) -> None:
    outputs = ('{"output":"","metadata":{"exit_code":2}}', "Exit code: 1\nWall time: 1s", "Exit code: 0\nfine", "Plan updated", "{broken")
    events = [entry for n, output in enumerate(outputs) for entry in (shell(f"e{n}", "x"), result(f"e{n}", output))]
    trajectory = write(tmp_path, *OPENING, *events).only
    assert [message.is_error for message in trajectory.messages if message.role is Role.TOOL] == [True, True, False, False, False]


def test_custom_tools_and_instructions(tmp_path: Path) -> None:
    meta = event("session_meta", id="s", instructions="Be careful.")
    patch = item("custom_tool_call", name="apply_patch", input="*** Begin", call_id="p", status="completed")
    trajectory = write(tmp_path, meta, user("Fix."), patch, item("custom_tool_call_output", call_id="p", output="ok")).only
    assert said(trajectory)[0] == ("system", "Be careful.")
    assert pairs(trajectory) == [('{"input": "*** Begin"}', "ok")]


def test_broken_lines(tmp_path: Path) -> None:
    reading = write(tmp_path, *OPENING, *STEP, tail=b'{"timestamp": "x", "ty')
    assert "last line cut off, left out" in reading.repairs
    assert len(model_turns(reading.only)) == 1
    middle = write(tmp_path, *OPENING, tail=b'{"broken\n' + b"".join(orjson.dumps(entry) + b"\n" for entry in STEP))
    assert (middle.kept, [reason.split(":")[0] for reason in middle.quarantined]) == ([], ["invalid JSON"])


def test_a_compaction_ends_the_session(tmp_path: Path) -> None:
    reading = write(tmp_path, *OPENING, *STEP, event("compacted", message="summary"), shell("c2", "pwd"))
    assert len(model_turns(reading.only)) == 1
    assert "turns after a compaction left out" in reading.repairs


def test_malformed_arguments_and_sessions_without_a_turn(tmp_path: Path) -> None:
    (turn,) = model_turns(write(tmp_path, *OPENING, item("function_call", name="shell", arguments="{", call_id="c")).only)
    assert (turn.parse, turn.tool_calls[0].arguments) == (ParseOutcome.MALFORMED, "{")
    assert write(tmp_path, *OPENING).dropped == ["no assistant turn written by the model"]
