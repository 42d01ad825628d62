"""Builds one conversation in the product's form: pairs tool results with calls, mends call ids, names the repairs that were needed.

Every adapter feeds a `Conversation` message by message in the agent's view and ends with `converted`. Pairing is by id where the id fits an open
call, else by adjacency: real sources repeat ids within a conversation, leave them out, or leave them empty.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from pivotrl.trajectories.encoded import encode_trajectory
from pivotrl.trajectories.source import Converted, RawRow, RowDropped
from pivotrl.trajectories.tools import resolve_tools
from pivotrl.types import Domain, Message, Origin, Outcome, ParseOutcome, Role, Tool, ToolCall, ToolOrigin, Trajectory

REPAIR_IDS_MISSING = "tool call ids missing, numbered"
REPAIR_IDS_REPEATED = "tool call ids repeated, numbered"
REPAIR_ADJACENCY = "tool result id unknown, paired by adjacency"
REPAIR_ORPHAN = "tool result without a call"
REPAIR_UNANSWERED = "tool call without a result"

# A reward at or above this is a solved task; sources store 1.0 as a float sum.
SOLVED_REWARD = 1.0 - 1e-6


@dataclass(frozen=True, slots=True)
class Facts:
    """What a source says about a whole episode."""

    source_format: str
    domain: Domain
    outcome: Outcome = Outcome.UNKNOWN
    reward: float | None = None
    task_id: str | None = None
    """None where the source names no task: the trajectory's own id is used."""
    parallel_tool_calls: bool = True
    has_tool_list: bool = True
    """False where the agent was given no tools: its action is a text in a form that the prompt asks for (Terminus-2)."""


class Conversation:
    """Messages so far, open calls and repairs. Written to by one adapter for one trajectory."""

    __slots__ = ("_calls_carry_ids", "_ids", "_is_before_user", "_is_turn_open", "_num_calls", "_open", "_pairs", "_renumber", "messages", "repairs")

    def __init__(self, *, calls_carry_ids: bool = True) -> None:
        """`calls_carry_ids` is False for formats whose calls are text and never have ids: numbering them is no repair."""
        self.messages: list[Message] = []
        self.repairs: set[str] = set()
        self._calls_carry_ids = calls_carry_ids
        self._ids: set[str] = set()
        self._open: list[tuple[int, ToolCall]] = []
        self._pairs: dict[int, int] = {}
        self._num_calls = 0
        self._renumber = False
        self._is_turn_open = False
        self._is_before_user = True

    @property
    def awaits_result(self) -> bool:
        """Whether a call of the last assistant turn has no result yet."""
        return bool(self._open)

    @property
    def is_before_user(self) -> bool:
        """Whether nobody but the system has spoken so far."""
        return self._is_before_user

    def system(self, content: str) -> None:
        self.messages.append(Message(Role.SYSTEM, content, origin=Origin.HARNESS))

    def user(self, content: str, *, origin: Origin = Origin.ENVIRONMENT) -> None:
        """A user turn. Calls that are open stay without a result."""
        self._close_calls()
        self._is_before_user = False
        self.messages.append(Message(Role.USER, content, origin=origin))

    def assistant(
        self,
        content: str,
        calls: tuple[ToolCall, ...] = (),
        *,
        reasoning: str | None = None,
        origin: Origin = Origin.MODEL,
        parse: ParseOutcome | None = None,
        awaits_result: bool = True,
    ) -> None:
        """An assistant turn.

        Args:
            parse: parsed where there are calls and else absent, if None.
            awaits_result: False where the answer to the calls is a user turn, as in Terminus-2: nothing will be paired with them.
        """
        if self._open and not self._is_turn_open:
            self._close_calls()
        self._is_before_user = False
        for call in calls:
            self._register(call, awaits_result=awaits_result)
        self._is_turn_open = True
        if parse is None:
            parse = ParseOutcome.PARSED if calls else ParseOutcome.ABSENT
        self.messages.append(Message(Role.ASSISTANT, content, calls, reasoning or None, origin=origin, parse=parse))

    def tool(self, content: str, *, call_id: str | None = None, name: str | None = None, is_error: bool = False) -> None:
        """A tool result, paired with an open call."""
        self._is_turn_open = self._is_before_user = False
        paired = self._take(call_id)
        if paired is None:
            self.repairs.add(REPAIR_ORPHAN)
            self.messages.append(Message(Role.TOOL, content, name=name, is_error=is_error))
            return
        number, call = paired
        self._pairs[len(self.messages)] = number
        self.messages.append(Message(Role.TOOL, content, tool_call_id=call.id, name=name or call.name, is_error=is_error))

    def finish(self) -> tuple[Message, ...]:
        """The messages; where any call id was missing or repeated, all of them are ``call_<number>``."""
        return tuple(self._numbered() if self._renumber else self.messages)

    def _register(self, call: ToolCall, *, awaits_result: bool) -> None:
        if not call.id:
            self._renumber = True
            if self._calls_carry_ids:
                self.repairs.add(REPAIR_IDS_MISSING)
        elif call.id in self._ids:
            self._renumber = True
            self.repairs.add(REPAIR_IDS_REPEATED)
        else:
            self._ids.add(call.id)
        if awaits_result:
            self._open.append((self._num_calls, call))
        self._num_calls += 1

    def _take(self, call_id: str | None) -> tuple[int, ToolCall] | None:
        if not self._open:
            return None
        if call_id:
            for position, (_, call) in enumerate(self._open):
                if call.id == call_id:
                    return self._open.pop(position)
            self.repairs.add(REPAIR_ADJACENCY)
        return self._open.pop(0)

    def _close_calls(self) -> None:
        if self._open:
            self.repairs.add(REPAIR_UNANSWERED)
            self._open.clear()
        self._is_turn_open = False

    def _numbered(self) -> Iterable[Message]:
        number = 0
        for index, message in enumerate(self.messages):
            if message.tool_calls:
                calls = tuple(ToolCall(call.name, call.arguments, f"call_{number + i}") for i, call in enumerate(message.tool_calls))
                number += len(calls)
                # Not dataclasses.replace, which takes three times as long.
                yield Message(Role.ASSISTANT, message.content, calls, message.reasoning, origin=message.origin, parse=message.parse)
            elif index in self._pairs:
                call_id = f"call_{self._pairs[index]}"
                yield Message(Role.TOOL, message.content, tool_call_id=call_id, name=message.name, is_error=message.is_error)
            else:
                yield message


def converted(conversation: Conversation, row: RawRow, facts: Facts, row_tools: Sequence[Tool], file_tools: Sequence[Tool] | None) -> Converted:
    """The trajectory of a finished conversation.

    Raises:
        RowDropped: where no assistant turn was written by the model.
    """
    messages = conversation.finish()
    if not any(message.role is Role.ASSISTANT and message.origin is Origin.MODEL for message in messages):
        raise RowDropped("no assistant turn written by the model")
    tools, tool_origin = resolve_tools(row_tools, file_tools, messages) if facts.has_tool_list else ((), ToolOrigin.NONE)
    encoded = encode_trajectory(messages, tools)
    trajectory_id = encoded.content_id()
    trajectory = Trajectory(
        id=trajectory_id,
        source_format=facts.source_format,
        source_file=row.name,
        source_index=row.index,
        task_id=facts.task_id or trajectory_id,
        domain=facts.domain,
        outcome=facts.outcome,
        reward=facts.reward,
        messages=messages,
        tools=tools,
        tool_origin=tool_origin,
        parallel_tool_calls=facts.parallel_tool_calls,
    )
    return Converted(trajectory, tuple(sorted(conversation.repairs)), encoded)


def reward_outcome(value: object) -> tuple[Outcome, float | None]:
    """Outcome and reward of a source whose reward is 1 for a solved task: below 1 failed, no number is unknown."""
    if not isinstance(value, int | float):
        return Outcome.UNKNOWN, None
    return (Outcome.SUCCESS if value >= SOLVED_REWARD else Outcome.FAILURE), float(value)
