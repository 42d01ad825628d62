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

from pivotrl.types import Domain, Message, Role, Tool
from pivotrl.worlds.arguments import BadArguments, make_tool
from pivotrl.worlds.draws import draw_tasks
from pivotrl.worlds.protocol import TaskSplit
from pivotrl.worlds.tool_episode import ToolEpisode

MAX_TURNS = 8
SYSTEM_PROMPT = "Order desk."
STREETS = ("Oak", "Elm", "Bay", "Hill", "Park", "Lake")
_FIRST_ORDER, _LAST_ORDER = 10, 99
_MAX_QUANTITY = 4
_LAST_DAY = 9
# There are millions of tasks; this many of each split can be drawn in seconds.
_MAX_TASKS = 100_000


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


_NOTIFY = {"type": "boolean", "default": True}
TOOLS = (
    make_tool("find", "Look up an order; the other tools act on the order found.", {"id": {"type": "integer"}}, {}),
    make_tool("cancel", "Cancel the order.", {}, {"notify": _NOTIFY}),
    make_tool("refund", "Refund some pieces.", {"qty": {"type": "number"}}, {"notify": _NOTIFY}),
    make_tool("track", "Day of arrival.", {}, {}),
    make_tool("move", "Change the address.", {"to": {"type": "string"}}, {"notify": _NOTIFY}),
    make_tool("escalate", "Hand over to a team.", {"team": {"type": "string"}}, {"level": {"type": "integer", "default": 1}}),
    make_tool("close", "End the conversation.", {}, {}),
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
    def family(self) -> str:
        return self.want.value

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
class OrderEpisode(ToolEpisode):
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

    def outcome(self) -> Mapping[str, Any]:
        return asdict(self.ledger)

    @property
    def tools_by_name(self) -> Mapping[str, Tool]:
        return _TOOLS_BY_NAME

    def _hear(self, text: str) -> None:
        self.messages.append(Message(Role.USER, self._customer(text.lower())))

    def _execute(self, name: str, arguments: Mapping[str, Any]) -> str:
        if name == "find" and arguments["id"] != self.task.order_id:
            raise BadArguments("no such order")
        if name not in ("find", "close") and not self.found:
            raise BadArguments("find first")
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
    domain = Domain.CONVERSATIONAL
    action_format = "hermes"
    tools = TOOLS

    def tasks(self, split: TaskSplit, *, num_tasks: int, seed: int) -> tuple[OrderTask, ...]:
        """The twelve (want, status) cases in turn."""
        return draw_tasks(self.name, tuple(RULES), _draw, split=split, num_tasks=num_tasks, max_tasks=_MAX_TASKS, seed=seed)

    def reset(self, task: OrderTask) -> OrderEpisode:
        opening = OPENINGS[task.want][task.opening].format(id=task.order_id)
        return OrderEpisode(task, messages=[Message(Role.SYSTEM, SYSTEM_PROMPT), Message(Role.USER, opening)])


def _draw(case: tuple[Want, Status], rng: random.Random) -> OrderTask:
    want, status = case
    order_id = rng.randint(_FIRST_ORDER, _LAST_ORDER)
    quantity = rng.randint(2, _MAX_QUANTITY)
    pieces = quantity if rng.random() < 0.5 else rng.randint(1, quantity - 1)
    address = rng.choice(STREETS)
    day, opening = rng.randint(1, _LAST_DAY), rng.randrange(len(OPENINGS[want]))
    task_id = f"{want}-{status}-{order_id}-{pieces}of{quantity}-{address}-day{day}-{opening}"
    return OrderTask(task_id, want, status, order_id, quantity, pieces, address, day, opening)
