"""The order desk's scripted agents: an expert that always succeeds, and a noisy one that writes the base policy's pretraining text.

Both read the episode's true state, which a policy cannot, and both vary how they write the same action (wording, order of
arguments, defaults written out or left out, 2 or 2.0, letter case), so that equality of text says little about equality of meaning.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import replace

from pivotrl.types import Action, ParseOutcome, ToolCall
from pivotrl.worlds.order_desk import OrderEpisode, OrderTask, Plan, Want

type Agent = Callable[[OrderEpisode], Action]

# A wrong decision takes the customer at their word in this share of cases and is any other plan in the rest.
_LITERAL_FRAC = 0.5
# Slips at a turn that needs one fact copied (pieces, team) and at a routine turn, as shares of `noise`.
_COPY_NOISE = 0.5
_ROUTINE_NOISE = 0.05
_LITERAL = {Want.CANCEL: Plan.CANCEL, Want.REFUND: Plan.REFUND, Want.WHERE: Plan.TRACK, Want.MOVE: Plan.MOVE}


def expert(rng: random.Random) -> Agent:
    """An agent that follows the desk's rules from any state that can still be saved."""
    return lambda episode: next_action(episode, episode.task, episode.task.plan, rng)


def noisy_agent(task: OrderTask, noise: float, rng: random.Random) -> Agent:
    """An agent that decides wrongly with probability `noise`, then stands by its decision, and slips now and then on the way."""
    plan = _wrong_plan(task, rng) if rng.random() < noise else task.plan

    def act(episode: OrderEpisode) -> Action:
        if not episode.found:
            seen = replace(task, order_id=task.order_id % 90 + 10) if rng.random() < noise * _ROUTINE_NOISE else task
            return next_action(episode, seen, plan, rng)
        if rng.random() < noise * _ROUTINE_NOISE:
            return _tell(task, _wrong_plan(task, rng), rng)
        if plan is Plan.REFUND and plan in episode.agreed and rng.random() < noise * _COPY_NOISE:
            return next_action(episode, replace(task, pieces=task.pieces % task.quantity + 1), plan, rng)
        return next_action(episode, task, plan, rng)

    return act


def next_action(episode: OrderEpisode, task: OrderTask, plan: Plan, rng: random.Random) -> Action:
    """The next step of carrying out `plan`, believing `task`."""
    if not episode.found:
        return call("find", {"id": task.order_id}, {}, rng)
    if plan in (Plan.CANCEL, Plan.REFUND, Plan.MOVE) and plan not in episode.agreed:
        return _ask(plan, rng)
    if not _is_carried_out(episode, plan):
        return _carry_out(task, plan, rng)
    if not episode.ledger.told:
        return _tell(task, plan, rng)
    return call("close", {}, {}, rng)


def _wrong_plan(task: OrderTask, rng: random.Random) -> Plan:
    literal = _LITERAL[task.want]
    if literal is not task.plan and rng.random() < _LITERAL_FRAC:
        return literal
    return rng.choice([plan for plan in Plan if plan is not task.plan])


def _is_carried_out(episode: OrderEpisode, plan: Plan) -> bool:
    ledger = episode.ledger
    done = {
        Plan.CANCEL: ledger.cancelled,
        Plan.REFUND: ledger.refunded > 0,
        Plan.TRACK: episode.tracked,
        Plan.MOVE: bool(ledger.address),
        Plan.ASK_POST: "post" in ledger.teams,
        Plan.ASK_SHOP: "shop" in ledger.teams,
    }
    return done[plan]


def _carry_out(task: OrderTask, plan: Plan, rng: random.Random) -> Action:
    if plan is Plan.CANCEL:
        return call("cancel", {}, {"notify": True}, rng)
    if plan is Plan.REFUND:
        return call("refund", {"qty": rng.choice((task.pieces, float(task.pieces)))}, {"notify": True}, rng)
    if plan is Plan.TRACK:
        return call("track", {}, {}, rng)
    if plan is Plan.MOVE:
        return call("move", {"to": rng.choice((task.address, task.address.lower()))}, {"notify": True}, rng)
    return call("escalate", {"team": rng.choice((plan.value, plan.value.capitalize()))}, {"level": 1}, rng)


def _ask(plan: Plan, rng: random.Random) -> Action:
    wordings = {
        Plan.CANCEL: ("Cancel it?", "Cancel it now?"),
        Plan.REFUND: ("Refund it?", "Refund it now?"),
        Plan.MOVE: ("New address?", "What new address?"),
    }
    return _message(rng.choice(wordings[plan]), rng)


def _tell(task: OrderTask, plan: Plan, rng: random.Random) -> Action:
    wordings = {
        Plan.CANCEL: ("It is cancelled.", "It is cancelled now."),
        Plan.REFUND: ("It is refunded.", "It is refunded now."),
        Plan.TRACK: (f"It comes on day {task.day}.", f"Sorry, it comes on day {task.day}."),
        Plan.MOVE: ("It is moved.", "It is moved now."),
        Plan.ASK_POST: ("The post office will call.", "The post office will call you."),
        Plan.ASK_SHOP: ("Our shop will write back.", "Our shop will write back soon."),
    }
    return _message(rng.choice(wordings[plan]), rng)


def _message(text: str, rng: random.Random) -> Action:
    return Action(text if rng.random() < 0.8 else f"OK. {text}", (), None, ParseOutcome.ABSENT)


def call(name: str, required: dict[str, object], optional: dict[str, object], rng: random.Random) -> Action:
    """One call written in one of its equivalent ways: arguments in any order, each optional one left out in half of the cases."""
    items = [*required.items(), *((key, value) for key, value in optional.items() if rng.random() < 0.5)]
    rng.shuffle(items)
    return Action("", (ToolCall(name, json.dumps(dict(items))),), None, ParseOutcome.PARSED)
