"""AgentDojo: its own call form, missing ids, parallel calls and three forms of content, on an invented office."""

from pathlib import Path
from typing import Any

from fakes.adapter_files import model_turns, pairs, read_value, said

from pivotrl.types import Outcome, Role


def run(*messages: dict[str, Any], **extra: Any) -> dict[str, Any]:
    frame = {"suite_name": "office", "pipeline_name": "m", "user_task_id": "user_task_4", "injection_task_id": None, "attack_type": None}
    opening = ({"role": "system", "content": "Be careful."}, {"role": "user", "content": "Book two rooms."})
    return {**frame, "injections": {}, "messages": [*opening, *messages], "error": None, "utility": True, "security": True, **extra}


def ask(*calls: dict[str, Any], content: Any = None) -> dict[str, Any]:
    return {"role": "assistant", "content": content, "tool_calls": list(calls)}


def answer(content: str, call_id: str | None, error: str | None = None) -> dict[str, Any]:
    return {"role": "tool", "content": content, "tool_call_id": call_id, "tool_call": {}, "error": error}


def test_missing_and_empty_ids_are_paired_by_adjacency(tmp_path: Path) -> None:
    without = ask({"function": "book", "args": {"room": 1}}, {"function": "book", "args": {"room": 2}})
    empty = ask({"function": "book", "args": {"room": 3}, "id": "", "placeholder_args": None})
    reading = read_value(tmp_path, run(without, answer("one", None), answer("two", None), empty, answer("three", "")))
    assert pairs(reading.only) == [('{"room": 1}', "one"), ('{"room": 2}', "two"), ('{"room": 3}', "three")]
    assert reading.repairs == ("tool call ids missing, numbered",)


def test_parallel_results_out_of_order_follow_their_ids(tmp_path: Path) -> None:
    calls = [{"function": "book", "args": {"room": room}, "id": f"c{room}"} for room in range(9)]
    answers = [answer(f"room {room}", f"c{room}") for room in reversed(range(9))]
    reading = read_value(tmp_path, run(ask(*calls), *answers))
    assert pairs(reading.only) == [(f'{{"room": {room}}}', f"room {room}") for room in reversed(range(9))]
    assert reading.repairs == ()


def test_content_null_text_and_parts(tmp_path: Path) -> None:
    call = {"function": "book", "args": {}, "id": "c1"}
    parts = [{"type": "text", "content": "Both "}, {"type": "text", "content": "booked."}]
    messages = (ask(call), answer("ok", "c1"), ask(content="Done. "), ask(content=parts))
    assert [turn.content for turn in model_turns(read_value(tmp_path, run(*messages)).only)] == ["", "Done. ", "Both booked."]


def test_the_agent_sees_the_error_of_a_failed_tool(tmp_path: Path) -> None:
    trajectory = read_value(tmp_path, run(ask({"function": "book", "args": {}, "id": "c1"}), answer("", "c1", "ValueError: no room"))).only
    (result,) = [message for message in trajectory.messages if message.role is Role.TOOL]
    assert (result.content, result.is_error) == ("ValueError: no room", True)


def test_outcome_is_utility_unless_the_attack_went_through(tmp_path: Path) -> None:
    talk = ask(content="Done.")
    assert read_value(tmp_path, run(talk)).only.outcome is Outcome.SUCCESS
    assert read_value(tmp_path, run(talk, utility=False)).only.outcome is Outcome.FAILURE
    assert read_value(tmp_path, run(talk, utility=None)).only.outcome is Outcome.UNKNOWN
    assert read_value(tmp_path, run(talk, injection_task_id="injection_task_1", security=True)).only.outcome is Outcome.FAILURE
    assert read_value(tmp_path, run(talk, injection_task_id="injection_task_1", security=False)).only.outcome is Outcome.SUCCESS


def test_the_suite_is_part_of_the_task(tmp_path: Path) -> None:
    trajectory = read_value(tmp_path, run(ask(content="Done."))).only
    assert trajectory.task_id == "office/user_task_4"
    assert said(trajectory)[0] == ("system", "Be careful.")
