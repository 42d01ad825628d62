"""The order desk: the expert always wins, equivalent actions are equal to verifier and world, wrong ones lose, splits are disjoint."""

from __future__ import annotations

import json
import random

import pytest

from pivotrl.actions.registry import action_format
from pivotrl.config.schema import ToolCallVerifierConfig
from pivotrl.errors import UserError
from pivotrl.types import Action, ParseOutcome, ToolCall, VerdictKind
from pivotrl.verifiers.tool_call import ToolCallVerifier
from pivotrl.worlds.generate import play
from pivotrl.worlds.order_desk import MAX_TURNS, RULES, TOOLS, OrderDesk, OrderEpisode, OrderTask, Plan, Status, Want
from pivotrl.worlds.order_desk_expert import expert, next_action, noisy_agent
from pivotrl.worlds.protocol import TaskSplit

VERIFIER = ToolCallVerifier(ToolCallVerifierConfig(type="tool_call", message="similarity", message_similarity=0.7))
HERMES = action_format("hermes")
REFUND = OrderTask("t", Want.REFUND, Status.HOME, 47, quantity=3, pieces=2, address="Oak", day=4, opening=0)
MOVE = OrderTask("t", Want.MOVE, Status.NEW, 47, quantity=3, pieces=3, address="Oak", day=4, opening=0)
POST = OrderTask("t", Want.CANCEL, Status.SENT, 47, quantity=3, pieces=3, address="Oak", day=4, opening=0)


def call(name: str, **arguments: object) -> Action:
    return Action("", (ToolCall(name, json.dumps(arguments)),), None, ParseOutcome.PARSED)


def say(text: str) -> Action:
    return Action(text, (), None, ParseOutcome.ABSENT)


def run(task: OrderTask, *actions: Action) -> OrderEpisode:
    episode = OrderDesk().reset(task)
    for action in actions:
        episode.act(action)
    return episode


def test_the_expert_succeeds_on_every_case_in_four_to_six_turns() -> None:
    for task in OrderDesk().tasks(TaskSplit.TRAIN, num_tasks=240, seed=3):
        episode = play(OrderDesk().reset(task), expert(random.Random(task.id)))
        assert episode.success, task.id
        assert 4 <= episode.num_turns <= 6


def test_the_expert_writes_the_same_thing_in_many_ways() -> None:
    """Text equality would call most of a demonstration's right answers wrong."""
    texts = set()
    for seed in range(50):
        episode = play(OrderDesk().reset(REFUND), expert(random.Random(seed)))
        calls = [message.tool_calls[0].arguments for message in episode.messages if message.tool_calls]
        texts.add(calls[1])
        assert episode.success
    assert {'{"qty": 2}', '{"qty": 2.0}', '{"notify": true, "qty": 2}', '{"qty": 2.0, "notify": true}'} <= texts


@pytest.mark.parametrize(
    ("task", "expert_call", "same"),
    [
        (REFUND, call("refund", qty=2), call("refund", notify=True, qty=2.0)),
        (MOVE, call("move", to="Oak"), call("move", notify=True, to=" oak ")),
        (POST, call("escalate", team="post"), call("escalate", level=1, team="Post")),
    ],
)
def test_equivalent_calls_are_equal_to_verifier_and_world(task: OrderTask, expert_call: Action, same: Action) -> None:
    ask = {Plan.REFUND: [say("Refund it?")], Plan.MOVE: [say("New address?")]}.get(task.plan, [])
    state = run(task, call("find", id=47), *ask).state()
    assert VERIFIER.verify(state, expert_call, HERMES.parse(HERMES.render(same))).reward == 1.0
    ledgers = [run(task, call("find", id=47), *ask, action).ledger for action in (expert_call, same)]
    assert ledgers[0] == ledgers[1]


@pytest.mark.parametrize("plan", list(Plan))
def test_the_verifier_accepts_every_wording_of_a_plan_and_of_no_other_plan(plan: Plan) -> None:
    """Message turns carry the decision too: the threshold must tell plans apart and wordings not."""

    def messages(of: Plan) -> list[Action]:
        written = []
        for seed in range(40):
            episode = OrderDesk().reset(MOVE)
            while not episode.is_done:
                episode.act(next_action(episode, MOVE, of, random.Random(seed)))
            written += [message for message in episode.messages if message.role == "assistant" and message.content]
        return [say(text) for text in sorted({message.content for message in written})]

    state = OrderDesk().reset(MOVE).state()
    by_kind = {kind: [message for message in messages(plan) if message.content.endswith("?") is kind] for kind in (True, False)}
    for same_turn in by_kind.values():
        for first in same_turn:
            for second in same_turn:
                assert VERIFIER.verify(state, first, second).reward == 1.0, (first.content, second.content)
    for other in set(Plan) - {plan}:
        for ours in messages(plan):
            for theirs in messages(other):
                assert VERIFIER.verify(state, ours, theirs).reward == 0.0, (ours.content, theirs.content)


def test_a_wrong_decision_changes_the_order_and_the_episode_goes_on() -> None:
    episode = run(POST, call("find", id=47), say("Cancel it?"), call("cancel"))
    assert not episode.is_done
    assert episode.ledger.cancelled
    episode.act(say("It is cancelled."))
    episode.act(call("close"))
    assert episode.is_done
    assert not episode.success


@pytest.mark.parametrize(
    "last",
    [
        (call("refund", qty=3), say("It is refunded."), call("close")),
        (call("refund", qty=2, notify=False), say("It is refunded."), call("close")),
        (call("refund", qty=2), say("It is cancelled."), call("close")),
        (call("refund", qty=2), call("close")),
        (call("refund", qty=2), call("refund", qty=2), say("It is refunded."), call("close")),
    ],
    ids=["wrong number", "silent", "told wrongly", "told nothing", "twice"],
)
def test_each_slip_fails_the_task(last: tuple[Action, ...]) -> None:
    start = (call("find", id=47), say("Refund it?"))
    assert run(REFUND, *start, call("refund", qty=2), say("It is refunded."), call("close")).success
    assert not run(REFUND, *start, *last).success


def test_refunding_without_asking_fails() -> None:
    assert not run(REFUND, call("find", id=47), call("refund", qty=2), say("It is refunded."), call("close")).success


@pytest.mark.parametrize(
    ("action", "answer"),
    [
        (call("cancel"), "error: find first"),
        (call("find", id=48), "error: no such order"),
        (call("find", id="x"), "error: bad id"),
        (call("find"), "error: id missing"),
        (call("find", id=47, x=1), "error: no x"),
        (call("sell", id=47), "error: no such tool"),
        (Action("", (ToolCall("find", "[1]"),), None, ParseOutcome.PARSED), "error: bad arguments"),
        (Action("<tool_call>{", (), None, ParseOutcome.MALFORMED), "error: bad call"),
        (say("Hello!"), "And?"),
        (say(""), "And?"),
        (say("Well?"), "What?"),
    ],
)
def test_a_mistake_is_answered_and_can_be_repaired(action: Action, answer: str) -> None:
    episode = run(REFUND, action)
    assert episode.messages[-1].content == answer
    assert play(episode, expert(random.Random(0))).success


def test_the_turn_limit_ends_an_episode_that_goes_nowhere() -> None:
    episode = run(REFUND, *[say("Hm.")] * MAX_TURNS)
    assert episode.is_done
    assert not episode.success


def test_parallel_calls_are_carried_out_in_order() -> None:
    both = Action("", (ToolCall("find", '{"id": 47}'), ToolCall("track", "{}")), None, ParseOutcome.PARSED)
    assert [message.content for message in run(POST, both).messages[-2:]] == ["sent, 3 pieces", "day 4"]


def test_splits_are_disjoint_balanced_and_seeded() -> None:
    world = OrderDesk()
    drawn = {split: world.tasks(split, num_tasks=240, seed=5) for split in TaskSplit}
    ids = [{task.id for task in tasks} for tasks in drawn.values()]
    assert all(len(one) == 240 for one in ids)
    assert sum(map(len, ids)) == len(set.union(*ids))
    for tasks in drawn.values():
        cases = [(task.want, task.status) for task in tasks]
        assert {cases.count(case) for case in RULES} == {20}
    assert drawn[TaskSplit.TEST] == world.tasks(TaskSplit.TEST, num_tasks=240, seed=5)
    assert drawn[TaskSplit.TEST] != world.tasks(TaskSplit.TEST, num_tasks=240, seed=6)


def test_more_tasks_than_the_split_holds_is_the_users_error() -> None:
    with pytest.raises(UserError, match="100000 at most"):
        OrderDesk().tasks(TaskSplit.TEST, num_tasks=10**6, seed=0)


def test_noise_costs_success_and_none_costs_none() -> None:
    world = OrderDesk()
    tasks = world.tasks(TaskSplit.PRETRAINING, num_tasks=240, seed=1)
    share = {
        noise: sum(play(world.reset(task), noisy_agent(task, noise, random.Random(task.id))).success for task in tasks) / 240 for noise in (0.0, 0.4)
    }
    assert share[0.0] == 1.0
    assert 0.35 < share[0.4] < 0.65


def test_expert_actions_pass_their_own_verifier() -> None:
    """Render, parse, verify: what the profile stage does first with every candidate."""
    for task in OrderDesk().tasks(TaskSplit.TRAIN, num_tasks=48, seed=2):
        episode = OrderDesk().reset(task)
        agent = expert(random.Random(task.id))
        while not episode.is_done:
            state, action = episode.state(), agent(episode)
            verdict = VERIFIER.verify(state, action, HERMES.parse(HERMES.render(action, TOOLS), TOOLS))
            assert (verdict.kind, verdict.reward) == (VerdictKind.OK, 1.0)
            episode.act(action)
