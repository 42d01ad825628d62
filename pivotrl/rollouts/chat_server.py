"""The policy as an OpenAI-compatible chat endpoint, for agents that run elsewhere: requests wait here until whoever has the engine takes them.

One thread speaks HTTP and does nothing else; rendering, sampling and parsing are the taker's, so an engine is asked by one thread only.
GET /v1/models, POST /v1/chat/completions, POST /tokenize (as vLLM: the prompt's token ids). Used by gym/player.py.
"""

from __future__ import annotations

import asyncio
import contextlib
import queue
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import orjson
from aiohttp import web

from pivotrl.errors import UserError
from pivotrl.rollouts.chat_messages import ChatRequest, UnusableRequest, read_chat

_MAX_BODY_BYTES = 1 << 28
_POLL_S = 0.1
# All agents may call at once.
_BACKLOG = 4096
# Not 503: NeMo-Gym's model server asks again for ever then, and a request of an abandoned episode would be answered in a later step.
_GONE = 410
_SHUT = "no rollouts are being collected"


@dataclass(frozen=True, slots=True)
class Asked:
    """One request that waits for its answer."""

    request: ChatRequest
    is_tokenize: bool
    """Whether only the prompt's tokens are asked for."""
    reply: asyncio.Future[tuple[int, Mapping[str, Any]]]

    def answer(self, body: Mapping[str, Any], status: int = 200) -> None:
        """Sends the answer; callable from any thread, once."""
        self.reply.get_loop().call_soon_threadsafe(self._settle, status, body)

    def refuse(self, reason: str, status: int = 400) -> None:
        """Sends an error in OpenAI's form."""
        self.answer(_error(reason, status), status)

    def _settle(self, status: int, body: Mapping[str, Any]) -> None:
        if not self.reply.done():
            self.reply.set_result((status, body))


class ChatServer:
    """Lifecycle: `start` in the event loop that serves; `open` and `shut` around every collection of rollouts; `stop` in the same loop.

    Args:
        listen: HOST:PORT; port 0 takes a free one.
    """

    def __init__(self, listen: str) -> None:
        self._host, _, port = listen.rpartition(":")
        self.port = int(port)
        self._asked: queue.SimpleQueue[Asked] = queue.SimpleQueue()
        self._is_open = False
        self.refusal = ""
        """Why a request could not be read, the first time since `open`."""
        self._runner: web.AppRunner | None = None

    async def start(self) -> None:
        """Listens.

        Raises:
            UserError: where the port cannot be taken.
        """
        application = web.Application(client_max_size=_MAX_BODY_BYTES)
        application.add_routes(
            [
                web.get("/v1/models", self._models),
                web.post("/v1/chat/completions", self._chat),
                web.post("/tokenize", self._tokenize),
            ]
        )
        self._runner = web.AppRunner(application, access_log=None)
        await self._runner.setup()
        site = web.TCPSite(self._runner, self._host, self.port, backlog=_BACKLOG)
        try:
            await site.start()
        except OSError as error:
            await self.stop()
            raise UserError(
                f"environment.listen is {self._host}:{self.port}: {error.strerror or error}",
                rule="the policy answers agents there",
                fix="name an address of this machine and a free port",
            ) from error
        self.port = self._runner.addresses[0][1]

    @property
    def base_url(self) -> str:
        """What agents are told, once it listens."""
        return f"http://{self._host}:{self.port}/v1"

    async def stop(self) -> None:
        """Closes the port; whoever still waits gets no answer."""
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    def open(self) -> None:
        """From here on requests are taken in."""
        self._is_open, self.refusal = True, ""

    def shut(self) -> None:
        """From here on requests are refused, those that wait too: no rollouts are collected."""
        self._is_open = False
        while not self._asked.empty():
            self._asked.get().refuse(_SHUT, _GONE)

    def take(self, num_expected: Callable[[], int], wait_s: float) -> list[Asked]:
        """The requests that wait: once there are as many as expected, or none has come for `wait_s`. Empty where none comes for a moment.

        Args:
            num_expected: how many may come before one of these is answered; asked again and again.
        """
        taken: list[Asked] = []
        limit_s = time.monotonic() + _POLL_S
        while not taken or len(taken) < num_expected():
            left_s = limit_s - time.monotonic()
            if left_s <= 0:
                break
            with contextlib.suppress(queue.Empty):
                # In short waits: fewer may be expected meanwhile.
                taken.append(self._asked.get(timeout=min(left_s, _POLL_S)))
                limit_s = time.monotonic() + wait_s
        while not self._asked.empty():
            taken.append(self._asked.get())
        return taken

    async def _models(self, request: web.Request) -> web.Response:  # noqa: ARG002 - aiohttp's signature
        return _json({"object": "list", "data": [{"id": "policy", "object": "model"}]})

    async def _chat(self, request: web.Request) -> web.Response:
        return await self._queued(request, is_tokenize=False)

    async def _tokenize(self, request: web.Request) -> web.Response:
        return await self._queued(request, is_tokenize=True)

    async def _queued(self, request: web.Request, *, is_tokenize: bool) -> web.Response:
        try:
            asked = Asked(read_chat(orjson.loads(await request.read())), is_tokenize, asyncio.get_running_loop().create_future())
        except (UnusableRequest, orjson.JSONDecodeError) as error:
            self.refusal = self.refusal or str(error)
            return _json(_error(str(error), 400), 400)
        if not self._is_open:
            return _json(_error(_SHUT, _GONE), _GONE)
        self._asked.put(asked)
        status, body = await asked.reply
        return _json(body, status)


def _error(reason: str, status: int) -> dict[str, Any]:
    # vLLM's own clients look for `object` and `message` at the top; OpenAI's below `error`.
    inner = {"message": reason, "type": "BadRequestError" if status < 500 else "InternalServerError", "param": None, "code": status}
    return {"object": "error", "message": reason, "error": inner}


def _json(body: Mapping[str, Any], status: int = 200) -> web.Response:
    return web.Response(body=orjson.dumps(body), status=status, content_type="application/json")
