"""ATIF: steps with calls and observations; files without an agent step are dropped."""

from pathlib import Path
from typing import Any

from fakes.adapter_files import harness_turns, model_turns, pairs, read_value, said

from pivotrl.types import Domain, Outcome, ToolOrigin

REPLY = '{"analysis": "a", "plan": "p", "commands": [{"keystrokes": "ls\\n", "duration": 0.5}]}'


def step(source: str, message: Any, **extra: Any) -> dict[str, Any]:
    return {"step_id": 1, "source": source, "message": message, **extra}


def document(agent: dict[str, Any], *steps: dict[str, Any]) -> dict[str, Any]:
    return {"schema_version": "ATIF-v1.5", "session_id": "s", "agent": agent, "steps": list(steps), "final_metrics": {}}


TERMINUS = {"name": "terminus-2", "version": "2", "extra": {"parser": "json"}}
HELPER = {"name": "helper", "version": "1"}


def test_no_agent_step_is_a_drop_not_a_crash(tmp_path: Path) -> None:
    assert read_value(tmp_path, document(TERMINUS, step("user", "Task."))).dropped == ["no agent step"]
    assert read_value(tmp_path, document(TERMINUS)).dropped == ["no agent step"]


def test_terminus_messages_and_screens(tmp_path: Path) -> None:
    observation = {"results": [{"content": "screen"}]}
    trajectory = read_value(tmp_path, document(TERMINUS, step("user", "Task."), step("agent", REPLY, observation=observation))).only
    (turn,) = model_turns(trajectory)
    assert (turn.tool_calls[0].name, turn.tool_calls[0].arguments) == ("terminus2", REPLY)
    assert said(trajectory) == [("user", "Task."), ("assistant", ""), ("user", "screen")]
    assert (trajectory.domain, trajectory.tool_origin, trajectory.outcome) == (Domain.TERMINAL, ToolOrigin.NONE, Outcome.UNKNOWN)
    assert trajectory.task_id == trajectory.id


def test_calls_reasoning_and_results_by_id(tmp_path: Path) -> None:
    calls = [{"tool_call_id": f"c{n}", "function_name": "bash", "arguments": {"command": f"echo {n}"}} for n in (1, 2)]
    results = {"results": [{"source_call_id": "c2", "content": "2"}, {"source_call_id": "c1", "content": [{"type": "text", "text": "1"}]}]}
    agent = step("agent", "Both.", reasoning_content="Count.", tool_calls=calls, observation=results)
    definitions = [{"type": "function", "function": {"name": "bash", "parameters": {"type": "object", "properties": {"command": {}}}}}]
    trajectory = read_value(tmp_path, document(HELPER | {"tool_definitions": definitions}, step("system", "Rules."), step("user", "Go."), agent)).only
    assert pairs(trajectory) == [('{"command": "echo 2"}', "2"), ('{"command": "echo 1"}', "1")]
    assert model_turns(trajectory)[0].reasoning == "Count."
    assert said(trajectory)[0] == ("system", "Rules.")
    assert (trajectory.domain, trajectory.tool_origin) == (Domain.SWE, ToolOrigin.ROW)


def test_copied_context_is_not_an_action(tmp_path: Path) -> None:
    steps = (step("user", "Go."), step("agent", "Earlier.", is_copied_context=True), step("system", "Reset."), step("agent", "Now."))
    trajectory = read_value(tmp_path, document(HELPER, *steps)).only
    assert [turn.content for turn in harness_turns(trajectory)] == ["Earlier."]
    assert [turn.content for turn in model_turns(trajectory)] == ["Now."]
    assert said(trajectory)[2] == ("user", "Reset.")
    assert trajectory.domain is Domain.CONVERSATIONAL


def test_wrong_shapes(tmp_path: Path) -> None:
    unknown = read_value(tmp_path, document(HELPER, step("agent", "x"), step("moon", "y")))
    assert unknown.quarantined == ["wrong schema: step source is 'moon'"]
    assert read_value(tmp_path, document(HELPER) | {"steps": 5}).quarantined == ["wrong schema: a trajectory is not an object with steps"]
