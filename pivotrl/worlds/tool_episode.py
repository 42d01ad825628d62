"""The part of an episode that all worlds with JSON tools share: reading calls, answering mistakes with errors, keeping the conversation."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

from pivotrl.types import Action, Message, ParseOutcome, Role, State, Tool, ToolCall, ToolOrigin
from pivotrl.worlds.arguments import BadArguments, read_arguments


class ToolEpisode(ABC):
    """A `protocol.Episode` whose actions are calls of JSON tools and messages. Parallel calls are carried out in order."""

    __slots__ = ()
    messages: list[Message]
    num_turns: int

    @property
    @abstractmethod
    def tools_by_name(self) -> Mapping[str, Tool]:
        """The world's tools, in the order in which a prompt shows them."""

    @abstractmethod
    def _execute(self, name: str, arguments: Mapping[str, Any]) -> str:
        """Carries out a call whose arguments fit the schema and answers it.

        Raises:
            BadArguments: for a call that cannot be carried out; the text is the answer.
        """

    @abstractmethod
    def _hear(self, text: str) -> None:
        """Takes a message that calls nothing."""

    def state(self) -> State:
        return State(tuple(self.messages), tuple(self.tools_by_name.values()), ToolOrigin.ROW)

    def act(self, action: Action) -> None:
        self.num_turns += 1
        self.messages.append(action.as_message())
        if action.parse is ParseOutcome.MALFORMED:
            self._answer("error: bad call", name=None, is_error=True)
        elif action.tool_calls:
            for call in action.tool_calls:
                self._call(call)
        else:
            self._hear(action.content)

    def _call(self, call: ToolCall) -> None:
        tool = self.tools_by_name.get(call.name)
        try:
            if tool is None:
                raise BadArguments("no such tool")
            answer, is_error = self._execute(tool.name, read_arguments(tool.parameters, call)), False
        except BadArguments as error:
            answer, is_error = f"error: {error}", True
        self._answer(answer, name=call.name, is_error=is_error)

    def _answer(self, text: str, *, name: str | None, is_error: bool) -> None:
        self.messages.append(Message(Role.TOOL, text, name=name, is_error=is_error))
