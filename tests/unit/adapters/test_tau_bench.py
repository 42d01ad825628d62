"""tau-bench: JSON-string arguments, reused ids, empty outputs and errors told in text, on an invented library desk."""

from pathlib import Path
from typing import Any

from fakes.adapter_files import model_turns, pairs, read_value, said

from pivotrl.types import Outcome, ParseOutcome, Role

TASK = {"user_id": "u", "actions": [], "instruction": "Return a book.", "outputs": []}


def ask(call_id: str, name: str, arguments: str) -> dict[str, Any]:
    return {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}],
    }


def answer(call_id: str, name: str, content: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": call_id, "name": name, "content": content}


def episode(*messages: dict[str, Any], reward: float | None = 1.0) -> list[dict[str, Any]]:
    return [{"task_id": 3, "reward": reward, "info": {"task": TASK, "source": "user"}, "traj": list(messages), "trial": 0}]


OPENING = ({"role": "system", "content": "Library rules."}, {"role": "user", "content": "I return a book."})


def test_reused_ids_empty_outputs_and_the_think_tool(tmp_path: Path) -> None:
    messages = (
        *OPENING,
        ask("c1", "think", '{"thought":"Which book?"}'),
        answer("c1", "think", ""),
        ask("c2", "find", '{"title":"Emma"}'),
        answer("c2", "find", "Error: no such book"),
        ask("c2", "find", '{"title":"Persuasion"}'),
        answer("c2", "find", "shelf 4"),
        {"role": "assistant", "content": "Shelf 4."},
    )
    reading = read_value(tmp_path, episode(*messages))
    trajectory = reading.only
    assert pairs(trajectory) == [
        ('{"thought":"Which book?"}', ""),
        ('{"title":"Emma"}', "Error: no such book"),
        ('{"title":"Persuasion"}', "shelf 4"),
    ]
    assert [message.is_error for message in trajectory.messages if message.role is Role.TOOL] == [False, True, False]
    assert reading.repairs == ("tool call ids repeated, numbered",)
    assert len(model_turns(trajectory)) == 4
    assert said(trajectory)[:2] == [("system", "Library rules."), ("user", "I return a book.")]
    assert (trajectory.task_id, trajectory.outcome) == ("3", Outcome.SUCCESS)


def test_usable_ids_are_kept(tmp_path: Path) -> None:
    messages = (*OPENING, ask("c9", "find", '{"title":"Emma"}'), answer("c9", "find", "shelf 1"))
    reading = read_value(tmp_path, episode(*messages))
    assert [call.id for turn in model_turns(reading.only) for call in turn.tool_calls] == ["c9"]
    assert reading.repairs == ()


def test_broken_arguments_stay_as_written(tmp_path: Path) -> None:
    (turn,) = model_turns(read_value(tmp_path, episode(*OPENING, ask("c1", "find", '["Emma"]'))).only)
    assert (turn.parse, turn.tool_calls[0].arguments) == (ParseOutcome.MALFORMED, '["Emma"]')


def test_outcomes_and_what_is_left_out(tmp_path: Path) -> None:
    talk = (*OPENING, {"role": "assistant", "content": "Which one?"})
    assert read_value(tmp_path, episode(*talk, reward=0.0)).only.outcome is Outcome.FAILURE
    assert read_value(tmp_path, episode(*talk, reward=None)).only.outcome is Outcome.UNKNOWN
    assert read_value(tmp_path, episode()).dropped == ["empty episode"]
    broken = [*episode(*talk), {"task_id": 1, "reward": 0.0, "info": {}}, 5]
    reading = read_value(tmp_path, broken)
    assert (len(reading.kept), reading.quarantined) == (1, ["wrong schema: an episode is not an object with traj"] * 2)
