"""SWE-smith: calls as XML in the text, tools described in the system prompt, observations as user turns."""

from pathlib import Path
from typing import Any

import orjson
from fakes.adapter_files import model_turns, pairs, read, read_rows, said

from pivotrl.types import Domain, Outcome, ParseOutcome, ToolOrigin

SYSTEM = """You fix bugs.

---- BEGIN FUNCTION #1: run ----
Description: Run a command.

Parameters:
  (1) command (string, required): The command.
Several lines.
  (2) timeout (integer, optional): Seconds.
---- END FUNCTION #1 ----

---- BEGIN FUNCTION #2: finish ----
Description: Finish.
No parameters are required for this function.
---- END FUNCTION #2 ----

---- BEGIN FUNCTION #3: edit ----
Description: Edit a file.

Parameters:
  (1) mode (string, required): How.
Allowed values: [`view`, `write`]
  (2) lines (array, optional): First and last.
---- END FUNCTION #3 ----

Write <function=example><parameter=x>1</parameter></function>.
"""


def turn(content: str, role: str = "assistant") -> dict[str, str]:
    return {"role": role, "content": content}


def row(*messages: dict[str, str], **extra: Any) -> dict[str, Any]:
    return {"messages": [turn(SYSTEM, "system"), turn("Fix it.", "user"), *messages], "instance_id": "proj__proj.1", **extra}


RUN = turn("Look.\n\n<function=run>\n<parameter=command>5</parameter>\n<parameter=timeout>5</parameter>\n</function>")
EDIT = turn("<function=edit>\n<parameter=mode>view</parameter>\n<parameter=lines>[1, 2]</parameter>\n</function>")
FINISH = turn("Done.\n\n<function=finish>\n</function>")


def test_calls_are_typed_by_the_described_tools(tmp_path: Path) -> None:
    messages = (RUN, turn("OBSERVATION:\n7", "user"), EDIT, turn("Your command ran successfully.", "user"), FINISH)
    trajectory = read_rows(tmp_path, row(*messages)).only
    assert pairs(trajectory) == [
        ('{"command": "5", "timeout": 5}', "OBSERVATION:\n7"),
        ('{"mode": "view", "lines": [1, 2]}', "Your command ran successfully."),
    ]
    assert [(turn.content, turn.tool_calls[0].name) for turn in model_turns(trajectory)] == [("Look.", "run"), ("", "edit"), ("Done.", "finish")]
    assert said(trajectory)[1] == ("user", "Fix it.")
    assert (trajectory.domain, trajectory.task_id, trajectory.outcome) == (Domain.SWE, "proj__proj.1", Outcome.UNKNOWN)


def test_tools_are_read_from_the_prompt(tmp_path: Path) -> None:
    trajectory = read_rows(tmp_path, row(RUN)).only
    assert trajectory.tool_origin is ToolOrigin.ROW
    run, finish, edit = trajectory.tools
    assert (run.name, run.description, run.parameters["required"]) == ("run", "Run a command.", ["command"])
    assert run.parameters["properties"]["timeout"] == {"type": "integer", "description": "Seconds."}
    assert (finish.name, finish.parameters["properties"]) == ("finish", {})
    assert edit.parameters["properties"]["mode"]["enum"] == ["view", "write"]


def test_a_call_that_is_not_closed_is_malformed_and_kept(tmp_path: Path) -> None:
    broken = "Look.\n<function=run>\n<parameter=command>ls"
    (message,) = model_turns(read_rows(tmp_path, row(turn(broken))).only)
    assert (message.parse, message.content) == (ParseOutcome.MALFORMED, broken)


def test_resolved_and_messages_as_text(tmp_path: Path) -> None:
    good = row(RUN, resolved=True)
    good["messages"] = orjson.dumps(good["messages"]).decode()
    reading = read_rows(tmp_path, good, row(RUN, resolved=False))
    assert [converted.trajectory.outcome for converted in reading.kept] == [Outcome.SUCCESS, Outcome.FAILURE]


def test_a_first_row_beyond_the_head_is_detected(tmp_path: Path) -> None:
    rows = [row(RUN, turn("OBSERVATION:\n" + "x" * 100_000, "user"), FINISH), row(RUN)]
    reading = read_rows(tmp_path, *rows)
    assert reading.formats == {"rows.jsonl": "swe_smith"}
    assert len(reading.kept) == 2


def test_broken_rows_are_quarantined(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_bytes(orjson.dumps(row(RUN)) + b'\n{"messages": 5, "instance_id": "a"}\n{"messages": [\n')
    reading = read(tmp_path)
    assert len(reading.kept) == 1
    assert [reason.split(":")[0] for reason in reading.quarantined] == ["wrong schema", "invalid JSON"]
