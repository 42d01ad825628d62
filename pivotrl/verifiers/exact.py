"""Eq. 2, the strict reward: the action is the expert's, as written. The ablation that functional verifiers are compared with."""

from __future__ import annotations

from pivotrl.types import Action, ParseOutcome, State, Verdict


class ExactVerifier:
    """r_strict(s, a) = 1[a = a*(s)] on content and calls (names and argument text, in order). Thinking and call ids are not part of it."""

    def verify(self, state: State, expert: Action, action: Action) -> Verdict:  # noqa: ARG002 - the protocol's argument
        if action.parse is ParseOutcome.MALFORMED:
            return Verdict.invalid("malformed")
        if not action.tool_calls and not action.content.strip():
            return Verdict.invalid("no action")
        if expert.parse is not ParseOutcome.MALFORMED and _as_written(expert) == _as_written(action):
            return Verdict.ok(1.0, "identical")
        return Verdict.ok(0.0, "not identical")


def _as_written(action: Action) -> tuple[str, tuple[tuple[str, str], ...]]:
    return action.content, tuple((call.name, call.arguments) for call in action.tool_calls)
