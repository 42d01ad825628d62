"""The engine's side of a replica: a process that holds one engine and does what the trainer's process asks over a connection.

Consumes messages (wire.py), answers each with {"ok": ...} or {"error": kind, ...}. What engine to build comes with the first message, so
that both sides cannot disagree. Started by verbs/engine.py; ends when the connection does.
"""

from __future__ import annotations

import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any

from pivotrl.errors import UserError
from pivotrl.rollouts.engine import Engine, EngineError, is_out_of_memory
from pivotrl.rollouts.wire import PeerLost, completion_rows, receive, requests_of, send
from pivotrl.weights import filesystem, shared_memory
from pivotrl.weights.broadcast import KIND as BROADCAST
from pivotrl.weights.broadcast import Member
from pivotrl.weights.buckets import Bucket, Reader, read_bucket
from pivotrl.weights.manifest import TensorRecord, VerifiedStream
from pivotrl.weights.push import HasCensus

if TYPE_CHECKING:
    import torch

type Build = Callable[[Mapping[str, Any]], Engine]
"""From the trainer's "start" message to an engine."""


class _Aborted(RuntimeError):
    """The sender gave up in the middle of a hand-over."""


def serve(connection: Connection, build: Build) -> str | None:
    """Answers until the other end closes or is gone; the reason where it sent this engine away."""
    engine: Engine | None = None
    member = Member()
    try:
        while True:
            try:
                message = receive(connection, None)
            except PeerLost:
                return None
            if message["op"] == "refuse":
                return message["reason"]
            if message["op"] == "close":
                return None
            if message["op"] == "start" and engine is not None:
                engine.close()
                engine = None
            try:
                engine, result = _do(connection, message, engine, build, member)
                reply = {"ok": result}
            except Exception as error:  # noqa: BLE001 - the boundary between two processes: the other one decides what it means
                reply = _error(error)
            try:
                send(connection, reply)
            except PeerLost:
                return None
    finally:
        connection.close()
        if engine is not None:
            engine.close()


def _do(connection: Connection, message: Mapping[str, Any], engine: Engine | None, build: Build, member: Member) -> tuple[Engine, Any]:
    if message["op"] == "start":
        engine = build(message)
        census = engine.weight_census() if isinstance(engine, HasCensus) else None
        return engine, {"census": None if census is None else census.as_dict()}
    if engine is None:
        raise RuntimeError(f"asked to {message['op']} before any engine was started")
    match message["op"]:
        case "generate":
            return engine, completion_rows(engine.generate(requests_of(message["requests"])))
        case "digests":
            return engine, engine.weight_digests()
        case "load":
            return engine, _load(connection, engine, message, member)
        case other:
            raise RuntimeError(f"no such request: {other!r}")


def _load(connection: Connection, engine: Engine, message: Mapping[str, Any], member: Member) -> dict[str, Any]:
    """One hand-over: the messages that follow are its buckets, to "end" or "abort", and all of them are read whatever happens."""
    incoming = _Incoming(connection, {shared_memory.KIND: shared_memory.read, filesystem.KIND: filesystem.read, BROADCAST: member.read})
    started_s = time.perf_counter()
    try:
        if message["invitation"]:
            member.join(message["invitation"])
        started_s = time.perf_counter()
        engine.load_weights(VerifiedStream(incoming.tensors()), message["version"])
    finally:
        incoming.drain()
    load_s = time.perf_counter() - started_s - incoming.waited_s - incoming.read_s
    started_s = time.perf_counter()
    digests = engine.weight_digests()
    return {"digests": digests, "read_s": incoming.read_s, "load_s": load_s, "digest_s": time.perf_counter() - started_s}


class _Incoming:
    """The buckets of one hand-over as they arrive, and where the time went."""

    def __init__(self, connection: Connection, readers: Mapping[str, Reader]) -> None:
        self._connection, self._readers = connection, readers
        self._is_over = False
        self.waited_s = self.read_s = 0.0

    def tensors(self) -> Iterator[tuple[TensorRecord, torch.Tensor]]:
        """All tensors, each checked against its record, bytes included."""
        while (bucket := self._next()) is not None:
            started_s = time.perf_counter()
            verified = read_bucket(bucket, self._readers)
            self.read_s += time.perf_counter() - started_s
            yield from verified

    def drain(self) -> None:
        """Reads on to the end of the hand-over, so that the next message is a request again.

        Broadcasts are received and dropped: the sender and the other members wait for all to take part, and the error behind this should be
        told at once, not after a timeout.
        """
        can_take_part = True
        while not self._is_over:
            message = receive(self._connection, None)
            self._is_over = message["op"] != "bucket"
            if not self._is_over and can_take_part and message["kind"] == BROADCAST:
                try:
                    for _ in self._readers[BROADCAST](Bucket.of(message)):
                        pass
                except Exception as error:  # noqa: BLE001 - the error that led here is the one to tell
                    sys.stderr.write(f"left the broadcast of weights: {error}\n")
                    can_take_part = False

    def _next(self) -> Bucket | None:
        started_s = time.perf_counter()
        message = receive(self._connection, None)
        self.waited_s += time.perf_counter() - started_s
        if message["op"] == "bucket":
            return Bucket.of(message)
        self._is_over = True
        if message["op"] == "abort":
            raise _Aborted("the sender gave up in the middle of a hand-over")
        return None


def _error(error: Exception) -> dict[str, Any]:
    """What the other end raises: its own kinds of error by name, anything else as a bug with its traceback."""
    if isinstance(error, UserError):
        return {"error": "user", "problem": error.problem, "rule": error.rule, "fix": error.fix}
    if isinstance(error, EngineError) or is_out_of_memory(error):
        return {"error": "engine", "message": str(error) or "out of memory"}
    if isinstance(error, ValueError):
        return {"error": "value", "message": str(error)}
    if type(error) in (RuntimeError, _Aborted):
        return {"error": "runtime", "message": str(error)}
    return {"error": "bug", "message": "".join(traceback.format_exception(error))}
