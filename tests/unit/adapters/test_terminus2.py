"""Terminus-2: the action is a JSON text, bare or with prose and fences around it; screens are user turns."""

from pathlib import Path

from fakes.adapter_files import model_turns, read_rows, said

from pivotrl.actions.registry import action_format
from pivotrl.actions.terminus2 import TOOL_NAME
from pivotrl.types import Action, Domain, Outcome, ParseOutcome, ToolOrigin

TASK = 'Reply with {"analysis": "", "plan": "", "commands": [{"keystrokes": "", "duration": 0.1}], "task_complete": true}. Task: say hi.'
LIST = '{\n  "analysis": "Start.",\n  "plan": "List.",\n  "commands": [{"keystrokes": "ls\\n", "duration": 0.1}],\n  "task_complete": false\n}'
DONE = '{"analysis": "Done.", "plan": "Stop.", "commands": [], "task_complete": true}'
SURE = "Are you sure you want to mark the task as complete?"


def user(content: str) -> dict[str, str]:
    return {"role": "user", "content": content}


def agent(content: str, **extra: str) -> dict[str, str]:
    return {"role": "assistant", "content": content, **extra}


def test_bare_json_prose_and_fences(tmp_path: Path) -> None:
    prose, fence = f"I'll help you.\n\n{LIST}", f"```json\n{LIST}\n```"
    messages = [user(TASK), agent(LIST), user("screen 1"), agent(prose), user("screen 2"), agent(fence), user("screen 3")]
    trajectory = read_rows(tmp_path, {"task_id": "t1", "conversations": messages}).only
    turns = model_turns(trajectory)
    assert [turn.tool_calls[0].arguments for turn in turns] == [LIST] * 3
    assert {turn.tool_calls[0].name for turn in turns} == {TOOL_NAME}
    assert [turn.parse for turn in turns] == [ParseOutcome.PARSED] * 3
    written = [action_format("terminus2").transcribe(Action(turn.content, turn.tool_calls, turn.reasoning, turn.parse)) for turn in turns]
    assert written == [LIST, prose, fence]
    assert [content for role, content in said(trajectory) if role == "user"] == [TASK, "screen 1", "screen 2", "screen 3"]
    assert all(role in ("user", "assistant") for role, _ in said(trajectory))


def test_two_completion_turns_and_a_turn_without_commands(tmp_path: Path) -> None:
    wait = '{"analysis": "Running.", "plan": "Wait.", "commands": []}'
    messages = [user(TASK), agent(wait), user("screen"), agent(DONE), user(SURE), agent(DONE)]
    trajectory = read_rows(tmp_path, {"task_id": "t1", "conversations": messages}).only
    arguments = [turn.tool_calls[0].arguments_object() or {} for turn in model_turns(trajectory)]
    assert [value["commands"] for value in arguments] == [[], [], []]
    assert [value.get("task_complete") for value in arguments] == [None, True, True]


def test_frame_of_the_trajectory(tmp_path: Path) -> None:
    row = {"task_id": "t1", "conversations": [user(TASK), agent(LIST, reasoning_content="Look first.")]}
    reading = read_rows(tmp_path, row, row | {"success": False}, row | {"reward": 1.0})
    trajectory = reading.kept[0].trajectory
    assert model_turns(trajectory)[0].reasoning == "Look first."
    assert (trajectory.domain, trajectory.task_id) == (Domain.TERMINAL, "t1")
    assert (trajectory.tools, trajectory.tool_origin) == ((), ToolOrigin.NONE)
    assert reading.repairs == ()
    assert [converted.trajectory.outcome for converted in reading.kept] == [Outcome.UNKNOWN, Outcome.FAILURE, Outcome.SUCCESS]


def test_broken_json_is_malformed_and_prose_is_a_message(tmp_path: Path) -> None:
    broken = LIST[:-40]
    row = {"task_id": "t1", "conversations": [user(TASK), agent(broken), user("parse error"), agent("I am lost.")]}
    first, second = model_turns(read_rows(tmp_path, row).only)
    assert (first.parse, first.content, first.tool_calls) == (ParseOutcome.MALFORMED, broken, ())
    assert (second.parse, second.content) == (ParseOutcome.ABSENT, "I am lost.")


def test_rows_without_a_turn_are_dropped(tmp_path: Path) -> None:
    good = {"task_id": "t", "conversations": [user(TASK), agent(LIST)]}
    reading = read_rows(tmp_path, good, {"task_id": "t", "conversations": [user(TASK)]}, {"task_id": "t", "conversations": []}, {"task_id": "t"})
    assert len(reading.kept) == 1
    assert reading.dropped == ["no assistant turn written by the model", "no messages"]
    assert reading.quarantined == ["wrong schema: a row is not an object with conversations"]
