"""Speak or call, and is what is said what the expert said? Exact, by similarity or by facts; a judge may follow in a cascade.

Says nothing about calls: where the expert calls a tool it abstains.
"""

from __future__ import annotations

from pivotrl.config.verifiers import MessageContent, MessageVerifierConfig
from pivotrl.types import Action, ParseOutcome, State, Verdict
from pivotrl.verifiers.text_similarity import read_text, similar_text


class MessageVerifier:
    """Binary reward for one turn on which the expert speaks.

    Reasons: ``malformed``, ``no action`` (invalid); ``same message`` (reward 1); ``called instead of speaking``, ``spoke instead of calling``,
    ``different message`` (reward 0); ``expert calls``, ``message not judged`` (abstention).
    """

    def __init__(self, config: MessageVerifierConfig) -> None:
        self._config = config

    def verify(self, state: State, expert: Action, action: Action) -> Verdict:  # noqa: ARG002 - the protocol's argument
        if (fault := fault_of(action)) is not None:
            return fault
        if expert.tool_calls:
            return Verdict.abstain("expert calls") if action.tool_calls else Verdict.ok(0.0, "spoke instead of calling")
        return verify_message(expert, action, self._config.content, threshold=self._config.message_similarity)


def fault_of(action: Action) -> Verdict | None:
    """The verdict on an action that is none: malformed, or neither call nor text."""
    if action.parse is ParseOutcome.MALFORMED:
        return Verdict.invalid("malformed")
    return None if action.tool_calls or action.content.strip() else Verdict.invalid("no action")


def verify_message(expert: Action, action: Action, content: MessageContent, *, threshold: float) -> Verdict:
    """The verdict on an action where the expert speaks."""
    if action.tool_calls:
        return Verdict.ok(0.0, "called instead of speaking")
    match content:
        case "any":
            is_same = True
        case "exact":
            is_same = expert.content.strip() == action.content.strip()
        case "similarity":
            is_same = similar_text(expert.content, action.content, threshold=threshold)
        case "facts":
            is_same = same_facts(expert.content, action.content)
        case "abstain":
            return Verdict.abstain("message not judged")
    return Verdict.ok(1.0, "same message") if is_same else Verdict.ok(0.0, "different message")


def same_facts(first: str, second: str) -> bool:
    """Whether two messages state the same numbers, codes, deciding words (negations, destructive and directional words) and names, and both ask or
    neither does. A message without any is compared whole: with no fact to hold it, every text would pass."""
    a, b = read_text(first), read_text(second)
    if a.words == b.words and a.words:
        return True
    if not (a.deciding or a.names) or a.asks is not b.asks:
        return False
    return set(a.deciding) == set(b.deciding) and a.names <= b.content and b.names <= a.content
