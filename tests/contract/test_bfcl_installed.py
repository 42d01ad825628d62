"""The BFCL adapter on the installed package (`make bfcl`): every ground truth succeeds, and success is the leaderboard's own verdict."""

from __future__ import annotations

import importlib
import random
from typing import Any

import pytest

from pivotrl.actions.registry import action_format
from pivotrl.config.schema import ToolCallVerifierConfig
from pivotrl.types import Action
from pivotrl.verifiers.tool_call import ToolCallVerifier
from pivotrl.worlds import bfcl
from pivotrl.worlds.generate import play
from pivotrl.worlds.protocol import Agent, TaskSplit

pytest.importorskip("bfcl_eval", reason="bfcl-eval is not installed; `make bfcl` installs it")


def upstream_verdict(episode: bfcl.BfclEpisode, run: str) -> bool:
    """What the leaderboard says of the same calls. It keeps its instances by model name, so every run needs one of its own."""
    checker: Any = importlib.import_module("bfcl_eval.eval_checker.multi_turn_eval.multi_turn_checker")
    turns: list[list[list[str]]] = [[]]
    for message in episode.messages:
        if message.role == "assistant" and message.tool_calls:
            calls = [(call.name, call.arguments_object() or {}) for call in message.tool_calls]
            turns[-1].append([f"{name}({', '.join(f'{key}={value!r}' for key, value in arguments.items())})" for name, arguments in calls])
        elif message.role == "assistant":
            turns.append([])
    task = episode.task
    truth = [
        [f"{call.name}({', '.join(f'{key}={value!r}' for key, value in (call.arguments_object() or {}).items())})" for call in turn]
        for turn in task.truth
    ]
    entry = {"id": task.id, "initial_config": dict(task.initial_config), "involved_classes": list(task.classes)}
    return bool(checker.multi_turn_checker(turns[: len(truth)], truth, entry, "multi_turn_base", run)["valid"])


def test_there_are_200_tasks_and_40_or_so_are_held_apart() -> None:
    world = bfcl.BfclMultiTurn()
    assert len(bfcl.load_tasks()) == 200
    train, test = ({task.id for task in world.tasks(split, num_tasks=num, seed=1)} for split, num in ((TaskSplit.TRAIN, 150), (TaskSplit.TEST, 40)))
    assert not train & test


def test_every_ground_truth_succeeds_here_and_upstream() -> None:
    for task in bfcl.load_tasks():
        episode = play(bfcl.BfclMultiTurn().reset(task), bfcl.expert(random.Random(task.id)))
        assert episode.success, task.id
        assert upstream_verdict(episode, f"truth{task.id}"), task.id


@pytest.mark.parametrize("noise", [0.05, 0.3])
def test_success_is_the_leaderboards_verdict(noise: float) -> None:
    """On agents that fall silent early, that leave calls out, and that call twice."""
    num_right = 0
    for index, task in enumerate(bfcl.load_tasks()):
        rng = random.Random(index)
        agent: Agent = bfcl.noisy_agent(task, noise, rng) if index % 2 else _stutterer(bfcl.expert(rng), noise, rng)
        episode = play(bfcl.BfclMultiTurn().reset(task), agent)
        verdict = upstream_verdict(episode, f"noisy{noise}{index}")
        assert episode.success is verdict, task.id
        num_right += verdict
    assert 10 < num_right < 190


def _stutterer(follow: Agent, noise: float, rng: random.Random) -> Agent:
    made: list[Action] = []

    def act(episode: bfcl.BfclEpisode) -> Action:
        made.append(made[-1] if made and made[-1].tool_calls and rng.random() < noise else follow(episode))
        return made[-1]

    return act


def test_the_verifier_accepts_the_experts_own_actions() -> None:
    verifier = ToolCallVerifier(ToolCallVerifierConfig(type="tool_call", message="similarity", message_similarity=0.7))
    hermes = action_format("hermes")
    for task in bfcl.load_tasks()[::4]:
        episode, agent = bfcl.BfclMultiTurn().reset(task), bfcl.expert(random.Random(1))
        while not episode.is_done:
            state, action = episode.state(), agent(episode)
            assert verifier.verify(state, action, hermes.parse(hermes.render(action, state.tools), state.tools)).reward == 1
            episode.act(action)
