"""NeMo-Gym pivot rows: one expert action each; everything before it is context."""

from pathlib import Path
from typing import Any

from fakes.adapter_files import harness_turns, model_turns, read_rows, said

from pivotrl.types import Domain, Outcome, ParseOutcome, ToolOrigin

TOOL = {"type": "function", "name": "look", "description": "Look", "parameters": {"type": "object", "properties": {}}, "strict": True}
OPENING = [{"role": "system", "content": "Help.", "type": "message"}, {"role": "user", "content": "Who?", "type": "message"}]


def call(arguments: str, call_id: str = "f1", name: str = "look") -> dict[str, Any]:
    return {"type": "function_call", "name": name, "arguments": arguments, "call_id": call_id, "id": call_id, "status": "completed"}


def reasoning(text: str) -> dict[str, Any]:
    return {"type": "reasoning", "id": "r", "summary": [{"type": "summary_text", "text": text}], "encrypted_content": None}


def message(text: str) -> dict[str, Any]:
    return {"type": "message", "role": "assistant", "id": "m", "content": [{"type": "output_text", "text": text, "annotations": []}]}


def output(text: str, call_id: str = "f1") -> dict[str, Any]:
    return {"type": "function_call_output", "call_id": call_id, "output": text, "id": None, "status": None}


def row(items: Any, action: Any, **extra: Any) -> dict[str, Any]:
    params = {"input": items, "tools": [TOOL], "parallel_tool_calls": True, "tool_choice": "auto", "metadata": None, "temperature": None}
    return {"responses_create_params": params, "expected_action": action, **extra}


def test_only_the_expert_action_is_the_models(tmp_path: Path) -> None:
    items = [
        *OPENING,
        reasoning("Look."),
        call('{"q": 1}'),
        output("found"),
        reasoning("Tell."),
        message("I found it."),
        {"role": "user", "content": "And?"},
    ]
    trajectory = read_rows(tmp_path, row(items, {"type": "function_call", "name": "look", "arguments": '{"q": 2}'})).only
    (turn,) = model_turns(trajectory)
    assert turn is trajectory.messages[-1]
    assert (turn.tool_calls[0].name, turn.tool_calls[0].arguments) == ("look", '{"q": 2}')
    before = harness_turns(trajectory)
    assert [(turn.reasoning, turn.content, len(turn.tool_calls)) for turn in before] == [("Look.", "", 1), ("Tell.", "I found it.", 0)]
    assert [role for role, _ in said(trajectory)] == ["system", "user", "assistant", "tool", "assistant", "user", "assistant"]
    assert (trajectory.domain, trajectory.outcome, trajectory.tool_origin) == (Domain.CONVERSATIONAL, Outcome.UNKNOWN, ToolOrigin.ROW)


def test_reasoning_message_and_parallel_calls_are_one_turn(tmp_path: Path) -> None:
    items = [*OPENING, reasoning("Both."), message("Looking."), call('{"q": 1}', "f1"), call('{"q": 2}', "f2"), output("b", "f2"), output("a", "f1")]
    trajectory = read_rows(tmp_path, row(items, {"type": "message", "content": "Done."})).only
    (turn,) = harness_turns(trajectory)
    assert (turn.reasoning, turn.content, len(turn.tool_calls)) == ("Both.", "Looking.", 2)
    assert [(m.content, m.tool_call_id) for m in trajectory.messages if m.role.value == "tool"] == [("b", "f2"), ("a", "f1")]


def test_the_three_kinds_of_action(tmp_path: Path) -> None:
    batch = {"type": "function_call_batch", "calls": [call('{"q": 1}'), call('{"q": 2}')]}
    rows = (
        row(OPENING, batch),
        row(OPENING, {"type": "message", "content": "\n\nHello."}),
        row(OPENING, {"type": "function_call", "name": "look", "arguments": '{"q": '}),
    )
    turns = [model_turns(converted.trajectory)[0] for converted in read_rows(tmp_path, *rows).kept]
    assert [(len(turn.tool_calls), turn.content, turn.parse) for turn in turns] == [
        (2, "", ParseOutcome.PARSED),
        (0, "\n\nHello.", ParseOutcome.ABSENT),
        (1, "", ParseOutcome.MALFORMED),
    ]
    assert turns[2].tool_calls[0].arguments == '{"q": '


def test_terminal_rows_carry_an_expected_answer(tmp_path: Path) -> None:
    second = '{"analysis": "a", "plan": "p", "commands": [{"keystrokes": "ls\\n", "duration": 1.0}], "task_complete": false}'
    first = '{"state_analysis": "s", "explanation": "e", "commands": [{"keystrokes": "ls\\n", "is_blocking": true, "timeout_sec": 2}]}'
    params = {"input": [{"role": "user", "content": "Task."}]}
    rows = [{"responses_create_params": params, "expected_answer": answer, "uuid": "u", "metadata": {}} for answer in (second, first)]
    kept = [converted.trajectory for converted in read_rows(tmp_path, *rows).kept]
    turns = [model_turns(trajectory)[0] for trajectory in kept]
    assert [(turn.tool_calls[0].name, turn.tool_calls[0].arguments) for turn in turns] == [("terminus2", second), ("terminus1", first)]
    assert {turn.parse for turn in turns} == {ParseOutcome.PARSED}
    assert {(trajectory.domain, trajectory.tool_origin) for trajectory in kept} == {(Domain.TERMINAL, ToolOrigin.NONE)}


def test_recorded_rollouts_are_not_the_expert(tmp_path: Path) -> None:
    response = {"output": [message("A policy's own words.")]}
    rows = (
        row(OPENING, {"type": "message", "content": "Expert."}, response=response, reward=0.0),
        row(OPENING, None, response=response, reward=1.0, expected_answer=""),
        row(OPENING, None),
    )
    reading = read_rows(tmp_path, *rows)
    assert [turn.content for turn in model_turns(reading.kept[0].trajectory)] == ["Expert."]
    assert (reading.kept[0].trajectory.reward, reading.kept[0].trajectory.outcome) == (None, Outcome.UNKNOWN)
    assert reading.repairs == ("recorded rollout left out, its expert action kept",)
    assert reading.dropped == ["recorded rollout without an expert action", "no expert action"]


def test_neighbouring_rows_share_their_task(tmp_path: Path) -> None:
    action = {"type": "message", "content": "x"}
    longer = [*OPENING, message("a"), {"role": "user", "content": "b"}]
    uuid = "f2271e25-1984-4609-8890-42ecc8026684"
    rows = (
        row(OPENING, action),
        row(longer, action),
        row(OPENING, action, trajectory_id="t7"),
        row(OPENING, action, uuid=f"{uuid}-1"),
        row(OPENING, action, uuid=f"{uuid}-12"),
        row(OPENING, action, uuid="example_1"),
    )
    tasks = [converted.trajectory.task_id for converted in read_rows(tmp_path, *rows).kept]
    assert tasks[0] == tasks[1]
    assert tasks[2:] == ["t7", uuid, uuid, "example_1"]
    assert len(set(tasks)) == 4


def test_lenient_input(tmp_path: Path) -> None:
    agent = {"agent_ref": {"type": "responses_api_agents", "name": "swe_pivot_agent"}}
    action = {"type": "function_call", "name": "run", "arguments": "{}"}
    bare = {
        "responses_create_params": {"input": "Fix it.", "instructions": "Rules.", "tools": None, "parallel_tool_calls": False},
        "expected_action": action,
        **agent,
    }
    trajectory = read_rows(tmp_path, bare).only
    assert said(trajectory)[:2] == [("system", "Rules."), ("user", "Fix it.")]
    assert (trajectory.domain, trajectory.tool_origin, trajectory.parallel_tool_calls) == (Domain.SWE, ToolOrigin.INFERRED, False)


def test_wrong_shapes(tmp_path: Path) -> None:
    reading = read_rows(tmp_path, row(OPENING, {"type": "message", "content": "x"}), row(OPENING, {"type": "dance"}), row(5, {"type": "message"}))
    assert len(reading.kept) == 1
    assert reading.quarantined == [
        "wrong schema: expected_action of type 'dance'",
        "wrong schema: responses_create_params.input is neither text nor a list",
    ]
