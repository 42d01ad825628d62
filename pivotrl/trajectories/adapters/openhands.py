"""OpenHands completion logs: one JSON per LLM call, ``{messages[], response, args, kwargs, timestamp, cost}``, each repeating the whole prefix.

What is present is counted in files: a session is the files of one directory, the newest one (plus the reply in its `response`) is the trajectory,
and every older file is dropped as a superseded prefix. A file that is no prefix of a newer one (the history was condensed, or two sessions share
the directory) is a trajectory of its own, so nothing is lost. A newest file that is broken is quarantined and the next one takes its place.
Tools are under `kwargs`. An observation that begins with ``ERROR:`` or ends with a non-zero exit code is an error.
Outcome: unknown, the log does not hold it. The task is the directory's name, which OpenHands names after the instance.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path, PurePosixPath
from typing import Any, cast

from pivotrl.identity import content_id
from pivotrl.trajectories.adapters.conversation import Conversation, Facts, converted
from pivotrl.trajectories.adapters.detection import is_chat, shown_value
from pivotrl.trajectories.adapters.openai_messages import add_message, content_text
from pivotrl.trajectories.adapters.shell_text import exit_code
from pivotrl.trajectories.adapters.tools_in_text import tools_in_text
from pivotrl.trajectories.files import json_document
from pivotrl.trajectories.source import Converted, Probe, RawRow, RowDropped, RowQuarantined, SourceUnit
from pivotrl.trajectories.tools import parse_tools
from pivotrl.types import Domain, Tool

_CALL_TIME = re.compile(r"-(\d{9,}(?:\.\d+)?)\.json(?:\.\w+)?$")


class OpenHandsAdapter:
    """OpenHands sessions."""

    name = "openhands"

    def sniff(self, probe: Probe) -> bool:
        value = shown_value(probe)
        if not isinstance(value, dict):
            return False
        call = cast("dict[str, Any]", value)
        if not is_chat(call.get("messages")):
            return False
        return ("response" in call and "kwargs" in call) or (len(call) == 1 and _CALL_TIME.search(probe.name) is not None)

    def group(self, paths: Sequence[Path], root: Path) -> Iterator[SourceUnit]:
        sessions: dict[Path, list[Path]] = {}
        for path in paths:
            sessions.setdefault(path.parent, []).append(path)
        for _, files in sorted(sessions.items(), key=lambda item: item[0].relative_to(root).parts):
            files.sort(key=_call_order)
            yield SourceUnit(tuple(files), files[-1].relative_to(root).as_posix())

    def rows(self, unit: SourceUnit) -> Iterator[RawRow | RowQuarantined | RowDropped]:
        folder = PurePosixPath(unit.name).parent
        newer: list[str] = []
        for index in reversed(range(len(unit.paths))):
            path = unit.paths[index]
            name = (folder / path.name).as_posix()
            try:
                parsed = json_document(unit, path)
            except RowQuarantined as broken:
                yield RowQuarantined(broken.reason, file=name)
                continue
            messages = parsed.value.get("messages") if isinstance(parsed.value, dict) else None
            if not isinstance(messages, list):
                yield RowQuarantined("wrong schema: a call is not an object with messages", file=name)
                continue
            digests = [_digest(message) for message in messages]
            if newer and digests == newer[: len(digests)]:
                yield RowDropped("superseded prefix", file=name)
                continue
            newer = digests
            yield RawRow(name, index, None, parsed.value, None, parsed.repairs)

    def convert(self, row: RawRow, tools: Sequence[Tool] | None) -> Converted:
        if not isinstance(row.value, dict) or not isinstance(row.value.get("messages"), list):
            raise RowQuarantined("wrong schema: a call is not an object with messages")
        call = cast("dict[str, Any]", row.value)
        messages = cast("list[Any]", call["messages"])
        kwargs: dict[str, Any] = call["kwargs"] if isinstance(call.get("kwargs"), dict) else {}
        row_tools = parse_tools(kwargs.get("tools")) or _tools_of_prompt(messages)
        calls_are_text = not any(isinstance(message, dict) and message.get("tool_calls") for message in messages)
        conversation = Conversation(calls_carry_ids=not calls_are_text)
        for message in (*messages, *_replies(call.get("response"))):
            if isinstance(message, dict) and message.get("role") == "user" and calls_are_text and conversation.awaits_result:
                content = content_text(message.get("content"), conversation)
                conversation.tool(content, is_error=_is_error(content))
            elif isinstance(message, dict) and message.get("role") == "tool":
                content = content_text(message.get("content"), conversation)
                add_message(conversation, {**message, "content": content, "is_error": _is_error(content)})
            else:
                add_message(conversation, message, tools=row_tools or tools or ())
        task_id = PurePosixPath(row.name).parent.name or None
        parallel = kwargs.get("parallel_tool_calls") is not False
        return converted(conversation, row, Facts(self.name, Domain.SWE, task_id=task_id, parallel_tool_calls=parallel), row_tools, tools)


ADAPTER = OpenHandsAdapter()


def _call_order(path: Path) -> tuple[float, str]:
    match = _CALL_TIME.search(path.name)
    return (float(match.group(1)) if match else 0.0), path.name


def _digest(message: Any) -> str:
    """Identity of a message across calls; the caching marks move from call to call."""
    if not isinstance(message, dict):
        return content_id(message)
    content = message.get("content")
    parts = cast("list[Any]", content) if isinstance(content, list) else [content]
    shown = [{key: value for key, value in part.items() if key != "cache_control"} if isinstance(part, dict) else part for part in parts]
    return content_id(message.get("role"), [part for part in shown if part is not None], message.get("tool_calls"), message.get("tool_call_id"))


def _tools_of_prompt(messages: Sequence[Any]) -> tuple[Tool, ...]:
    first = messages[0] if messages else None
    return tools_in_text(content_text(first.get("content"), Conversation())) if isinstance(first, dict) else ()


def _replies(response: Any) -> tuple[Any, ...]:
    choices = response.get("choices") if isinstance(response, dict) else None
    first = choices[0] if isinstance(choices, list) and choices else None
    message = first.get("message") if isinstance(first, dict) else None
    return (message,) if isinstance(message, dict) else ()


def _is_error(observation: str) -> bool:
    return observation.startswith("ERROR:") or exit_code(observation[-200:]) not in (None, 0)
