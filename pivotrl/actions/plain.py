"""Plain text: the whole completion is a message, whatever it holds. Thinking in front is split off where it is closed."""

from __future__ import annotations

from collections.abc import Sequence

from pivotrl.actions.protocol import InexpressibleAction, render_faithfully
from pivotrl.actions.thinking import parse_after_thinking, write_thinking
from pivotrl.types import Action, ParseOutcome, Tool


class PlainFormat:
    """Messages only; an action with calls is inexpressible."""

    name = "plain"

    def render(self, action: Action, tools: Sequence[Tool] = ()) -> str:
        if action.parse is ParseOutcome.PARSED:
            raise InexpressibleAction("calls in plain text")
        return render_faithfully(self, action, tools)

    def transcribe(self, action: Action, tools: Sequence[Tool] = ()) -> str:  # noqa: ARG002 - nothing here is typed
        return write_thinking(action.reasoning, action.content)

    def parse(self, text: str, tools: Sequence[Tool] = ()) -> Action:  # noqa: ARG002 - nothing here is typed
        action = parse_after_thinking(text, _message)
        return _message(text) if action.parse is ParseOutcome.MALFORMED else action


def _message(text: str) -> Action:
    return Action(text, (), None, ParseOutcome.ABSENT)
