"""Messages between the trainer's process and an engine's: one JSON object per frame, over a connection that both ends proved a key on.

Names, token ids and numbers only; nothing that arrives is unpickled. Frames are not encrypted: the key keeps strangers out, the cluster's
network keeps listeners out. Called by both ends (pool.py and launchers.py here, replica.py there).
"""

from __future__ import annotations

import contextlib
import os
import queue
import secrets
import socket
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client, Connection, Listener, answer_challenge, deliver_challenge
from pathlib import Path
from typing import Any

import orjson

from pivotrl.errors import UserError
from pivotrl.rollouts.engine import GenerationRequest
from pivotrl.rollouts.routes import route_rows, routes_of
from pivotrl.types import Completion, FinishReason

PROTOCOL = 3
"""Both ends must be of one protocol; a peer of another is sent away."""
_HELLO_S = 60.0
_KEY_BYTES = 32

type Address = str | tuple[str, int]
"""A socket's path on this machine, or host and port."""


class PeerLost(RuntimeError):
    """The other end died, closed the connection, or did not answer in time."""


@dataclass(frozen=True, slots=True)
class Arrival:
    """A process that connected and proved the key."""

    connection: Connection
    name: str
    """What it was told to call itself; empty for one that was started by others."""
    description: str
    """Process and machine, for messages."""


def send(connection: Connection, message: Mapping[str, Any]) -> None:
    """Sends one message.

    Raises:
        PeerLost: where nobody reads any more.
    """
    try:
        connection.send_bytes(orjson.dumps(message))
    except OSError as error:
        raise PeerLost(f"connection lost ({error})") from error


def receive(connection: Connection, timeout_s: float | None) -> dict[str, Any]:
    """Waits for one message, without limit where `timeout_s` is None.

    Raises:
        PeerLost: at the end of the connection, of the time, or for a frame that is no message.
    """
    try:
        if not connection.poll(timeout_s):
            raise PeerLost(f"no answer within {timeout_s:g} s")
        message = orjson.loads(connection.recv_bytes())
    except (EOFError, OSError) as error:
        raise PeerLost("connection lost") from error
    except orjson.JSONDecodeError as error:
        raise PeerLost(f"a frame that is no message ({error})") from error
    if not isinstance(message, dict):
        raise PeerLost("a frame that is no message")
    return message


def hang_up(connection: Connection) -> None:
    """Closes a connection so that a thread which waits for its next message is woken."""
    with contextlib.suppress(OSError), socket.socket(fileno=os.dup(connection.fileno())) as end:
        end.shutdown(socket.SHUT_RDWR)
    connection.close()


def reached_at(connection: Connection) -> str:
    """This machine's address as the other end of a connection knows it; that of this machine for itself where both are on it."""
    with contextlib.suppress(OSError), socket.socket(fileno=os.dup(connection.fileno())) as end:
        if end.family in (socket.AF_INET, socket.AF_INET6):
            return end.getsockname()[0]
    return "127.0.0.1"


class Door:
    """Listens, and keeps whoever proves the key until someone asks for them.

    A stranger costs a thread and reaches nothing. `close` stops listening; connections that were handed out stay open.
    """

    def __init__(self, address: Address, key: bytes) -> None:
        try:
            self._listener = Listener(address)
        except OSError as error:
            raise UserError(
                f"cannot listen on {address} ({error.strerror})",
                rule="placement.listen is an address of this machine with a free port",
                fix="choose another port, or 0 for any free one",
            ) from error
        self.address: Address = self._listener.address
        self._key, self._is_closed, self._closing = key, False, threading.Lock()
        self._arrived: queue.Queue[Arrival] = queue.Queue()
        self._thread = threading.Thread(target=self._accept, daemon=True)
        self._thread.start()

    def next(self, timeout_s: float) -> Arrival:
        """The next arrival that nobody has taken.

        Raises:
            PeerLost: where none came in time.
        """
        try:
            return self._arrived.get(timeout=timeout_s) if timeout_s > 0 else self._arrived.get_nowait()
        except queue.Empty as error:
            raise PeerLost(f"no engine connected within {timeout_s:g} s") from error

    def close(self) -> None:
        """Stops listening and sends away those who still wait."""
        with self._closing:
            self._is_closed = True
        # A thread inside accept() notices a closed socket only with the next connection.
        with contextlib.suppress(OSError, EOFError):
            Client(self.address).close()
        self._thread.join()
        self._listener.close()
        with contextlib.suppress(queue.Empty):
            while True:
                self._arrived.get_nowait().connection.close()

    def _accept(self) -> None:
        while not self._is_closed:
            with contextlib.suppress(OSError):
                connection = self._listener.accept()
                threading.Thread(target=self._admit, args=(connection,), daemon=True).start()

    def _admit(self, connection: Connection) -> None:
        """Each end proves to the other that it has the key; a peer that says nothing holds up this thread alone."""
        try:
            deliver_challenge(connection, self._key)
            answer_challenge(connection, self._key)
            hello = receive(connection, _HELLO_S)
            if hello.get("protocol") != PROTOCOL:
                send(connection, {"op": "refuse", "reason": f"the trainer speaks protocol {PROTOCOL}, this engine {hello.get('protocol')}"})
                raise PeerLost("another protocol")
            arrival = Arrival(connection, str(hello["name"]), f"process {hello['pid']} on {hello['host']}")
        except (AuthenticationError, PeerLost, EOFError, OSError, AssertionError, KeyError):
            connection.close()
            return
        with self._closing:
            if self._is_closed:
                connection.close()
            else:
                self._arrived.put(arrival)


def knock(address: Address, key: bytes, *, name: str) -> Connection:
    """Connects to a door and says who this is.

    Raises:
        PeerLost: where nobody listens there, or the key is another.
    """
    try:
        connection = Client(address, authkey=key)
    except (OSError, EOFError, AuthenticationError) as error:
        raise PeerLost(f"cannot connect to {address} ({error or type(error).__name__})") from error
    send(connection, {"protocol": PROTOCOL, "name": name, "pid": os.getpid(), "host": os.uname().nodename})
    return connection


def make_key(path: Path) -> bytes:
    """A new key in a file that only this user can read."""
    key = secrets.token_bytes(_KEY_BYTES)
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.unlink(missing_ok=True)
    with os.fdopen(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(key)
    temporary.replace(path)
    return key


def request_rows(requests: Sequence[GenerationRequest]) -> list[list[Any]]:
    """Requests as lists; `requests_of` reads them back."""
    return [[request.prompt_token_ids, request.seeds, request.temperature, request.max_new_tokens] for request in requests]


def requests_of(rows: Sequence[Sequence[Any]]) -> list[GenerationRequest]:
    """Requests from `request_rows`."""
    return [GenerationRequest(tuple(prompt), tuple(seeds), float(temperature), cap) for prompt, seeds, temperature, cap in rows]


def completion_rows(results: Sequence[Sequence[Completion]]) -> list[list[Any]]:
    """Completions as lists, by request; `completions_of` reads them back, bit for bit."""
    return [
        [
            [[one.token_ids, one.logprobs, one.finish_reason.value, one.policy_version] for one in samples],
            route_rows([one.routed_experts for one in samples]),
        ]
        for samples in results
    ]


def completions_of(rows: Sequence[Sequence[Any]]) -> list[tuple[Completion, ...]]:
    """Completions from `completion_rows`."""
    return [
        tuple(
            Completion(tuple(tokens), tuple(logprobs), FinishReason(reason), version, routes)
            for (tokens, logprobs, reason, version), routes in zip(samples, routes_of(routed), strict=True)
        )
        for samples, routed in rows
    ]
