"""Eq. 6 for software engineering turns at three granularities: the tool's name (the paper), its target, its arguments.

`name` is deliberately coarse and stays so: every call of the right tool passes, ``rm -rf /`` where the expert listed a directory included.
`target` asks for the right file, command or symbol; `arguments` for a call that does the same (`coding_calls`).
"""

from __future__ import annotations

from collections.abc import Sequence

from pivotrl.config.verifiers import SweVerifierConfig
from pivotrl.types import Action, State, ToolCall, Verdict
from pivotrl.verifiers.canonical import TooDeep
from pivotrl.verifiers.coding_calls import CodingCalls, same_target
from pivotrl.verifiers.message import fault_of, verify_message


class SweVerifier:
    """Binary reward for one turn of a coding agent. Several calls are compared in order: what one does, the next one finds.

    Reasons: ``malformed``, ``no action`` and ``arguments nested too deeply`` (invalid); ``same message``, ``same tool``, ``same target``,
    ``same calls`` (reward 1); ``called instead of speaking``, ``spoke instead of calling``, ``different message``, ``missing call``,
    ``surplus call``, ``wrong tool``, ``wrong target``, ``destructive command``, ``missing argument``, ``unexpected argument``,
    ``wrong argument value``, ``expert call is malformed`` (reward 0).
    """

    def __init__(self, config: SweVerifierConfig) -> None:
        self._granularity = config.granularity
        self._calls = CodingCalls(config.shell)

    def verify(self, state: State, expert: Action, action: Action) -> Verdict:
        if (verdict := speech_verdict(expert, action)) is not None:
            return verdict
        try:
            return self._verify_calls(state, expert.tool_calls, action.tool_calls)
        except TooDeep:
            return Verdict.invalid("arguments nested too deeply")

    def _verify_calls(self, state: State, expert: Sequence[ToolCall], action: Sequence[ToolCall]) -> Verdict:
        if any(_is_malformed(call) for call in action):
            return Verdict.invalid("malformed")
        if any(_is_malformed(call) for call in expert):
            return Verdict.ok(0.0, "expert call is malformed")
        if len(action) != len(expert):
            reason = "surplus call" if len(action) > len(expert) else "missing call"
            return Verdict.ok(0.0, reason, expert_calls=len(expert), action_calls=len(action))
        if [call.name for call in expert] != [call.name for call in action]:
            return Verdict.ok(0.0, "wrong tool", expert_tools=[call.name for call in expert], action_tools=[call.name for call in action])
        if self._granularity == "name":
            return Verdict.ok(1.0, "same tool")
        if self._granularity == "target":
            return self._verify_targets(expert, action)
        return verify_arguments(self._calls, state, expert, action)

    def _verify_targets(self, expert: Sequence[ToolCall], action: Sequence[ToolCall]) -> Verdict:
        for ours, theirs in zip(expert, action, strict=True):
            wanted, found = self._calls.target(ours), self._calls.target(theirs)
            if wanted is None or found is None or not same_target(wanted, found):
                return Verdict.ok(0.0, "wrong target", tool=ours.name)
        return Verdict.ok(1.0, "same target")


def speech_verdict(expert: Action, action: Action) -> Verdict | None:
    """The verdict where either side does not call a tool, or None where both do. A message equals another only up to surrounding blanks."""
    if (fault := fault_of(action)) is not None:
        return fault
    if not expert.tool_calls:
        return verify_message(expert, action, "exact", threshold=1.0)
    return None if action.tool_calls else Verdict.ok(0.0, "spoke instead of calling")


def verify_arguments(calls: CodingCalls, state: State, expert: Sequence[ToolCall], action: Sequence[ToolCall]) -> Verdict:
    """Calls of the same tools, compared in order by what their arguments mean.

    Raises:
        TooDeep: for arguments nested too deeply.
    """
    for ours, theirs in zip(expert, action, strict=True):
        wanted, found = calls.trees(state, ours, theirs)
        if found is None:
            return Verdict.invalid("malformed")
        if wanted is None:
            return Verdict.ok(0.0, "expert call is malformed")
        if (differs := calls.difference(wanted, found)) is not None:
            reason, argument = differs
            return Verdict.ok(0.0, reason, tool=ours.name, argument=argument)
    return Verdict.ok(1.0, "same calls")


def _is_malformed(call: ToolCall) -> bool:
    return bool(call.arguments.strip()) and call.arguments_object() is None
