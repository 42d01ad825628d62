"""SWE-agent: three ways to write an action, demonstrations, broken files, on an invented repository."""

from pathlib import Path
from typing import Any

from fakes.adapter_files import harness_turns, model_turns, pairs, read, read_value, said

from pivotrl.types import Domain, Origin, Outcome, ParseOutcome

SYSTEM = {"role": "system", "content": "You fix bugs.", "agent": "primary"}
ISSUE = {"role": "user", "content": "Fix the parser.", "agent": "primary"}
SUBMITTED = {"exit_status": "submitted", "submission": "diff --git a b"}


def fenced(thought: str, command: str, **extra: Any) -> dict[str, Any]:
    content = f"{thought}\n```\n{command}\n```"
    return {"role": "assistant", "content": content, "thought": f"{thought}\n", "action": f"{command}\n", "agent": "primary", **extra}


def user(content: str, **extra: Any) -> dict[str, Any]:
    return {"role": "user", "content": content, "agent": "primary", **extra}


def run(*history: dict[str, Any], info: dict[str, Any] | None = None, num_steps: int | None = None, **extra: Any) -> dict[str, Any]:
    turns = [message for message in history if message["role"] == "assistant" and not message.get("is_demo")]
    step = {"action": "ls", "observation": "", "response": "", "state": "{}", "thought": ""}
    steps = [step] * (len(turns) if num_steps is None else num_steps)
    return {"environment": "swe_main", "trajectory": steps, "history": list(history), "info": SUBMITTED if info is None else info, **extra}


def test_a_fenced_command_is_a_bash_call_and_the_next_user_turn_its_result(tmp_path: Path) -> None:
    history = (
        SYSTEM,
        ISSUE,
        fenced("Look around.", "ls -a"),
        user("src tests"),
        fenced("Several\n```\nnot run\n```\nlines.", "cat <<EOF\nx\nEOF"),
        user(""),
    )
    trajectory = read_value(tmp_path, run(*history), "bug-1.traj").only
    assert pairs(trajectory) == [('{"command": "ls -a"}', "src tests"), ('{"command": "cat <<EOF\\nx\\nEOF"}', "")]
    assert [turn.content for turn in model_turns(trajectory)] == ["Look around.", "Several\n```\nnot run\n```\nlines."]
    assert [turn.reasoning for turn in model_turns(trajectory)] == [None, None]
    assert (trajectory.domain, trajectory.task_id, trajectory.outcome) == (Domain.SWE, "bug-1", Outcome.UNKNOWN)


def test_the_last_fence_is_the_action_where_none_is_recorded(tmp_path: Path) -> None:
    content = "See\n```\nexample\n```\nso run\n```bash\npytest -q\n```"
    trajectory = read_value(tmp_path, run(SYSTEM, ISSUE, {"role": "assistant", "content": content}), "a.traj").only
    (turn,) = model_turns(trajectory)
    assert (turn.content, turn.tool_calls[0].arguments) == ("See\n```\nexample\n```\nso run", '{"command": "pytest -q"}')


def test_demonstrations_and_exits_of_the_harness_are_not_the_models(tmp_path: Path) -> None:
    demo = (user("DEMONSTRATION", is_demo=True), fenced("Shown.", "ls", is_demo=True), user("files", is_demo=True))
    exit_turn = {"role": "assistant", "content": "", "thought": "Exit due to cost limit", "action": "exit_cost", "agent": "primary"}
    trajectory = read_value(tmp_path, run(SYSTEM, *demo, ISSUE, fenced("Mine.", "pwd"), user("/"), exit_turn), "a.traj").only
    assert [turn.content for turn in model_turns(trajectory)] == ["Mine."]
    assert len(harness_turns(trajectory)) == 2
    assert [message.origin for message in trajectory.messages if message.content == "DEMONSTRATION"] == [Origin.HARNESS]


def test_function_calls_with_repeated_ids(tmp_path: Path) -> None:
    def turn(arguments: str) -> dict[str, Any]:
        call = {"id": "call_x", "type": "function", "function": {"name": "open", "arguments": arguments}}
        return {"role": "assistant", "content": "Open it.", "thought": "Open it.", "action": "open", "tool_calls": [call], "agent": "main"}

    def result(content: Any) -> dict[str, Any]:
        return {"role": "tool", "content": content, "tool_call_ids": ["call_x"], "agent": "main"}

    parts = [{"type": "text", "text": "file b"}]
    history = (SYSTEM, ISSUE, turn('{"path":"a"}'), result("file a"), turn('{"path":"b"}'), result(parts))
    reading = read_value(tmp_path, run(*history, num_steps=3), "a.traj")
    assert pairs(reading.only) == [('{"path":"a"}', "file a"), ('{"path":"b"}', "file b")]
    assert reading.repairs == ("last step without a recorded call left out", "tool call ids repeated, numbered")


def test_xml_actions_and_turns_without_an_action(tmp_path: Path) -> None:
    xml = {"role": "assistant", "content": "Read it.\n\n<function=view>\n<parameter=path>a.py</parameter>\n</function>", "action": "view a.py"}
    history = (SYSTEM, ISSUE, xml, user("code"), {"role": "assistant", "content": "I give up.", "action": "", "thought": "I give up."})
    first, second = model_turns(read_value(tmp_path, run(*history), "a.traj").only)
    assert (first.content, first.tool_calls[0].name, first.tool_calls[0].arguments) == ("Read it.", "view", '{"path": "a.py"}')
    assert (second.content, second.parse) == ("I give up.", ParseOutcome.ABSENT)


def test_a_thought_that_the_content_lacks_is_reasoning(tmp_path: Path) -> None:
    call = {"id": "c", "function": {"name": "open", "arguments": "{}"}}
    turn = {"role": "assistant", "content": "", "thought": "The bug is in a.", "tool_calls": [call]}
    (message,) = model_turns(read_value(tmp_path, run(SYSTEM, ISSUE, turn), "a.traj").only)
    assert (message.content, message.reasoning) == ("", "The bug is in a.")


def test_task_ids_by_replay_environment_and_file(tmp_path: Path) -> None:
    history = (SYSTEM, ISSUE, fenced("Look.", "ls"))
    replay = {"problem_statement": {"id": "proj-12"}}
    assert read_value(tmp_path, run(*history, replay_config=replay), "a.traj").only.task_id == "proj-12"
    assert read_value(tmp_path, run(*history, replay_config='{"problem_statement": {"id": "proj-13"}}'), "a.traj").only.task_id == "proj-13"
    assert read_value(tmp_path, run(*history) | {"environment": "proj-14"}, "a.traj").only.task_id == "proj-14"


def test_outcome_is_failure_without_a_submission(tmp_path: Path) -> None:
    history = (SYSTEM, ISSUE, fenced("Look.", "ls"))
    for info in ({"exit_status": "exit_cost", "submission": "diff"}, {"exit_status": "submitted", "submission": None}):
        assert read_value(tmp_path, run(*history, info=info), "a.traj").only.outcome is Outcome.FAILURE
    assert read_value(tmp_path, run(*history, info={}), "a.traj").only.outcome is Outcome.UNKNOWN


def test_a_file_that_is_not_json_is_quarantined_and_the_others_are_read(tmp_path: Path) -> None:
    (tmp_path / "broken.traj").write_text('{\n "environment": "main",\n "trajectory": [{"action": "ls", "observation": "x", "response": Oops}]')
    reading = read_value(tmp_path, run(SYSTEM, ISSUE, fenced("Look.", "ls")), "good.traj")
    assert reading.formats == {"broken.traj": "swe_agent", "good.traj": "swe_agent"}
    assert len(reading.kept) == 1
    assert [reason.split(":")[0] for reason in reading.quarantined] == ["invalid JSON"]


def test_a_history_of_only_the_harness_is_dropped(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    assert read_value(tmp_path, run(SYSTEM, ISSUE), "a.traj").dropped == ["no assistant turn written by the model"]
    assert said(read_value(tmp_path, run(SYSTEM, ISSUE, fenced("x", "ls")), "a.traj").only)[1] == ("user", "Fix the parser.")
    assert read(tmp_path / "empty").kept == []
