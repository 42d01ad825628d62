"""Eq. 6 for terminal turns in the forms of Terminus-1 and Terminus-2: the same keystrokes by what they do, the same claim of completion.

Analysis, plan and durations do not count. Paths are compared in the directory where the conversation shows the shell (`terminal_place`). Calls of
other tools (a terminal agent may have some) are compared as `swe` does by arguments.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import lru_cache

from pivotrl.actions.terminus2 import TOOL_NAME as TERMINUS_2
from pivotrl.config.verifiers import TerminalVerifierConfig
from pivotrl.types import Action, Message, State, ToolCall, Verdict
from pivotrl.verifiers.canonical import TooDeep
from pivotrl.verifiers.coding_calls import CodingCalls
from pivotrl.verifiers.keystrokes import Key, Stroke, Typed, statements_of, strokes
from pivotrl.verifiers.shell_commands import Effect
from pivotrl.verifiers.shell_effects import commands, effect
from pivotrl.verifiers.swe import speech_verdict, verify_arguments
from pivotrl.verifiers.terminal_place import NOWHERE, Place, in_place, place_of
from pivotrl.verifiers.terminal_turns import TERMINUS_1, Turn, read_turn

# States of which the place is kept: those of the groups that are judged at one time.
_MAX_PLACES = 256
# Experts' turns that are kept as they were read: one is compared with all rollouts of its candidate.
_MAX_EXPERTS = 1024


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
        self._places: dict[int, tuple[Sequence[Message], Place]] = {}

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
        wanted, found = _read_expert(expert), read_turn(action)
        if found is None:
            return Verdict.invalid("malformed" if action.arguments_object() is None else "wrong schema")
        if wanted is None:
            return Verdict.ok(0.0, "expert call is malformed")
        return self._verify_turn(state, wanted, found)

    def _verify_turn(self, state: State, expert: Turn, action: Turn) -> Verdict:
        if expert.is_complete != action.is_complete:
            return Verdict.ok(0.0, "premature completion" if action.is_complete else "missing completion")
        if expert.keystrokes == action.keystrokes:
            return Verdict.ok(1.0, "same commands")
        wanted, found = self._expert_strokes(expert), self._strokes(action)
        if wanted == found:
            return Verdict.ok(1.0, "same commands")
        if not found or not wanted:
            return Verdict.ok(0.0, "unexpected commands" if found else "no commands")
        worst = _worst(found)
        if self._place(state.messages) != NOWHERE and _programs(wanted) == _programs(found) and self._are_same_in_place(state, expert, action):
            return Verdict.ok(1.0, "same commands")
        if worst is Effect.DESTROYS and _worst(wanted) is not Effect.DESTROYS:
            return Verdict.ok(0.0, "destructive command", effect=worst.name)
        if isinstance(found[-1], Typed) and not isinstance(wanted[-1], Typed) and not found[-1].text.endswith("\n"):
            return Verdict.ok(0.0, "command not executed", effect=worst.name)
        return Verdict.ok(0.0, "different commands", effect=worst.name)

    def _are_same_in_place(self, state: State, expert: Turn, action: Turn) -> bool:
        """Whether both turns do the same in the place that the conversation shows."""
        place = self._place(state.messages)
        is_destructive = Effect.DESTROYS in (_worst(self._strokes(expert)), _worst(self._strokes(action)))
        directory = place.directory_for((*expert.keystrokes, *action.keystrokes), is_destructive=is_destructive)
        if directory is None and not place.directories:
            return False
        real = place.real_in(directory)
        wanted, found = (in_place(self._strokes(turn, directory, real), place, directory, turn.keystrokes) for turn in (expert, action))
        return wanted == found

    def _place(self, messages: Sequence[Message]) -> Place:
        known = self._places.get(id(messages))
        if known is not None and known[0] is messages:
            return known[1]
        place = place_of(messages)
        while len(self._places) >= _MAX_PLACES:
            self._places.pop(next(iter(self._places)), None)
        # The entry holds the messages, so their identity stays theirs.
        self._places[id(messages)] = messages, place
        return place

    def _expert_strokes(self, turn: Turn) -> tuple[Stroke, ...]:
        is_split, is_ordered = self._shell.chains == "steps", self._shell.read_order == "any"
        return _read_strokes(turn.keystrokes, splits_chains=is_split, orders_reads=is_ordered)

    def _strokes(self, turn: Turn, directory: str | None = None, real: frozenset[str] = frozenset()) -> tuple[Stroke, ...]:
        is_split, is_ordered = self._shell.chains == "steps", self._shell.read_order == "any"
        return strokes(turn.keystrokes, splits_chains=is_split, orders_reads=is_ordered, directory=directory, real=real)


_read_expert = lru_cache(maxsize=_MAX_EXPERTS)(read_turn)
_read_strokes = lru_cache(maxsize=_MAX_EXPERTS)(strokes)


def _worst(found: Sequence[Stroke]) -> Effect:
    typed = any(isinstance(stroke, Key | Typed) for stroke in found)
    worst = max((effect(node) for node, _ in statements_of(found)), default=Effect.READS)
    return max(worst, Effect.UNKNOWN) if typed else worst


def _programs(found: Sequence[Stroke]) -> Counter[str]:
    """How often each program runs, changes of directory aside: what no place makes equal."""
    run = (command.program for node, _ in statements_of(found) for command in commands(node))
    return Counter(program for program in run if isinstance(program, str) and program != "cd")
