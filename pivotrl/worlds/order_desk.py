"""The order desk: a customer writes about one order, the agent looks it up, decides by the desk's rules, acts, answers and closes.

This file is the environment: tasks, tools, scripted customer, consequences and the success check. The scripted expert is in
`order_desk_expert.py`. A right answer can be written in many ways (order of arguments, optional ones left out or written with their default,
2 or 2.0, letter case, wording), and the world accepts all of them; a wrong one changes the order wrongly, and the episode goes on.
"""

from __future__ import annotations

import random
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any

from pivotrl.errors import UserError
from pivotrl.identity import bytes_id, derive_seed
from pivotrl.types import Action, Message, Origin, ParseOutcome, Role, State, Tool, ToolCall, ToolOrigin
from pivotrl.worlds.arguments import BadArguments, read_arguments
from pivotrl.worlds.protocol import TaskSplit

MAX_TURNS = 8
SYSTEM_PROMPT = "Order desk."
STREETS = ("Oak", "Elm", "Bay", "Hill", "Park", "Lake")
_FIRST_ORDER, _LAST_ORDER = 10, 99
_MAX_QUANTITY = 4
_LAST_DAY = 9
# There are millions of tasks; this many of each split can be drawn in seconds.
_MAX_TASKS = 100_000
# Shares of the splits in tenths of the task space: most of it is pretraining's.
_SPLIT_TENTHS = {TaskSplit.TRAIN: range(2), TaskSplit.TEST: range(2, 4), TaskSplit.PRETRAINING: range(4, 10)}


class Want(StrEnum):
    """What the customer asks for."""

    CANCEL = "cancel"
    REFUND = "refund"
    WHERE = "where"
    MOVE = "move"


class Status(StrEnum):
    """Where the order is."""

    NEW = "new"
    SENT = "sent"
    HOME = "home"


class Plan(StrEnum):
    """What the desk does about a request."""

    CANCEL = "cancel"
    REFUND = "refund"
    TRACK = "track"
    MOVE = "move"
    ASK_POST = "post"
    ASK_SHOP = "shop"


RULES: Mapping[tuple[Want, Status], Plan] = {
    (Want.CANCEL, Status.NEW): Plan.CANCEL,
    (Want.CANCEL, Status.SENT): Plan.ASK_POST,
    (Want.CANCEL, Status.HOME): Plan.REFUND,
    (Want.REFUND, Status.NEW): Plan.CANCEL,
    (Want.REFUND, Status.SENT): Plan.ASK_POST,
    (Want.REFUND, Status.HOME): Plan.REFUND,
    (Want.WHERE, Status.NEW): Plan.ASK_SHOP,
    (Want.WHERE, Status.SENT): Plan.TRACK,
    (Want.WHERE, Status.HOME): Plan.ASK_SHOP,
    (Want.MOVE, Status.NEW): Plan.MOVE,
    (Want.MOVE, Status.SENT): Plan.MOVE,
    (Want.MOVE, Status.HOME): Plan.ASK_SHOP,
}
"""The desk's rules: nothing in the prompt states them, so an agent knows them or does not."""

OPENINGS: Mapping[Want, tuple[str, ...]] = {
    Want.CANCEL: ("Please cancel order {id}.", "Can you cancel order {id}?", "I want to cancel order {id}."),
    Want.REFUND: ("Please refund order {id}.", "Can you refund order {id}?", "I want to refund order {id}."),
    Want.WHERE: ("Please say where order {id} is.", "Can you say where order {id} is?", "I ask where order {id} is."),
    Want.MOVE: ("Please move order {id}.", "Can you move order {id}?", "I want to move order {id}."),
}


def _tool(name: str, description: str, required: Mapping[str, Any], optional: Mapping[str, Any]) -> Tool:
    schema = {"type": "object", "properties": {**required, **optional}, "required": list(required), "additionalProperties": False}
    return Tool(name, description, schema)


_NOTIFY = {"type": "boolean", "default": True}
TOOLS = (
    _tool("find", "Look up an order; the other tools act on the order found.", {"id": {"type": "integer"}}, {}),
    _tool("cancel", "Cancel the order.", {}, {"notify": _NOTIFY}),
    _tool("refund", "Refund some pieces.", {"qty": {"type": "number"}}, {"notify": _NOTIFY}),
    _tool("track", "Day of arrival.", {}, {}),
    _tool("move", "Change the address.", {"to": {"type": "string"}}, {"notify": _NOTIFY}),
    _tool("escalate", "Hand over to a team.", {"team": {"type": "string"}}, {"level": {"type": "integer", "default": 1}}),
    _tool("close", "End the conversation.", {}, {}),
)
_TOOLS_BY_NAME = {tool.name: tool for tool in TOOLS}


@dataclass(frozen=True, slots=True)
class OrderTask:
    """One customer with one order."""

    id: str
    want: Want
    status: Status
    order_id: int
    quantity: int
    """Pieces in the order."""
    pieces: int
    """Pieces the customer wants refunded, if it comes to that: at most `quantity`."""
    address: str
    """The new address, if the agent asks for it."""
    day: int
    """Day of arrival, if the agent tracks the order."""
    opening: int
    """Which of `OPENINGS[want]` the customer writes."""

    @property
    def plan(self) -> Plan:
        return RULES[self.want, self.status]


@dataclass(slots=True)
class Ledger:
    """Everything an agent can change. Two ledgers that are equal mean the same end of the story."""

    cancelled: bool = False
    refunded: float = 0.0
    address: str = ""
    teams: tuple[str, ...] = ()
    unconfirmed: bool = False
    """Something was cancelled or refunded before the customer was asked."""
    silent: bool = False
    """The customer was not notified, or a team was called at another level than usual."""
    told: tuple[str, ...] = ()
    """Outcomes named in the agent's last statement."""
    closed: bool = False


def goal(task: OrderTask) -> Ledger:
    """The ledger of a well-handled task."""
    plan = task.plan
    ledger = Ledger(closed=True, told=(outcome_phrase(task, plan),))
    if plan is Plan.CANCEL:
        ledger.cancelled = True
    elif plan is Plan.REFUND:
        ledger.refunded = float(task.pieces)
    elif plan is Plan.MOVE:
        ledger.address = task.address.lower()
    elif plan in (Plan.ASK_POST, Plan.ASK_SHOP):
        ledger.teams = (plan.value,)
    return ledger


def outcome_phrase(task: OrderTask, plan: Plan) -> str:
    """The words, lower case, by which the customer understands what was done."""
    phrases = {
        Plan.CANCEL: "cancelled",
        Plan.REFUND: "refunded",
        Plan.TRACK: f"day {task.day}",
        Plan.MOVE: "moved",
        Plan.ASK_POST: "post office",
        Plan.ASK_SHOP: "our shop",
    }
    return phrases[plan]


_OUTCOMES = re.compile(r"cancelled|refunded|moved|post office|our shop|day \d+")


@dataclass(slots=True)
class OrderEpisode:
    """One conversation (`protocol.Episode`). What the customer has agreed to and what was done are open for the scripted expert to read."""

    task: OrderTask
    ledger: Ledger = field(default_factory=Ledger)
    messages: list[Message] = field(default_factory=list)
    found: bool = False
    tracked: bool = False
    agreed: set[Plan] = field(default_factory=set)
    num_turns: int = 0

    @property
    def task_id(self) -> str:
        return self.task.id

    @property
    def is_done(self) -> bool:
        return self.ledger.closed or self.num_turns >= MAX_TURNS

    @property
    def success(self) -> bool:
        return self.ledger == goal(self.task)

    def state(self) -> State:
        return State(tuple(self.messages), TOOLS, ToolOrigin.ROW)

    def outcome(self) -> Mapping[str, Any]:
        return asdict(self.ledger)

    def act(self, action: Action) -> None:
        self.num_turns += 1
        message = Message(Role.ASSISTANT, action.content, action.tool_calls, action.reasoning, origin=Origin.MODEL, parse=action.parse)
        self.messages.append(message)
        if action.parse is ParseOutcome.MALFORMED:
            self._say_tool("error: bad call", name=None, is_error=True)
        elif action.tool_calls:
            for call in action.tool_calls:
                self._call(call)
        else:
            self.messages.append(Message(Role.USER, self._customer(action.content.lower())))

    def _call(self, call: ToolCall) -> None:
        tool = _TOOLS_BY_NAME.get(call.name)
        if tool is None:
            self._say_tool("error: no such tool", name=call.name, is_error=True)
            return
        try:
            arguments = read_arguments(tool.parameters, call)
        except BadArguments as error:
            self._say_tool(f"error: {error}", name=call.name, is_error=True)
            return
        if tool.name == "find" and arguments["id"] != self.task.order_id:
            self._say_tool("error: no such order", name=call.name, is_error=True)
        elif tool.name not in ("find", "close") and not self.found:
            self._say_tool("error: find first", name=call.name, is_error=True)
        else:
            self._say_tool(self._execute(tool.name, arguments), name=call.name, is_error=False)

    def _say_tool(self, text: str, *, name: str | None, is_error: bool) -> None:
        self.messages.append(Message(Role.TOOL, text, name=name, is_error=is_error))

    def _execute(self, name: str, arguments: Mapping[str, Any]) -> str:
        ledger = self.ledger
        if name == "find":
            self.found = True
            return f"{self.task.status}, {self.task.quantity} pieces"
        if name == "track":
            self.tracked = True
            return f"day {self.task.day}"
        if name == "close":
            ledger.closed = True
            return "closed"
        if name in ("cancel", "refund"):
            ledger.unconfirmed |= Plan(name) not in self.agreed
        if name == "cancel":
            ledger.cancelled = True
        elif name == "refund":
            ledger.refunded += float(arguments["qty"])
        elif name == "move":
            ledger.address = " ".join(arguments["to"].lower().split())
        elif name == "escalate":
            ledger.teams = (*ledger.teams, arguments["team"].strip().lower())
            ledger.silent |= arguments["level"] != 1
        if "notify" in arguments:
            ledger.silent |= not arguments["notify"]
        return "ok"

    def _customer(self, text: str) -> str:
        """The scripted customer's reply to a message in lower case: agrees to what is asked, thanks for what is told."""
        if "?" in text:
            if "address" in text:
                self.agreed.add(Plan.MOVE)
                return self.task.address
            if "cancel" in text:
                self.agreed.add(Plan.CANCEL)
                return "Yes."
            if "refund" in text:
                self.agreed.add(Plan.REFUND)
                return "Yes, all." if self.task.pieces == self.task.quantity else f"Only {self.task.pieces}."
            return "What?"
        self.ledger.told = tuple(_OUTCOMES.findall(text))
        return "Thanks." if self.ledger.told else "And?"


class OrderDesk:
    """The order desk as a `protocol.World`."""

    name = "order_desk"
    tools = TOOLS

    def tasks(self, split: TaskSplit, *, num_tasks: int, seed: int) -> tuple[OrderTask, ...]:
        """Tasks drawn without repetition, the twelve (want, status) cases in turn, so that every split covers them evenly."""
        if num_tasks > _MAX_TASKS:
            raise UserError(
                f"the world is asked for {num_tasks} {split} tasks", rule=f"the order desk gives {_MAX_TASKS} at most", fix="ask for fewer"
            )
        rng = random.Random(derive_seed(seed, "order_desk", "tasks", split))
        cases, found = tuple(RULES), dict[str, OrderTask]()
        while len(found) < num_tasks:
            task = _draw(*cases[len(found) % len(cases)], rng)
            if split_of(task.id) is split:
                found.setdefault(task.id, task)
        return tuple(found.values())

    def reset(self, task: OrderTask) -> OrderEpisode:
        opening = OPENINGS[task.want][task.opening].format(id=task.order_id)
        return OrderEpisode(task, messages=[Message(Role.SYSTEM, SYSTEM_PROMPT), Message(Role.USER, opening)])


def split_of(task_id: str) -> TaskSplit:
    """The split of a task by hash of its id, so that splits are disjoint whatever the seed and the sizes."""
    tenth = int(bytes_id(task_id.encode()), 16) % 10
    return next(split for split, tenths in _SPLIT_TENTHS.items() if tenth in tenths)


def _draw(want: Want, status: Status, rng: random.Random) -> OrderTask:
    order_id = rng.randint(_FIRST_ORDER, _LAST_ORDER)
    quantity = rng.randint(2, _MAX_QUANTITY)
    pieces = quantity if rng.random() < 0.5 else rng.randint(1, quantity - 1)
    address = rng.choice(STREETS)
    day, opening = rng.randint(1, _LAST_DAY), rng.randrange(len(OPENINGS[want]))
    task_id = f"{want}-{status}-{order_id}-{pieces}of{quantity}-{address}-day{day}-{opening}"
    return OrderTask(task_id, want, status, order_id, quantity, pieces, address, day, opening)
