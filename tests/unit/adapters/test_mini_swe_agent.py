"""mini-SWE-agent: function calls and fenced commands, the exit message, return codes."""

from pathlib import Path
from typing import Any

from fakes.adapter_files import model_turns, pairs, read_value

from pivotrl.types import Domain, Outcome, ParseOutcome, Role

OPENING = ({"role": "system", "content": "Shell."}, {"role": "user", "content": "Fix it."})


def ask(call_id: str, command: str, content: str = "", **extra: Any) -> dict[str, Any]:
    call = {"index": 0, "id": call_id, "type": "function", "function": {"name": "bash", "arguments": f'{{"command": "{command}"}}'}}
    return {"role": "assistant", "content": content, "tool_calls": [call], "function_call": None, "extra": {"cost": 1}, **extra}


def answer(call_id: str, code: int, output: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": call_id, "content": f"<returncode>{code}</returncode>\n{output}", "extra": {"returncode": code}}


def run(*messages: dict[str, Any], status: str = "Submitted", submission: str = "diff") -> dict[str, Any]:
    info = {"model_stats": {"api_calls": 1}, "config": {"agent": {}}, "mini_version": "2.0", "exit_status": status, "submission": submission}
    return {"info": info, "messages": [*OPENING, *messages], "trajectory_format": "mini-swe-agent-1.1", "instance_id": "proj-1"}


def test_exit_is_left_out_and_the_last_call_stays_unanswered(tmp_path: Path) -> None:
    messages = (
        ask("a", "ls"),
        answer("a", 0, "x"),
        ask("b", "grep y", "Search."),
        answer("b", 1, ""),
        ask("c", "submit"),
        {"role": "exit", "content": "diff"},
    )
    reading = read_value(tmp_path, run(*messages), "proj-1.traj.json")
    trajectory = reading.only
    assert len(model_turns(trajectory)) == 3
    assert trajectory.messages[-1].tool_calls[0].id == "c"
    assert [message.is_error for message in trajectory.messages if message.role is Role.TOOL] == [False, True]
    assert reading.repairs == ("harness' exit message left out",)
    assert (trajectory.domain, trajectory.task_id, trajectory.outcome) == (Domain.SWE, "proj-1", Outcome.UNKNOWN)


def test_reasoning_content_is_reasoning(tmp_path: Path) -> None:
    (turn,) = model_turns(read_value(tmp_path, run(ask("a", "ls", reasoning_content="Look first.")), "a.traj.json").only)
    assert (turn.reasoning, turn.content) == ("Look first.", "")


def test_a_bare_list_with_fenced_commands(tmp_path: Path) -> None:
    messages = [
        *OPENING,
        {"role": "assistant", "content": "THOUGHT: look.\n\n```python\nx\n```\n\n```mswea_bash_command\nls -a\n```"},
        {"role": "user", "content": "<returncode>2</returncode>\n<output>\nno\n</output>"},
        {"role": "assistant", "content": "Two:\n```bash\na\n```\n```bash\nb\n```"},
        {"role": "user", "content": "Please give one command."},
        {"role": "assistant", "content": "Done.\n```bash\nsubmit\n```"},
        {"role": "user", "content": ""},
    ]
    trajectory = read_value(tmp_path, messages, "run.traj.json").only
    assert pairs(trajectory) == [('{"command": "ls -a"}', "<returncode>2</returncode>\n<output>\nno\n</output>"), ('{"command": "submit"}', "")]
    assert [message.is_error for message in trajectory.messages if message.role is Role.TOOL] == [True, False]
    first, two, last = model_turns(trajectory)
    assert (first.content, last.content) == ("THOUGHT: look.\n\n```python\nx\n```", "Done.")
    assert (two.parse, two.tool_calls, two.content) == (ParseOutcome.MALFORMED, (), messages[4]["content"])
    assert trajectory.task_id == trajectory.id


def test_outcome_by_exit(tmp_path: Path) -> None:
    assert read_value(tmp_path, run(ask("a", "ls"), status="LimitsExceeded"), "a.traj.json").only.outcome is Outcome.FAILURE
    assert read_value(tmp_path, run(ask("a", "ls"), submission=""), "a.traj.json").only.outcome is Outcome.FAILURE


def test_wrong_shapes(tmp_path: Path) -> None:
    broken = run() | {"messages": "none"}
    assert read_value(tmp_path, broken, "a.traj.json").quarantined == ["wrong schema: a run has no list of messages"]
    assert read_value(tmp_path, run() | {"messages": []}, "a.traj.json").dropped == ["no messages"]
