"""Whole episodes played by agents of NeMo-Gym: they ask for the turns, their environment says what the episode was worth.

An episode is one POST /run of a row to its agent. Whatever the agent asks meanwhile comes to `rollouts/chat_server.py`, is rendered, sampled and
parsed here by the recipe's renderer and engine, and goes back with a ticket; the result hands the tickets of its turns on, so reward and
turns belong together by what the agent itself says. Nothing of an agent's text is encoded again.

Results depend on the environment, which need not be deterministic. What is drawn does not depend on timing: the k-th sample of a prompt in
a step has the k-th seed of that prompt, and the episodes of a task are put in the order of their tokens. Log-probs do in their last digits,
as far as which turns meet in a batch does.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from operator import itemgetter
from pathlib import Path
from typing import Any, cast

import aiohttp
import orjson
from anyio.from_thread import BlockingPortal, start_blocking_portal

from pivotrl.config.environment import EnvironmentConfig
from pivotrl.errors import UserError
from pivotrl.gym.episode_rows import EpisodeRow
from pivotrl.gym.servers import running, wait_for_agents
from pivotrl.identity import content_id, derive_seed
from pivotrl.rollouts.chat_messages import chat_reply, tickets_of
from pivotrl.rollouts.chat_server import Asked, ChatServer
from pivotrl.rollouts.engine import Engine, EngineError, GenerationRequest
from pivotrl.rollouts.episodes import EpisodeEnd, Limits, PlayedEpisode, SampledTurn
from pivotrl.rollouts.render import Renderer
from pivotrl.rollouts.render_template import UnrenderableState
from pivotrl.types import FinishReason, Message, Role, State, ToolOrigin

_SERVER_ERRORS = range(500, 600)
_MAX_SHOWN = 300
_SAY_EVERY_S = 30.0
_UNCLAIMED, _RETRIES = "rollout/unclaimed_turns/sum", "rollout/environment_retries/sum"


@dataclass(frozen=True, slots=True)
class AgentEpisode:
    """An episode that an agent played: what is left of it to look at."""

    task_id: str
    messages: tuple[Message, ...]
    result: dict[str, Any]

    def state(self) -> State:
        """The last prompt as text, and the turn that answered it."""
        return State(self.messages, (), ToolOrigin.NONE)

    def outcome(self) -> dict[str, Any]:
        """The environment's own words, long texts and conversations left out."""
        return {name: value for name, value in self.result.items() if isinstance(value, bool | int | float) or _is_short(value)}


@dataclass(slots=True)
class _Run:
    """One POST /run."""

    row: EpisodeRow
    result: dict[str, Any] | None = None
    failure: str = ""


@dataclass(slots=True)
class _Collection:
    """The turns of one call of `play`."""

    limits: Limits
    place: tuple[str | int, ...]
    turns: dict[int, SampledTurn] = field(default_factory=dict[int, SampledTurn])
    """By ticket, those that no result has claimed yet."""
    num_asked: Counter[str] = field(default_factory=Counter[str])
    """By prompt."""
    engine_failure: str = ""


class GymPlayer:
    """Plays rows. Lifecycle: `opened`; `play` any number of times, under whatever weights the engine has by then."""

    def __init__(
        self,
        config: EnvironmentConfig,
        engine: Engine,
        renderer: Renderer,
        *,
        portal: BlockingPortal,
        server: ChatServer,
        agents: dict[str, str],
        run_seed: int,
    ) -> None:
        self._config, self._engine, self._renderer, self._run_seed = config, engine, renderer, run_seed
        self._portal, self._server, self._agents = portal, server, agents
        self._num_open = 0
        self._last_ticket = 0
        self._told_of_length = False
        self._cost: Counter[str] = Counter()

    def first_prompt(self, task: EpisodeRow) -> tuple[int, ...] | None:  # noqa: ARG002 - the interface's
        """None: only the agent knows what it will ask."""
        return None

    def play(self, tasks: Sequence[EpisodeRow], num_samples: int, *, limits: Limits, place: tuple[str | int, ...]) -> list[PlayedEpisode]:
        """`num_samples` episodes of each task, in the order of the tasks.

        An episode whose server failed, or took too long, has the end ENVIRONMENT_FAILED; one that failed with the engine ENGINE_FAILED.

        Args:
            place: where in the run this happens, for the seeds.

        Raises:
            UserError: where an agent refuses a row, its reward is not in [0, 1], or its results have no tickets.
        """
        collection = _Collection(limits, place)
        runs = [_Run(row) for row in tasks for _ in range(num_samples)]
        slots = asyncio.Semaphore(self._config.max_concurrent_episodes)
        self._server.open()
        futures = [self._portal.start_task_soon(self._post, run, slots, limits) for run in runs]
        try:
            self._serve(collection, futures)
        finally:
            self._server.shut()
            for future in futures:
                future.cancel()
        played = [self._played(run, collection) for run in runs]
        self._check_tickets(runs, collection)
        self._cost[_UNCLAIMED] += len(collection.turns)
        groups = [played[start : start + num_samples] for start in range(0, len(played), num_samples)]
        return [one for group in groups for one in sorted(group, key=_token_order)]

    def take_cost(self) -> dict[str, float]:
        """Turns that no result claimed and episodes that were played again, since the last call."""
        cost, self._cost = self._cost, Counter()
        return {_UNCLAIMED: cost[_UNCLAIMED], _RETRIES: cost[_RETRIES]}

    def _serve(self, collection: _Collection, futures: Sequence[Future[None]]) -> None:
        """Answers until every episode has ended; says every half a minute how far they are, inside of the stage's own bar."""
        said_s = started_s = time.monotonic()
        while True:
            done = [future for future in futures if future.done()]
            for future in done:
                if (error := future.exception()) is not None:
                    raise error
            if len(done) == len(futures):
                return
            if time.monotonic() - said_s > _SAY_EVERY_S:
                said_s = time.monotonic()
                rate = len(collection.turns) / (said_s - started_s)
                sys.stderr.write(f"environment: {len(done)} of {len(futures)} episodes have ended, {rate:.1f} turns/s\n")
            if asked := self._server.take(lambda: self._num_open, self._config.batch_wait_s):
                self._answer(asked, collection)

    def _answer(self, asked: Sequence[Asked], collection: _Collection) -> None:
        """One batch of turns."""
        requests: list[tuple[Asked, GenerationRequest]] = []
        # In the order of the prompts, not of arrival: an engine's log-probs depend on its batch in their last digits.
        for prompt, one in sorted(self._rendered(asked), key=itemgetter(0)):
            if one.is_tokenize:
                limit = collection.limits.max_prompt_tokens + collection.limits.max_new_tokens
                one.answer({"tokens": list(prompt), "count": len(prompt), "max_model_len": limit})
            elif len(prompt) > collection.limits.max_prompt_tokens:
                self._refuse_length(one, len(prompt), collection.limits.max_prompt_tokens)
            else:
                requests.append((one, self._request(prompt, one.request.max_new_tokens, collection)))
        if not requests:
            return
        try:
            completions = self._engine.generate([request for _, request in requests])
        except EngineError as error:
            collection.engine_failure = str(error)
            for one, _ in requests:
                one.refuse(f"the engine failed: {error}", 500)
            return
        for (one, request), (completion,) in zip(requests, completions, strict=True):
            tools = one.request.state.tools
            turn = SampledTurn(request.prompt_token_ids, completion, self._renderer.parse(completion.token_ids, tools))
            self._last_ticket += 1
            collection.turns[self._last_ticket] = turn
            one.answer(
                chat_reply(
                    completion,
                    turn.action,
                    text=self._renderer.completion_text(completion.token_ids),
                    tools=tools,
                    num_prompt_tokens=len(request.prompt_token_ids),
                    ticket=self._last_ticket,
                    reasoning=self._config.reasoning,
                )
            )

    def _refuse_length(self, asked: Asked, num_tokens: int, limit: int) -> None:
        """In the words that NeMo-Gym's model server takes for a full context, and not for an error. Said once on stderr."""
        if not self._told_of_length:
            self._told_of_length = True
            sys.stderr.write(f"environment: a prompt of {num_tokens} tokens was refused; render.max_prompt_tokens is {limit}\n")
        asked.refuse(f"the maximum context length is {limit} tokens and the messages have {num_tokens}")

    def _rendered(self, asked: Sequence[Asked]) -> Iterator[tuple[tuple[int, ...], Asked]]:
        """Prompts of the requests that have one; the others are refused."""
        for one in asked:
            try:
                yield self._renderer.render_prompt(one.request.state), one
            except UnrenderableState as error:
                one.refuse(f"the chat template refuses the conversation: {error}")

    def _request(self, prompt: tuple[int, ...], cap: int | None, collection: _Collection) -> GenerationRequest:
        key = content_id(prompt)
        seed = derive_seed(self._run_seed, *collection.place, key, collection.num_asked[key])
        collection.num_asked[key] += 1
        limit = collection.limits.max_new_tokens
        return GenerationRequest(prompt, (seed,), collection.limits.temperature, limit if cap is None else min(cap, limit))

    async def _post(self, run: _Run, slots: asyncio.Semaphore, limits: Limits) -> None:
        """Plays one episode, again where its server fails; fills in the run."""
        body = orjson.dumps(run.row.request(temperature=limits.temperature, max_new_tokens=limits.max_new_tokens))
        async with slots, aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=self._config.episode_deadline_s)) as session:
            self._num_open += 1
            try:
                for attempt in range(1 + self._config.max_retries):
                    self._cost[_RETRIES] += attempt > 0
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

    def _played(self, run: _Run, collection: _Collection) -> PlayedEpisode:
        result = run.result or {}
        tickets = tickets_of(result)
        unknown = [ticket for ticket in tickets if ticket not in collection.turns]
        turns = [] if unknown else [collection.turns.pop(ticket) for ticket in tickets]
        played = PlayedEpisode(AgentEpisode(run.row.id, self._shown(turns[-1]) if turns else (), result), turns)
        if run.result is None or unknown:
            played.end = EpisodeEnd.ENGINE_FAILED if collection.engine_failure else EpisodeEnd.ENVIRONMENT_FAILED
            played.failure = collection.engine_failure or run.failure or f"{run.row.family} returned a turn that was not sampled for it"
        elif collection.limits.ends_at_cut and any(turn.completion.finish_reason is FinishReason.LENGTH for turn in turns):
            played.end = EpisodeEnd.TRUNCATED
        else:
            played.end, played.reward = EpisodeEnd.CLOSED, float(result["reward"])
        return played

    def _shown(self, turn: SampledTurn) -> tuple[Message, ...]:
        return Message(Role.USER, self._renderer.decode(turn.prompt_token_ids)), turn.action.as_message()

    def _check_tickets(self, runs: Sequence[_Run], collection: _Collection) -> None:
        finished = [run.result for run in runs if run.result is not None]
        if collection.turns and finished and not any(tickets_of(result) for result in finished):
            raise UserError(
                f"{len(collection.turns)} turns were sampled and no result of {len(finished)} episodes says which are its own",
                rule="an agent hands on what the model server returns as token ids",
                fix="set return_token_id_information: true on NeMo-Gym's policy model server (vllm_model)",
            )


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
        address = f"http://{config.listen.rpartition(':')[0]}:{server.port}/v1"
        check = stack.enter_context(running(command(address), directory))
        sys.stderr.write(f"environment: the policy answers at {address}; waiting for NeMo-Gym at {config.head}\n")
        agents = wait_for_agents(config.head, (row.family for row in rows), config.start_deadline_s, check)
        yield GymPlayer(config, engine, renderer, portal=portal, server=server, agents=agents, run_seed=run_seed)


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


def _is_short(value: object) -> bool:
    return isinstance(value, str) and len(value) <= _MAX_SHOWN


def _token_order(played: PlayedEpisode) -> list[tuple[int, ...]]:
    return [turn.completion.token_ids for turn in played.turns]
