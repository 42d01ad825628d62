"""SWE-agent trajectory files (.traj): ``{environment, trajectory[], history[], info}``.

A trajectory present is one file; `history` is what the agent saw and wrote. Messages with `is_demo` are demonstrations, and turns that the harness
writes when it gives up (`exit_cost` and the like) are not the model's. The action of a turn is, by version, in `tool_calls`, in ``<function=...>``
tags, or in a fence: a fenced command becomes a call of `bash`, and the user turn after it is its result. Discussion around the action is visible
text, so it stays content; `thought` goes to the reasoning only where the content does not hold it. A last step that is only in `trajectory` has no
recorded call and is left out, counted. Nothing marks failed commands, so no result is an error.
Outcome: an exit without a submission is a failure; with one it is unknown, because the file does not hold the tests' verdict.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import PurePosixPath
from typing import Any, cast

import orjson

from pivotrl.trajectories.adapters.conversation import Conversation, Facts, converted
from pivotrl.trajectories.adapters.detection import OneFilePerUnit, shown_value
from pivotrl.trajectories.adapters.openai_messages import add_message, as_id, content_text
from pivotrl.trajectories.adapters.shell_text import bash_call, fenced_blocks
from pivotrl.trajectories.files import document_rows
from pivotrl.trajectories.source import Converted, Probe, RawRow, RowDropped, RowQuarantined, SourceUnit
from pivotrl.types import Domain, Origin, Outcome, ParseOutcome, Tool

REPAIR_LAST_STEP = "last step without a recorded call left out"

# What `environment` says where it does not name a task.
_GENERIC_ENVIRONMENTS = ("main", "swe_main")


class SweAgentAdapter(OneFilePerUnit):
    """SWE-agent runs, demonstrations and replays."""

    name = "swe_agent"

    def sniff(self, probe: Probe) -> bool:
        value = shown_value(probe)
        if not isinstance(value, dict):
            return False
        steps = cast("dict[str, Any]", value).get("trajectory")
        if not isinstance(steps, list):
            return False
        if not steps:
            return "history" in value
        return isinstance(steps[0], dict) and "action" in steps[0] and ("observation" in steps[0] or "history" in value)

    def rows(self, unit: SourceUnit) -> Iterator[RawRow | RowQuarantined | RowDropped]:
        yield from document_rows(unit)

    def convert(self, row: RawRow, tools: Sequence[Tool] | None) -> Converted:
        return convert_run(row, tools, self.name)


ADAPTER = SweAgentAdapter()


def convert_run(row: RawRow, tools: Sequence[Tool] | None, source_format: str) -> Converted:
    """The trajectory of one .traj document.

    Raises:
        RowQuarantined, RowDropped: as `Adapter.convert`.
    """
    if not isinstance(row.value, dict) or not isinstance(row.value.get("history"), list):
        raise RowQuarantined("wrong schema: a run is not an object with history")
    run = cast("dict[str, Any]", row.value)
    history = cast("list[Any]", run["history"])
    conversation = Conversation(calls_carry_ids=any(isinstance(message, dict) and message.get("tool_calls") for message in history))
    num_turns = 0
    for message in history:
        if not isinstance(message, dict):
            raise RowQuarantined("wrong schema: a message is not an object")
        num_turns += message.get("role") == "assistant" and not message.get("is_demo")
        _add(conversation, message)
    steps = run.get("trajectory")
    if isinstance(steps, list) and len(steps) > num_turns:
        conversation.repairs.add(REPAIR_LAST_STEP)
    return converted(conversation, row, Facts(source_format, Domain.SWE, _outcome(run), None, _task_id(run, row.name)), (), tools)


def _add(conversation: Conversation, message: Mapping[str, Any]) -> None:
    role = message.get("role")
    if role == "assistant":
        is_harness = bool(message.get("is_demo")) or str(message.get("action")).startswith("exit_")
        _add_turn(conversation, message, Origin.HARNESS if is_harness else Origin.MODEL)
    elif role == "user":
        text = content_text(message.get("content"), conversation)
        if message.get("is_demo"):
            conversation.user(text, origin=Origin.HARNESS)
        elif conversation.awaits_result:
            conversation.tool(text)
        else:
            conversation.user(text)
    elif role == "tool":
        ids = message.get("tool_call_ids")
        call_id = as_id(ids[0]) if isinstance(ids, list) and ids else as_id(message.get("tool_call_id"))
        conversation.tool(content_text(message.get("content"), conversation), call_id=call_id)
    else:
        add_message(conversation, message)


def _add_turn(conversation: Conversation, message: Mapping[str, Any], origin: Origin) -> None:
    text = content_text(message.get("content"), conversation)
    thought = message.get("thought")
    extra = thought if isinstance(thought, str) and thought.strip() and thought.strip() not in text else None
    if message.get("tool_calls") or "<function=" in text:
        reasoning = message.get("reasoning_content") or extra
        add_message(conversation, {**message, "content": text, "reasoning_content": reasoning}, origin=origin)
        return
    action = message.get("action")
    blocks = fenced_blocks(text)
    if not isinstance(action, str):
        action = blocks[-1].body if blocks else ""
    if not action.strip():
        conversation.assistant(text, reasoning=extra, origin=origin, parse=ParseOutcome.ABSENT)
        return
    around = next((block.before for block in reversed(blocks) if block.body.strip() == action.strip()), text)
    discussion = thought if isinstance(thought, str) else around
    conversation.assistant(discussion.rstrip(), (bash_call(action),), origin=origin)


def _outcome(run: Mapping[str, Any]) -> Outcome:
    info = run.get("info")
    if not isinstance(info, dict) or not isinstance(info.get("exit_status"), str):
        return Outcome.UNKNOWN
    is_submitted = info["exit_status"].startswith("submitted") and bool(info.get("submission"))
    return Outcome.UNKNOWN if is_submitted else Outcome.FAILURE


def _task_id(run: Mapping[str, Any], name: str) -> str | None:
    """The problem statement's id; else the environment where it names a task; else the file's stem, which SWE-agent names after the task."""
    replay = run.get("replay_config")
    if isinstance(replay, str):
        try:
            replay = orjson.loads(replay)
        except orjson.JSONDecodeError:
            replay = None
    problem = replay.get("problem_statement") if isinstance(replay, dict) else None
    problem_id = problem.get("id") if isinstance(problem, dict) else None
    environment = run.get("environment")
    if isinstance(problem_id, str) and problem_id:
        return problem_id
    if isinstance(environment, str) and environment and environment not in _GENERIC_ENVIRONMENTS:
        return environment
    return PurePosixPath(name).name.split(".traj")[0] or None
