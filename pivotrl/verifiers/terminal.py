"""Eq. 6 for terminal turns in the forms of Terminus-1 and Terminus-2: the same keystrokes by what they do, the same claim of completion.

Analysis, plan and durations do not count. Calls of other tools (a terminal agent may have some) are compared as `swe` does by arguments.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pivotrl.actions.terminus2 import TOOL_NAME as TERMINUS_2
from pivotrl.config.verifiers import TerminalVerifierConfig
from pivotrl.types import Action, State, ToolCall, Verdict
from pivotrl.verifiers.canonical import TooDeep
from pivotrl.verifiers.coding_calls import CodingCalls
from pivotrl.verifiers.keystrokes import Key, Stroke, Typed, statements_of, strokes
from pivotrl.verifiers.shell_commands import Effect
from pivotrl.verifiers.shell_effects import effect
from pivotrl.verifiers.swe import speech_verdict, verify_arguments

TERMINUS_1 = "terminus1"
# A longer list is no turn of an agent.
_MAX_COMMANDS = 256


@dataclass(frozen=True, slots=True)
class Turn:
    """What a Terminus reply asks the harness to do."""

    keystrokes: tuple[str, ...]
    is_complete: bool


class TerminalVerifier:
    """Binary reward for one terminal turn.

    Reasons: ``malformed``, ``no action``, ``wrong schema`` and ``arguments nested too deeply`` (invalid); ``same message``, ``same commands``,
    ``same calls`` (reward 1); ``premature completion``, ``missing completion``, ``no commands``, ``unexpected commands``,
    ``command not executed``, ``destructive command``, ``different commands``, ``wrong tool``, ``missing call``, ``surplus call``,
    ``called instead of speaking``, ``spoke instead of calling``, ``different message``, ``expert call is malformed`` and for other tools the
    reasons of `swe` (reward 0).
    """

    def __init__(self, config: TerminalVerifierConfig) -> None:
        self._shell = config.shell
        self._calls = CodingCalls(config.shell)

    def verify(self, state: State, expert: Action, action: Action) -> Verdict:
        if (verdict := speech_verdict(expert, action)) is not None:
            return verdict
        if len(action.tool_calls) != len(expert.tool_calls):
            reason = "surplus call" if len(action.tool_calls) > len(expert.tool_calls) else "missing call"
            return Verdict.ok(0.0, reason, expert_calls=len(expert.tool_calls), action_calls=len(action.tool_calls))
        verdict = Verdict.ok(1.0, "same calls")
        for ours, theirs in zip(expert.tool_calls, action.tool_calls, strict=True):
            if ours.name != theirs.name:
                return Verdict.ok(0.0, "wrong tool", expert_tool=ours.name, action_tool=theirs.name)
            verdict = self._verify_call(state, ours, theirs)
            if verdict.reward < 1:
                return verdict
        return verdict

    def _verify_call(self, state: State, expert: ToolCall, action: ToolCall) -> Verdict:
        if expert.name not in (TERMINUS_1, TERMINUS_2):
            try:
                return verify_arguments(self._calls, state, [expert], [action])
            except TooDeep:
                return Verdict.invalid("arguments nested too deeply")
        if action.arguments_object() is None:
            return Verdict.invalid("malformed")
        wanted, found = read_turn(expert), read_turn(action)
        if found is None:
            return Verdict.invalid("wrong schema")
        if wanted is None:
            return Verdict.ok(0.0, "expert call is malformed")
        return self._verify_turn(wanted, found)

    def _verify_turn(self, expert: Turn, action: Turn) -> Verdict:
        if expert.is_complete != action.is_complete:
            return Verdict.ok(0.0, "premature completion" if action.is_complete else "missing completion")
        if expert.keystrokes == action.keystrokes:
            return Verdict.ok(1.0, "same commands")
        wanted, found = self._strokes(expert), self._strokes(action)
        if wanted == found:
            return Verdict.ok(1.0, "same commands")
        if not found or not wanted:
            return Verdict.ok(0.0, "unexpected commands" if found else "no commands")
        worst = _worst(found)
        if worst is Effect.DESTROYS and _worst(wanted) is not Effect.DESTROYS:
            return Verdict.ok(0.0, "destructive command", effect=worst.name)
        if isinstance(found[-1], Typed) and not isinstance(wanted[-1], Typed) and not found[-1].text.endswith("\n"):
            return Verdict.ok(0.0, "command not executed", effect=worst.name)
        return Verdict.ok(0.0, "different commands", effect=worst.name)

    def _strokes(self, turn: Turn) -> tuple[Stroke, ...]:
        return strokes(turn.keystrokes, splits_chains=self._shell.chains == "steps", orders_reads=self._shell.read_order == "any")


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


def _worst(found: Sequence[Stroke]) -> Effect:
    typed = any(isinstance(stroke, Key | Typed) for stroke in found)
    worst = max((effect(node) for node, _ in statements_of(found)), default=Effect.READS)
    return max(worst, Effect.UNKNOWN) if typed else worst
