"""Whole episodes played by agents of NeMo-Gym: they ask for the turns, their environment says what the episode was worth.

An episode is one POST /run of a row to its agent. Whatever the agent asks meanwhile comes to rollouts/chat_server.py and is answered by
gym/turns.py with a ticket; the result hands the tickets of its turns on, so reward and turns belong together by what the agent itself says.

Many agents turn every error into a result with reward 0. So a result counts only where it names turns that were sampled for it, and none does once
the engine has failed.

Results depend on the environment, which need not be deterministic. What is drawn does not depend on timing: the k-th sample of a prompt in
a step has the k-th seed of that prompt, and the episodes of a task are put in the order of their tokens. Log-probs do in their last digits,
as far as which turns meet in a batch does.
"""

from __future__ import annotations

import asyncio
import itertools
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import aiohttp
import orjson
from anyio.from_thread import BlockingPortal, start_blocking_portal

from pivotrl.config.environment import EnvironmentConfig
from pivotrl.errors import UserError
from pivotrl.gym.episode_rows import EpisodeRow
from pivotrl.gym.servers import running, wait_for_agents
from pivotrl.gym.turns import Prompted, Turns
from pivotrl.rollouts.chat_messages import says_something, tickets_of
from pivotrl.rollouts.chat_server import ChatServer
from pivotrl.rollouts.engine import Engine
from pivotrl.rollouts.episodes import EpisodeEnd, Limits, PlayedEpisode, SampledTurn
from pivotrl.rollouts.render import Renderer
from pivotrl.types import FinishReason, Message, Role, State, ToolOrigin

_SERVER_ERRORS = range(500, 600)
_MAX_SHOWN = 300
_SAY_EVERY_S = 30.0
# Before an episode is played again: its server may be starting.
_PAUSE_S = 2.0
_UNCLAIMED, _RETRIES = "rollout/unclaimed_turns/sum", "rollout/environment_retries/sum"


@dataclass(frozen=True, slots=True)
class AgentEpisode:
    """An episode that an agent played: what is left of it to look at."""

    task_id: str
    result: dict[str, Any]
    last: SampledTurn | None
    decode: Callable[[Sequence[int]], str]

    def state(self) -> State:
        """The last prompt as text, and the turn that answered it; empty where there was none."""
        turns = () if self.last is None else (Message(Role.USER, self.decode(self.last.prompt_token_ids)), self.last.action.as_message())
        return State(turns, (), ToolOrigin.NONE)

    def outcome(self) -> dict[str, Any]:
        """The environment's own words, long texts and conversations left out."""
        return {name: value for name, value in self.result.items() if isinstance(value, bool | int | float) or _is_short(value)}


@dataclass(slots=True)
class _Run:
    """One POST /run."""

    row: EpisodeRow
    result: dict[str, Any] | None = None
    failure: str = ""
    engine_failed: bool = False
    """The engine failed before the result was there."""


class GymPlayer:
    """Plays rows. Lifecycle: `opened`; `play` any number of times, under whatever weights the engine has by then.

    Args:
        check: raises once the servers' program has ended.
    """

    def __init__(
        self,
        config: EnvironmentConfig,
        engine: Engine,
        renderer: Renderer,
        *,
        portal: BlockingPortal,
        server: ChatServer,
        agents: dict[str, str],
        check: Callable[[], None],
        run_seed: int,
    ) -> None:
        self._config, self._engine, self._renderer, self._run_seed = config, engine, renderer, run_seed
        self._portal, self._server, self._agents, self._check = portal, server, agents, check
        self._num_open = 0
        self._tickets = itertools.count(1)
        self._cost: Counter[str] = Counter()

    def first_prompt(self, task: EpisodeRow) -> tuple[int, ...] | None:  # noqa: ARG002 - the interface's
        """None: only the agent knows what it will ask."""
        return None

    def play(self, tasks: Sequence[EpisodeRow], num_samples: int, *, limits: Limits, place: tuple[str | int, ...]) -> list[PlayedEpisode]:
        """`num_samples` episodes of each task, in the order of the tasks.

        An episode that names no turn, whose server failed or took too long, or that its environment masks under limits of training, has the end
        ENVIRONMENT_FAILED; one that was open when the engine failed ENGINE_FAILED.

        Args:
            place: where in the run this happens, for the seeds.

        Raises:
            UserError: where an agent refuses a row, its reward is not in [0, 1], or its results have no tickets.
            InfraLimitError: where the program that runs the servers has ended.
        """
        runs = [_Run(row) for row in tasks for _ in range(num_samples)]
        settings = {"reasoning": self._config.reasoning, "run_seed": self._run_seed, "place": place, "tickets": self._tickets}
        turns = Turns(self._engine, self._renderer, limits=limits, **settings, when_engine_fails=lambda: _mark_open(runs))
        slots = asyncio.Semaphore(self._config.max_concurrent_episodes)
        self._server.open()
        futures = [self._portal.start_task_soon(self._post, run, slots, limits) for run in runs]
        try:
            self._serve(turns, futures)
        finally:
            self._server.shut()
            for future in futures:
                future.cancel()
        played = [self._played(run, turns, limits) for run in runs]
        _check_tickets(runs, turns)
        self._cost[_UNCLAIMED] += turns.num_unclaimed
        groups = [played[start : start + num_samples] for start in range(0, len(played), num_samples)]
        return [one for group in groups for one in sorted(group, key=_token_order)]

    def take_cost(self) -> dict[str, float]:
        """Turns that no result claimed and episodes that were played again, since the last call."""
        cost, self._cost = self._cost, Counter()
        return {_UNCLAIMED: cost[_UNCLAIMED], _RETRIES: cost[_RETRIES]}

    def _serve(self, turns: Turns, futures: Sequence[Future[None]]) -> None:
        """Answers until every episode has ended; says every half a minute how far they are, inside of the stage's own bar."""
        said_s = started_s = time.monotonic()
        while True:
            done = [future for future in futures if future.done()]
            for future in done:
                if (error := future.exception()) is not None:
                    raise error
            if len(done) == len(futures):
                return
            self._check()
            if time.monotonic() - said_s > _SAY_EVERY_S:
                said_s = time.monotonic()
                rate = turns.num_sampled / (said_s - started_s)
                refused = f"; refused: {turns.refusal}" if turns.refusal else ""
                sys.stderr.write(f"environment: {len(done)} of {len(futures)} episodes have ended, {rate:.1f} turns/s{refused}\n")
            if batch := self._next_batch(turns):
                turns.answer(batch)

    def _next_batch(self, turns: Turns) -> list[Prompted]:
        """Requests for a turn of all open episodes, or those that came in time; one that asked for a prompt's tokens first may still join."""
        batch: list[Prompted] = []
        num_missing: Callable[[], int] = lambda: self._num_open - len(batch)  # noqa: E731
        while asked := self._server.take(num_missing, self._config.batch_wait_s):
            batch += turns.prompts(asked)
            if not any(one.is_tokenize for one in asked):
                break
        return batch

    async def _post(self, run: _Run, slots: asyncio.Semaphore, limits: Limits) -> None:
        """Plays one episode, again where its server fails; fills in the run."""
        body = orjson.dumps(run.row.request(temperature=limits.temperature, max_new_tokens=limits.max_new_tokens))
        async with slots, aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=self._config.episode_deadline_s)) as session:
            self._num_open += 1
            try:
                for attempt in range(1 + self._config.max_retries):
                    if attempt:
                        self._cost[_RETRIES] += 1
                        await asyncio.sleep(_PAUSE_S)
                    if await self._post_once(session, run, body):
                        return
            finally:
                self._num_open -= 1

    async def _post_once(self, session: aiohttp.ClientSession, run: _Run, body: bytes) -> bool:
        """Whether that was the last attempt."""
        address = f"{self._agents[run.row.family]}/run"
        try:
            async with session.post(address, data=body, headers={"Content-Type": "application/json"}) as response:
                content = await response.read()
        except TimeoutError:
            run.failure = f"no result within environment.episode_deadline_s ({self._config.episode_deadline_s} s)"
            return True
        except aiohttp.ClientError as error:
            run.failure = f"{run.row.family}: {type(error).__name__}: {error}"
            return False
        if response.status in _SERVER_ERRORS:
            run.failure = f"{run.row.family} answers {response.status}: {content[:_MAX_SHOWN].decode(errors='replace')}"
            return False
        run.result = _checked_result(run.row, response.status, content)
        return True

    def _played(self, run: _Run, turns: Turns, limits: Limits) -> PlayedEpisode:
        result = run.result or {}
        claimed = turns.claim(result)
        episode = AgentEpisode(run.row.id, result, claimed[-1] if claimed else None, self._renderer.decode)
        played = PlayedEpisode(episode, claimed)
        is_training = limits.ends_at_cut
        if run.engine_failed:
            played.end, played.failure = EpisodeEnd.ENGINE_FAILED, turns.engine_failure
        elif run.result is None or not claimed:
            refusal = f"; refused: {turns.refusal or self._server.refusal}" if turns.refusal or self._server.refusal else ""
            played.end = EpisodeEnd.ENVIRONMENT_FAILED
            played.failure = (run.failure or f"{run.row.family} returned no turn that was sampled for it") + refusal
        elif is_training and _is_masked(result):
            played.end, played.failure = EpisodeEnd.ENVIRONMENT_FAILED, f"{run.row.family} masks the episode (mask_sample)"
        elif is_training and any(turn.completion.finish_reason is FinishReason.LENGTH for turn in claimed):
            played.end = EpisodeEnd.TRUNCATED
        else:
            played.end, played.reward = EpisodeEnd.CLOSED, float(result["reward"])
        return played


@contextmanager
def opened(
    config: EnvironmentConfig,
    rows: Sequence[EpisodeRow],
    engine: Engine,
    renderer: Renderer,
    *,
    command: Callable[[str], Sequence[str] | None],
    directory: Path,
    run_seed: int,
) -> Iterator[GymPlayer]:
    """A player of these rows; what it started is ended with the block.

    Args:
        command: environment.command for an address of the policy.
        directory: for the output of that program.

    Raises:
        UserError: where the port is taken, or an agent is not known.
        InfraLimitError: where the servers do not come up.
    """
    with ExitStack() as stack:
        portal = stack.enter_context(start_blocking_portal())
        server = ChatServer(config.listen)
        portal.call(server.start)
        stack.callback(portal.call, server.stop)
        check = stack.enter_context(running(command(server.base_url), directory, head=config.head))
        sys.stderr.write(f"environment: the policy answers at {server.base_url}; waiting for NeMo-Gym at {config.head}\n")
        agents = wait_for_agents(config.head, (row.family for row in rows), config.start_deadline_s, check)
        yield GymPlayer(config, engine, renderer, portal=portal, server=server, agents=agents, check=check, run_seed=run_seed)


def _mark_open(runs: Sequence[_Run]) -> None:
    """Before anybody is told that the engine failed: whatever comes back from here on says nothing."""
    for run in runs:
        run.engine_failed |= run.result is None


def _check_tickets(runs: Sequence[_Run], turns: Turns) -> None:
    """Refuses model servers that hand no tickets on: then every result that holds a turn at all lacks them."""
    talking = [run.result for run in runs if run.result is not None and says_something(run.result)]
    if talking and turns.num_unclaimed and not any(tickets_of(result) for result in talking):
        raise UserError(
            f"{turns.num_unclaimed} turns were sampled and no result of {len(talking)} episodes says which are its own",
            rule="an agent hands on what the model server returns as token ids",
            fix="set return_token_id_information: true on NeMo-Gym's policy model server (vllm_model)",
        )


def _checked_result(row: EpisodeRow, status: int, content: bytes) -> dict[str, Any]:
    """The result of a row.

    Raises:
        UserError: where the agent refuses the row, or its reward is none.
    """
    shown = content[:_MAX_SHOWN].decode(errors="replace")
    if status != 200:
        raise UserError(
            f"agent {row.family} refuses row {row.id} with status {status}: {shown}",
            rule="a row is what its agent takes at POST /run",
            fix="correct the rows, or run the version of NeMo-Gym that they were prepared with",
        )
    try:
        result = orjson.loads(content)
    except orjson.JSONDecodeError:
        result = None
    if not isinstance(result, dict):
        result = {}
    reward = cast("dict[str, Any]", result).get("reward")
    if isinstance(reward, bool) or not isinstance(reward, int | float) or not 0 <= reward <= 1:
        raise UserError(
            f"agent {row.family} returns the reward {reward!r} for row {row.id}: {shown}",
            rule="a reward is a number in [0, 1]",
            fix="use an agent whose rewards are, or have its resources server scale them",
        )
    return result


def _is_masked(result: dict[str, Any]) -> bool:
    """Whether the environment takes back what it says: a time-out or a pass by accident, as anyterminal_agent and swe_agents mark them."""
    instance = result.get("instance_config")
    return result.get("mask_sample") is True or (isinstance(instance, dict) and instance.get("mask_sample") is True)


def _is_short(value: object) -> bool:
    return isinstance(value, str) and len(value) <= _MAX_SHOWN


def _token_order(played: PlayedEpisode) -> list[tuple[int, ...]]:
    return [turn.completion.token_ids for turn in played.turns]
