"""What an action format is: how a policy writes one action as text, and how that text is read back.

Three rules hold for every format. Reading never raises: text is hostile input. Writing is honest: `render` reads its own text
back and refuses an action that would come back changed, so an expert action that a format cannot express is a counted
reason, never a silently different target. History is never lost: `transcribe` writes any action, a malformed one included.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, Protocol

from pivotrl.types import Action, ParseOutcome, Tool, ToolCall


class InexpressibleAction(ValueError):
    """An action that a format cannot write so that it reads back equal; the message is a short countable reason."""


class ActionFormat(Protocol):
    """One way to write actions. Stateless and pure; looked up by name in `registry.action_format`."""

    @property
    def name(self) -> str:
        """The value of `render.action_format` that chooses this format."""
        ...

    def render(self, action: Action, tools: Sequence[Tool] = ()) -> str:
        """The completion text of `action`, without the end-of-turn token; `parse` of it is `same_action` as `action`.

        Args:
            tools: schemas that say how arguments are typed. Only formats that write arguments untyped look at them, and then
                `parse` must be given the same ones.

        Raises:
            InexpressibleAction: for a malformed action, and for one that would not read back equal.
        """
        ...

    def transcribe(self, action: Action, tools: Sequence[Tool] = ()) -> str:
        """Like `render` for a message of the history: never raises, and writes broken arguments as they are."""
        ...

    def parse(self, text: str, tools: Sequence[Tool] = ()) -> Action:
        """The action a completion holds. Never raises; linear in the length of `text`.

        A malformed completion keeps its full text as `content` (thinking included, `reasoning` None) and the calls that could be
        read as `tool_calls`. Calls inside thinking are not actions. Calls that are read have no id.
        """
        ...


def json_text(value: Any) -> str:
    """JSON of an arguments value in the spelling chat templates use (spaces after separators, no ASCII escapes).

    The one spelling for arguments that a source stores as objects: strict equality (Eq. 2) compares argument text.

    >>> json_text({"a": [1, None]})
    '{"a": [1, null]}'
    """
    return json.dumps(value, ensure_ascii=False)


def malformed(text: str, calls: Sequence[ToolCall] = ()) -> Action:
    """The action of a completion that begins an action and cannot be read."""
    return Action(text, tuple(calls), None, ParseOutcome.MALFORMED)


def same_action(first: Action, second: Action) -> bool:
    """Equality of what was written: up to call ids, JSON spelling of arguments, and empty versus no reasoning.

    Types count: 1, 1.0, true and "1" are four different arguments.
    """
    return _identity(first) == _identity(second)


def _identity(action: Action) -> tuple[Any, ...]:
    calls = tuple((call.name, _arguments_identity(call)) for call in action.tool_calls)
    return action.content, calls, action.reasoning or None, action.parse


def _arguments_identity(call: ToolCall) -> str:
    value = call.arguments_object()
    return call.arguments if value is None else json.dumps(value, sort_keys=True)


def render_faithfully(action_format: ActionFormat, action: Action, tools: Sequence[Tool]) -> str:
    """The body of every format's `render`: write, read back, compare.

    Raises:
        InexpressibleAction: see `ActionFormat.render`.
    """
    if action.parse is ParseOutcome.MALFORMED:
        raise InexpressibleAction("malformed action")
    if (action.parse is ParseOutcome.PARSED) != bool(action.tool_calls):
        raise InexpressibleAction("calls and parse outcome disagree")
    if any(call.arguments_object() is None for call in action.tool_calls):
        raise InexpressibleAction("arguments are not a JSON object")
    text = action_format.transcribe(action, tools)
    if not same_action(action_format.parse(text, tools), action):
        raise InexpressibleAction("text reads back as another action")
    return text
