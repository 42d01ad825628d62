"""Eq. 6 for conversational tool use: speak or call as the expert did, the same tools, arguments that mean the same.

Stricter than the public graders where those can be exploited (surplus calls, empty arguments, any message passes) and more lenient where they
reject equal meaning (1 and 1.0, defaults, order of sets); `canonical.py` says what equal means.
"""

from __future__ import annotations

from pivotrl.config.verifiers import ToolCallVerifierConfig
from pivotrl.types import Action, State, Verdict
from pivotrl.verifiers.calls import CallsVerifier
from pivotrl.verifiers.message import fault_of, verify_message


class ToolCallVerifier:
    """Reward for one turn of conversational tool use; binary unless the recipe lets surplus calls cost less than everything.

    Reasons: those of `MessageVerifier` and `CallsVerifier`.
    """

    def __init__(self, config: ToolCallVerifierConfig) -> None:
        self._config = config
        self._calls = CallsVerifier(config)

    def verify(self, state: State, expert: Action, action: Action) -> Verdict:
        if (fault := fault_of(action)) is not None:
            return fault
        if not expert.tool_calls:
            return verify_message(expert, action, self._config.message, threshold=self._config.message_similarity)
        if not action.tool_calls:
            return Verdict.ok(0.0, "spoke instead of calling")
        return self._calls.verify_calls(state, expert.tool_calls, action.tool_calls)
