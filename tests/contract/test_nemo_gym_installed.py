"""Episodes on NeMo-Gym itself (`make nemo-gym`): its head server, its simple agent, its vLLM model server and one of its resources servers.

The package lives in an environment of its own, .venv-nemo-gym, since it brings a hundred others. The policy is a function of the prompt's text,
so what an episode is worth is known without it.
"""

from __future__ import annotations

import json
import re
import socket
import subprocess
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from fakes.tiny_tokenizer import CHATML, tiny_tokenizer

from pivotrl import build
from pivotrl.config.load import load_recipe
from pivotrl.config.schema import RenderConfig
from pivotrl.gym.player import GymPlayer, opened
from pivotrl.rollouts.engine import GenerationRequest
from pivotrl.rollouts.episodes import EpisodeEnd, Limits
from pivotrl.rollouts.render import Renderer
from pivotrl.types import Completion, FinishReason

ROOT = Path(__file__).resolve().parents[2]
BIN = ROOT / ".venv-nemo-gym" / "bin"
RECIPE = ROOT / "recipes" / "nemo_gym_example"
LIMITS = Limits(max_prompt_tokens=20_000, max_new_tokens=400, temperature=1.0, ends_at_cut=True)

pytestmark = pytest.mark.skipif(not BIN.exists(), reason="NeMo-Gym is not installed; `make nemo-gym` installs it")


class TextPolicy:
    """Answers a prompt's text with a completion's text."""

    policy_version = 0

    def __init__(self, renderer: Renderer) -> None:
        self.renderer = renderer
        self.answer: Callable[[str], str] = lambda prompt: "I do not know."

    def generate(self, requests: Sequence[GenerationRequest]) -> list[tuple[Completion, ...]]:
        return [(self._complete(request),) for request in requests]

    def load_weights(self, named_tensors: Any, version: int) -> None:
        raise NotImplementedError

    def weight_digests(self) -> dict[str, str]:
        return {}

    def close(self) -> None: ...

    def _complete(self, request: GenerationRequest) -> Completion:
        ids = (*self.renderer.template.encode(self.answer(self.renderer.decode(request.prompt_token_ids))), self.renderer.stop_token_ids[0])
        return Completion(ids, (-0.5,) * len(ids), FinishReason.STOP, 0)


def _call(name: str, arguments: dict[str, Any]) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def _expert(expected: dict[str, list[str]]) -> Callable[[str], str]:
    """Asks for the value of every expected synonym of the question, then hands them in; the synonyms are told by the question alone."""

    def answer(prompt: str) -> str:
        synonyms = next(words for question, words in expected.items() if question in prompt)
        values = re.findall(r'\{"synonym_value":(\d+)\}', prompt)
        if '{"success":true}' in prompt:
            return "<think>\nAll is handed in.\n</think>\n\nDone."
        if len(values) < len(synonyms):
            return "Let me look.\n" + _call("get_synonym_value", {"synonym": synonyms[len(values)]})
        return _call("extract_synonym_values", {"synonym_values": [int(value) for value in values]})

    return answer


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[GymPlayer, TextPolicy, Any]]:
    """The example recipe's servers, started by its script, and its rows."""
    directory = tmp_path_factory.mktemp("gym")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    renderer = Renderer.build(tiny_tokenizer(), RenderConfig(action_format="hermes", history_reasoning="template", max_prompt_tokens=20_000), CHATML)
    loaded = load_recipe(RECIPE)
    rows, recipe = build.environment_rows(loaded, directory, "train_rows"), loaded.recipe.environment
    assert recipe is not None
    changes = {"head": f"http://127.0.0.1:{port}", "listen": "127.0.0.1:0", "start_deadline_s": 600}
    config = recipe.model_copy(update=changes)
    policy = TextPolicy(renderer)

    def command(policy_base_url: str) -> list[str]:
        return [str(RECIPE / "servers.sh"), str(BIN.parent), policy_base_url, port, str(directory)]

    with opened(config, rows, policy, renderer, command=command, directory=directory, run_seed=1) as player:
        yield player, policy, rows
    left = subprocess.run(["pgrep", "-f", str(BIN.parent.resolve())], capture_output=True, text=True).stdout.split()
    assert left == [], "servers or Ray outlived the player"


def test_rewards_and_turns_are_those_of_the_environment(played: tuple[GymPlayer, TextPolicy, Any]) -> None:
    player, policy, rows = played
    expected = {row.value["responses_create_params"]["input"][-1]["content"]: row.value["expected_synonyms"] for row in rows}
    # The last one hands in the values in another order.
    wrong = next(reversed(expected))
    expected[wrong] = expected[wrong][::-1]
    policy.answer = _expert(expected)
    episodes = player.play(rows, 2, limits=LIMITS, place=("train", 0))
    assert [one.reward for one in episodes] == [1.0] * 2 * (len(rows) - 1) + [0.0] * 2
    assert {one.end for one in episodes} == {EpisodeEnd.CLOSED}
    assert [len(one.turns) for one in episodes[::2]] == [len(words) + 2 for words in expected.values()]
    assert player.take_cost()["rollout/unclaimed_turns/sum"] == 0
    for one in episodes:
        assert [turn.action.parse.value for turn in one.turns] == ["parsed"] * (len(one.turns) - 1) + ["absent"]
        # What the policy said comes back as it was written, observations in between.
        prompts = [policy.renderer.decode(turn.prompt_token_ids) for turn in one.turns]
        for before, after, turn in zip(prompts, prompts[1:], one.turns, strict=False):
            assert after.startswith(before + policy.renderer.decode(turn.completion.token_ids))


def test_a_policy_that_says_nothing_useful_gets_nothing(played: tuple[GymPlayer, TextPolicy, Any]) -> None:
    player, policy, rows = played
    policy.answer = lambda prompt: '<tool_call>\n{"name": "get_synonym_value", "arguments": {\n</tool_call>' if "Hot" in prompt else "I do not know."
    episodes = player.play(rows[:2], 1, limits=LIMITS, place=("train", 1))
    assert [(one.reward, len(one.turns)) for one in episodes] == [(0.0, 1), (0.0, 1)]


def test_a_full_context_ends_an_episode_and_not_the_run(played: tuple[GymPlayer, TextPolicy, Any]) -> None:
    player, _, rows = played
    limits = Limits(max_prompt_tokens=10, max_new_tokens=10, temperature=1.0)
    (episode,) = player.play(rows[:1], 1, limits=limits, place=("train", 2))
    assert (episode.end, episode.turns) == (EpisodeEnd.ENVIRONMENT_FAILED, [])
    assert "the maximum context length is 10 tokens" in episode.failure


def test_a_policy_that_thinks_and_says_nothing_is_asked_again(played: tuple[GymPlayer, TextPolicy, Any]) -> None:
    player, policy, rows = played
    thoughts = iter(("<think>\nHm.\n</think>\n\n", "<think>\nHm, hm.\n</think>\n\n"))
    policy.answer = lambda prompt: next(thoughts, "I give up.")
    (episode,) = player.play(rows[:1], 1, limits=LIMITS, place=("train", 3))
    assert (episode.end, episode.reward, len(episode.turns)) == (EpisodeEnd.CLOSED, 0.0, 3)
