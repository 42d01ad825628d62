"""Episodes that agents of NeMo-Gym play: against the same episodes played in this process, and everything an agent or its server may do wrong."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest
from fakes.gym_agents import AGENT, FakeGym, desk_rows, fake_gym
from fakes.scripted_desk import ScriptedDesk
from fakes.tiny_tokenizer import CHATML, tiny_tokenizer

from pivotrl.config.environment import EnvironmentConfig
from pivotrl.config.schema import RenderConfig
from pivotrl.errors import InfraLimitError, UserError
from pivotrl.gym.episode_rows import EpisodeRow, read_episode_rows
from pivotrl.gym.player import GymPlayer, opened
from pivotrl.gym.servers import running
from pivotrl.identity import content_id, derive_seed
from pivotrl.rollouts.engine import EngineError, GenerationRequest
from pivotrl.rollouts.episodes import EpisodeEnd, Limits, PlayedEpisode, WorldPlayer
from pivotrl.rollouts.render import Renderer
from pivotrl.types import Completion, FinishReason
from pivotrl.worlds.order_desk import OrderDesk

LIMITS = Limits(max_prompt_tokens=4000, max_new_tokens=400, temperature=1.0, ends_at_cut=True)
PLACE = ("train", 0)
RUN_SEED = 11


@pytest.fixture(scope="module")
def renderer() -> Renderer:
    config = RenderConfig(action_format="hermes", history_reasoning="template", max_prompt_tokens=4000)
    return Renderer.build(tiny_tokenizer(), config, CHATML)


class Recorder(ScriptedDesk):
    """Remembers requests and may cut or fail."""

    def weight_digests(self) -> dict[str, str]:
        return {}

    def __init__(self, renderer: Renderer) -> None:
        super().__init__(renderer)
        self.requests: list[GenerationRequest] = []
        self.fails_after: int | None = None
        self.cuts = False

    def generate(self, requests: Sequence[GenerationRequest]) -> list[tuple[Completion, ...]]:
        if self.fails_after is not None and len(self.requests) >= self.fails_after:
            raise EngineError("out of memory")
        self.requests += requests
        made = super().generate(requests)
        return [(Completion(one.token_ids[:3], one.logprobs[:3], FinishReason.LENGTH, 0),) for (one,) in made] if self.cuts else made


@pytest.fixture
def desk(renderer: Renderer, tmp_path: Path) -> Iterator[Callable[..., Any]]:
    """desk(num_tasks, num_known, **config): a player, the gym it plays, its engine and the rows; closed with the test."""
    with ExitStack() as stack:

        def build(num_tasks: int = 3, num_known: int = 2, **changes: object) -> tuple[GymPlayer, FakeGym, Recorder, tuple[EpisodeRow, ...]]:
            tasks, rows = desk_rows(num_tasks)
            file = tmp_path / "rows.jsonl"
            file.write_text("".join(json.dumps(row) + "\n" for row in rows))
            engine = Recorder(renderer)
            for task in tasks[:num_known]:
                engine.knows_task(task)
            gym = stack.enter_context(fake_gym(tasks))
            config = EnvironmentConfig.model_validate({"type": "nemo_gym", "head": gym.head, "listen": "127.0.0.1:0", "batch_wait_s": 0.2, **changes})
            read = read_episode_rows([file], key="environment.train_rows")

            def command(policy_base_url: str) -> None:
                gym.policy_base_url = policy_base_url

            player = stack.enter_context(opened(config, read, engine, renderer, command=command, directory=tmp_path, run_seed=RUN_SEED))
            return player, gym, engine, read

        yield build


def shape(played: PlayedEpisode[Any]) -> tuple[Any, ...]:
    return played.end, played.reward, [(turn.prompt_token_ids, turn.completion, turn.action) for turn in played.turns]


def test_an_agents_episodes_are_those_of_the_world_played_here(desk: Callable[..., Any], renderer: Renderer) -> None:
    """Prompt by prompt: what an agent writes back as chat messages renders to the tokens that the world's own states do."""
    player, gym, engine, rows = desk(num_tasks=3, num_known=2)
    tasks, _ = desk_rows(3)
    played = player.play(rows, 2, limits=LIMITS, place=PLACE)
    expected = WorldPlayer(OrderDesk(), engine, renderer, run_seed=RUN_SEED).play(tasks, 2, limits=LIMITS, place=PLACE)
    assert [one.reward for one in expected] == [1.0, 1.0, 1.0, 1.0, 0.0, 0.0]
    assert [shape(one) for one in played] == [shape(one) for one in expected]
    assert [one.episode.task_id for one in played] == [row.id for row in rows for _ in range(2)]
    assert all(len(one.turns) > 3 for one in played)
    assert played[0].episode.outcome() == {"reward": 1.0, "desk": "closed"}
    assert player.take_cost() == {"rollout/unclaimed_turns/sum": 0, "rollout/environment_retries/sum": 0}
    assert gym.refusals == []
    # The row's own fields arrive, sampled as the recipe says.
    assert {body["task"] for body in gym.runs} == {task.id for task in tasks}
    assert all(body["responses_create_params"] == {"input": [], "temperature": 1.0, "top_p": 1.0, "max_output_tokens": 400} for body in gym.runs)


def test_the_kth_sample_of_a_prompt_has_its_kth_seed(desk: Callable[..., Any]) -> None:
    player, _, engine, rows = desk(num_tasks=1, num_known=1)
    player.play(rows, 3, limits=LIMITS, place=PLACE)
    by_prompt: dict[tuple[int, ...], list[int]] = {}
    for request in engine.requests:
        by_prompt.setdefault(request.prompt_token_ids, []).extend(request.seeds)
    assert len(by_prompt) > 3
    for prompt, seeds in by_prompt.items():
        assert sorted(seeds) == sorted(derive_seed(RUN_SEED, *PLACE, content_id(prompt), k) for k in range(3))


def test_open_episodes_are_answered_in_one_batch(desk: Callable[..., Any]) -> None:
    player, _, engine, rows = desk(num_tasks=4, num_known=4, batch_wait_s=30.0)
    sizes: list[int] = []
    generate, started_s = engine.generate, time.monotonic()
    engine.generate = lambda requests: (sizes.append(len(requests)), generate(requests))[1]
    player.play(rows, 2, limits=LIMITS, place=PLACE)
    assert sizes[0] == 8, "nothing was sampled before all had asked"
    assert time.monotonic() - started_s < 25, "and once episodes had ended nobody waited for as many as before"


def test_a_cap_of_the_agents_own_is_kept_and_a_larger_one_is_not(desk: Callable[..., Any]) -> None:
    player, gym, engine, rows = desk(num_tasks=1, num_known=1)
    gym.asks = lambda body: {**body, "max_tokens": 7}
    player.play(rows, 1, limits=LIMITS, place=PLACE)
    gym.asks = lambda body: {**body, "max_tokens": 100_000}
    before = len(engine.requests)
    player.play(rows, 1, limits=LIMITS, place=PLACE)
    assert {one.max_new_tokens for one in engine.requests[:before]} == {7}
    assert {one.max_new_tokens for one in engine.requests[before:]} == {400}


def test_a_cut_turn_ends_its_episode(desk: Callable[..., Any]) -> None:
    player, gym, engine, rows = desk(num_tasks=1)
    engine.cuts = True
    (played,) = player.play(rows, 1, limits=LIMITS, place=PLACE)
    assert played.end is EpisodeEnd.TRUNCATED
    assert played.reward == 0.0
    assert len(played.turns) == 1
    assert gym.replies[0]["choices"][0]["finish_reason"] == "length"


def test_a_prompt_that_is_too_long_is_refused_in_words_that_nemo_gym_knows(desk: Callable[..., Any]) -> None:
    player, gym, engine, rows = desk(num_tasks=1)
    limits = Limits(max_prompt_tokens=3, max_new_tokens=40, temperature=1.0)
    (played,) = player.play(rows, 1, limits=limits, place=PLACE)
    assert played.end is EpisodeEnd.ENVIRONMENT_FAILED
    assert "returned no turn" in played.failure
    assert "render.max_prompt_tokens" in played.failure
    assert engine.requests == []
    assert "context length" in gym.refusals[0]
    assert json.loads(gym.refusals[0])["error"]["code"] == 400


def test_an_agent_that_turns_errors_into_rewards_teaches_nothing(desk: Callable[..., Any]) -> None:
    """As mini_swe_agent and harbor_agent do: whatever fails, the answer is 200, reward 0, no output or the turns so far."""
    player, gym, engine, rows = desk(num_tasks=2, num_known=2, max_retries=0)
    gym.swallows = True
    engine.fails_after = 0
    played = player.play(rows, 2, limits=LIMITS, place=PLACE)
    assert [(one.end, one.failure, one.reward) for one in played] == [(EpisodeEnd.ENGINE_FAILED, "out of memory", 0.0)] * 4
    engine.fails_after = len(engine.requests) + 8
    played = player.play(rows, 2, limits=LIMITS, place=PLACE)
    assert {one.end for one in played} == {EpisodeEnd.ENGINE_FAILED}
    engine.fails_after = None
    gym.changes = lambda result: (200, {"reward": 1.0, "response": {"output": []}})
    gym.asks = lambda body: {**body, "stop": ["x"]}
    played = player.play(rows, 1, limits=LIMITS, place=PLACE)
    assert {one.end for one in played} == {EpisodeEnd.ENVIRONMENT_FAILED}
    assert "`stop` is ['x']" in played[0].failure


@pytest.mark.parametrize("mask", [{"mask_sample": True}, {"instance_config": {"mask_sample": True}}])
def test_what_an_environment_masks_is_not_learned_from_and_is_scored(desk: Callable[..., Any], mask: dict[str, Any]) -> None:
    player, gym, _, rows = desk(num_tasks=1, num_known=1)
    gym.changes = lambda result: (200, {**result, **mask})
    (trained,) = player.play(rows, 1, limits=LIMITS, place=PLACE)
    assert trained.end is EpisodeEnd.ENVIRONMENT_FAILED
    assert "mask_sample" in trained.failure
    (scored,) = player.play(rows, 1, limits=Limits(4000, 400, 1.0), place=("eval", "environment"))
    assert (scored.end, scored.reward) == (EpisodeEnd.CLOSED, 1.0)


def test_a_ticket_named_twice_is_nobodys(desk: Callable[..., Any]) -> None:
    player, gym, _, rows = desk(num_tasks=1, num_known=1)
    gym.changes = lambda result: (200, {**result, "response": {"output": result["response"]["output"][:1] * 2}})
    (played,) = player.play(rows, 1, limits=LIMITS, place=PLACE)
    assert played.end is EpisodeEnd.ENVIRONMENT_FAILED


def test_who_asks_for_a_prompts_length_first_joins_the_same_batch(desk: Callable[..., Any]) -> None:
    """As browsecomp_agent does before every turn."""
    player, gym, engine, rows = desk(num_tasks=2, num_known=2, batch_wait_s=5.0)
    lengths: list[int] = []

    def measures(body: dict[str, Any]) -> dict[str, Any]:
        address = gym.policy_base_url.removesuffix("/v1") + "/tokenize"
        lengths.append(httpx.post(address, json={"messages": body["messages"], "tools": body["tools"]}, timeout=60).json()["count"])
        return body

    gym.asks = measures
    sizes: list[int] = []
    generate = engine.generate
    engine.generate = lambda requests: (sizes.append(len(requests)), generate(requests))[1]
    played = player.play(rows, 1, limits=LIMITS, place=PLACE)
    assert sorted(lengths) == sorted(len(turn.prompt_token_ids) for one in played for turn in one.turns)
    assert sizes[0] == 2


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (lambda result: (422, {"detail": "task: field required"}), "refuses row .* with status 422: .*field required"),
        (lambda result: (200, {**result, "reward": 2.5}), "returns the reward 2.5"),
        (lambda result: (200, {**result, "reward": True}), "returns the reward True"),
        (lambda result: (200, {"response": result["response"]}), "returns the reward None"),
        (lambda result: (200, {**result, "response": {"output": [{"type": "message"}]}}), "no result of 1 episodes says which are its own"),
    ],
)
def test_what_the_recipes_author_must_mend_is_refused(desk: Callable[..., Any], changes: Any, message: str) -> None:
    player, gym, _, rows = desk(num_tasks=1, num_known=1)
    gym.changes = changes
    with pytest.raises(UserError, match=message):
        player.play(rows, 1, limits=LIMITS, place=PLACE)


def test_a_failing_server_is_asked_again_and_then_the_environment_has_failed(desk: Callable[..., Any]) -> None:
    player, gym, _, rows = desk(num_tasks=1, num_known=1, max_retries=2)
    attempts: list[int] = []

    def fails_twice(result: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        attempts.append(1)
        return (500, {"detail": "sandbox died"}) if len(attempts) < 3 else (200, result)

    gym.changes = fails_twice
    (played,) = player.play(rows, 1, limits=LIMITS, place=PLACE)
    assert played.end is EpisodeEnd.CLOSED
    assert played.reward == 1.0
    assert len(gym.runs) == 3
    assert player.take_cost() == {"rollout/unclaimed_turns/sum": 2 * len(played.turns), "rollout/environment_retries/sum": 2}
    gym.changes = lambda result: (500, {"detail": "sandbox died"})
    (played,) = player.play(rows, 1, limits=LIMITS, place=PLACE)
    assert played.end is EpisodeEnd.ENVIRONMENT_FAILED
    assert "sandbox died" in played.failure
    assert played.turns == []
    assert len(gym.runs) == 6


def test_a_turn_of_another_episode_is_no_ones(desk: Callable[..., Any]) -> None:
    """Each ticket counts once: an agent server that mixes conversations up must not teach a policy."""
    player, gym, _, rows = desk(num_tasks=2, num_known=2)
    first: list[dict[str, Any]] = []

    def mixes(result: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        first.append(result)
        return 200, {**result, "response": first[0]["response"]}

    gym.changes = mixes
    played = player.play(rows, 1, limits=LIMITS, place=PLACE)
    assert sorted(one.end.value for one in played) == ["closed", "environment failed"]
    assert next(one for one in played if one.end is EpisodeEnd.ENVIRONMENT_FAILED).turns == []


def test_a_failed_engine_is_told_from_a_failed_environment(desk: Callable[..., Any]) -> None:
    player, _, engine, rows = desk(num_tasks=1, num_known=1, max_retries=0)
    engine.fails_after = 2
    (played,) = player.play(rows, 1, limits=LIMITS, place=PLACE)
    assert played.end is EpisodeEnd.ENGINE_FAILED
    assert played.failure == "out of memory"


def test_an_episode_has_a_deadline(desk: Callable[..., Any]) -> None:
    player, gym, _, rows = desk(num_tasks=1, num_known=1, episode_deadline_s=1)
    gym.changes = lambda result: (time.sleep(3), (200, result))[1]
    (played,) = player.play(rows, 1, limits=LIMITS, place=PLACE)
    assert played.end is EpisodeEnd.ENVIRONMENT_FAILED
    assert "episode_deadline_s (1 s)" in played.failure
    assert len(gym.runs) == 1


def test_nobody_is_answered_between_collections(desk: Callable[..., Any]) -> None:
    player, gym, engine, rows = desk(num_tasks=1)
    body = {"messages": [{"role": "user", "content": "hi"}]}
    response = httpx.post(f"{gym.policy_base_url}/chat/completions", json=body)
    assert response.status_code == 410, "NeMo-Gym asks again for ever after a 503"
    assert "no rollouts are being collected" in response.text
    assert engine.requests == []
    assert httpx.get(f"{gym.policy_base_url}/models").json()["data"][0]["id"] == "policy"
    assert player.play(rows, 1, limits=LIMITS, place=PLACE)[0].turns


def test_an_agent_that_is_not_there_is_named(desk: Callable[..., Any], renderer: Renderer, tmp_path: Path) -> None:
    _, gym, engine, rows = desk(num_tasks=1)
    config = EnvironmentConfig(type="nemo_gym", head=gym.head, listen="127.0.0.1:0")
    stranger = EpisodeRow("x", "tau2_agent", rows[0].value)
    with (
        pytest.raises(UserError, match=f"rows name the agent 'tau2_agent' and NeMo-Gym at {gym.head} runs {AGENT}"),
        opened(config, [stranger], engine, renderer, command=lambda _: None, directory=tmp_path, run_seed=0),
    ):
        pass


def test_servers_that_do_not_come_up(renderer: Renderer, tmp_path: Path) -> None:
    silent = EnvironmentConfig(type="nemo_gym", head="http://127.0.0.1:9", listen="127.0.0.1:0", start_deadline_s=1)
    rows = [EpisodeRow("x", AGENT, {})]

    def start(words: Sequence[str] | None = None, **changes: object) -> None:
        config = silent.model_copy(update=changes)
        command: Callable[[str], Sequence[str] | None] = lambda url: words and [word.replace("URL", url) for word in words]  # noqa: E731
        with opened(config, rows, Recorder(renderer), renderer, command=command, directory=tmp_path, run_seed=0):
            pytest.fail("it came up")

    with pytest.raises(InfraLimitError, match=r"head server at http://127.0.0.1:9 does not answer within environment.start_deadline_s"):
        start()
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(UserError, match=f"environment.listen is 127.0.0.1:{port}"):
            start(listen=f"127.0.0.1:{port}")
    with pytest.raises(UserError, match=r"environment.command: /nowhere/gym: No such file"):
        start(["/nowhere/gym"])
    with pytest.raises(InfraLimitError, match=r"environment.command ended with code 7; see .*servers.log"):
        start(["bash", "-c", "echo starts for URL; exit 7"], start_deadline_s=60)
    with fake_gym([]) as gym, pytest.raises(UserError, match=f"environment.command is set and somebody answers at {gym.head}"):
        start(["sleep", "1000"], head=gym.head)
    assert "starts for http://127.0.0.1:" in (tmp_path / "servers.log").read_text()


def test_rows_are_read_once_each_and_refused_with_their_place(tmp_path: Path) -> None:
    row = {"responses_create_params": {"input": []}, "agent_ref": {"name": "a"}}
    file = tmp_path / "rows.jsonl"
    file.write_text("\n".join(json.dumps(one) for one in (row, {**row, "id": 2}, row)))
    assert [one.family for one in read_episode_rows([file], key="environment.train_rows")] == ["a", "a"]
    for bad, reason in (
        ({"responses_create_params": {}}, "`agent_ref` has no name"),
        ({"agent_ref": {"name": "a"}}, "`responses_create_params` is not"),
    ):
        file.write_text(json.dumps(row) + "\n" + json.dumps(bad))
        with pytest.raises(UserError, match=f"environment.test_rows: rows.jsonl:2: {reason}"):
            read_episode_rows([file], key="environment.test_rows")
    file.write_text(json.dumps(row) + "\n" + json.dumps({"responses_create_params": {}}))
    assert [one.family for one in read_episode_rows([file], key="environment.test_rows", agent="b")] == ["a", "b"]
    file.write_text("")
    with pytest.raises(UserError, match="names no row"):
        read_episode_rows([file], key="environment.train_rows")


def test_the_servers_end_with_a_process_that_is_killed(tmp_path: Path) -> None:
    """SIGKILL leaves nothing to clean up with: the kernel ends the program."""
    words = ["bash", "-c", "echo $$ >started; exec sleep 1000"]
    imports = "from pathlib import Path; import time; from pivotrl.gym.servers import running"
    code = f"{imports}\nwith running({words}, Path('.'), head='http://127.0.0.1:9'): time.sleep(1000)"
    process = subprocess.Popen([sys.executable, "-c", code], cwd=tmp_path)
    pid = _wait(lambda: (tmp_path / "started").exists() and (tmp_path / "started").read_text().strip())
    process.kill()
    process.wait()
    assert _wait(lambda: not Path(f"/proc/{pid}").exists())


def test_the_servers_are_given_time_to_end(tmp_path: Path) -> None:
    """The program ends at once when it is interrupted; what it started cleans up first."""
    ends = "def end(*_):\n    time.sleep(1)\n    open('cleaned', 'w')\n    sys.exit()\nsignal.signal(signal.SIGINT, end)\n"
    (tmp_path / "child.py").write_text(f"import signal, sys, time\n{ends}open('ready', 'w')\ntime.sleep(1000)\n")
    leader = f"import os, subprocess, sys, time\nos.chdir({str(tmp_path)!r})\nsubprocess.Popen([sys.executable, 'child.py'])\ntime.sleep(1000)"
    with running([sys.executable, "-c", leader], tmp_path, head="http://127.0.0.1:9"):
        _wait((tmp_path / "ready").exists)
    assert (tmp_path / "cleaned").exists()


def _wait(condition: Callable[[], Any]) -> Any:
    limit_s = time.monotonic() + 60
    while not (found := condition()):
        assert time.monotonic() < limit_s
        time.sleep(0.05)
    return found
