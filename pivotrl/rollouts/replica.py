"""The engine's side of a replica: a process that holds one engine and does what the trainer's process asks over a connection.

Consumes messages (wire.py), answers each with {"ok": ...} or {"error": kind, ...}. What engine to build comes with the first message, so
that both sides cannot disagree. Started by verbs/engine.py; ends when the connection does.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from typing import Any

from pivotrl.rollouts.engine import Engine, ReceivingEngine
from pivotrl.rollouts.incoming import Incoming
from pivotrl.rollouts.replies import error_reply
from pivotrl.rollouts.wire import PeerLost, completion_rows, receive, requests_of, send
from pivotrl.weights import filesystem, shared_memory
from pivotrl.weights.broadcast import KIND as BROADCAST
from pivotrl.weights.broadcast import Member
from pivotrl.weights.manifest import VerifiedStream
from pivotrl.weights.push import HasCensus

type Build = Callable[[Mapping[str, Any]], Engine]
"""From the trainer's "start" message to an engine."""


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
                reply = error_reply(error)
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
        return engine, {"census": None if census is None else census.as_dict(), "num_receivers": _num_receivers(engine)}
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
    invitation, version = message["invitation"], message["version"]
    is_for_workers = bool(invitation) and _num_receivers(engine) > 1
    readers = {shared_memory.KIND: shared_memory.read, filesystem.KIND: filesystem.read}
    incoming = Incoming(connection, readers if is_for_workers else {**readers, BROADCAST: member.read})
    started_s = time.perf_counter()
    try:
        if is_for_workers:
            assert isinstance(engine, ReceivingEngine)
            parts = engine.receive_weights(incoming.messages(), invitation, version)
        else:
            if invitation:
                member.join(invitation)
            started_s = time.perf_counter()
            engine.load_weights(VerifiedStream(incoming.tensors()), version)
            parts = None
    finally:
        incoming.drain()
    if parts is None:
        parts = {"read_s": incoming.read_s, "load_s": time.perf_counter() - started_s - incoming.waited_s - incoming.read_s}
    started_s = time.perf_counter()
    digests = engine.weight_digests()
    return {"digests": digests, **parts, "digest_s": time.perf_counter() - started_s}


def _num_receivers(engine: Engine) -> int:
    return engine.num_receivers if isinstance(engine, ReceivingEngine) else 1
