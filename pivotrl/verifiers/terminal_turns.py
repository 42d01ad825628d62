"""A Terminus reply's arguments as what they ask the harness to do. Called by `terminal` and `terminal_place`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pivotrl.types import ToolCall

TERMINUS_1 = "terminus1"
# A longer list is no turn of an agent.
_MAX_COMMANDS = 256


@dataclass(frozen=True, slots=True)
class Turn:
    """What a Terminus reply asks the harness to do."""

    keystrokes: tuple[str, ...]
    is_complete: bool


def read_turn(call: ToolCall) -> Turn | None:
    """The turn that a call's arguments describe, or None where they break the harness's schema.

    Terminus-2: {analysis, plan, commands: [{keystrokes, duration}], task_complete}; Terminus-1: {state_analysis, explanation,
    commands: [{keystrokes, is_blocking, timeout_sec}], is_task_complete}. Only keystrokes are required of a command, and an absent flag is false.
    """
    value = call.arguments_object()
    if value is None:
        return None
    is_first = call.name == TERMINUS_1
    texts = ("state_analysis", "explanation") if is_first else ("analysis", "plan")
    commands, is_complete = value.get("commands"), value.get("is_task_complete" if is_first else "task_complete", False)
    if any(not isinstance(value.get(key), str) for key in texts) or not isinstance(commands, list) or not isinstance(is_complete, bool | None):
        return None
    if len(commands) > _MAX_COMMANDS or not all(_is_command(command, is_first=is_first) for command in commands):
        return None
    return Turn(tuple(command["keystrokes"] for command in commands), bool(is_complete))


def _is_command(command: Any, *, is_first: bool) -> bool:
    if not isinstance(command, dict) or not isinstance(command.get("keystrokes"), str):
        return False
    seconds = command.get("timeout_sec" if is_first else "duration")
    is_number = seconds is None or (isinstance(seconds, int | float) and not isinstance(seconds, bool))
    return is_number and isinstance(command.get("is_blocking"), bool | None)
