"""The trainer's end of one replica: questions and answers over its connection, and many of them at once. Called by pool.py."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Any

from pivotrl.rollouts.replies import result_of
from pivotrl.rollouts.wire import Arrival, receive, send


@dataclass(frozen=True, slots=True)
class Replica:
    """One connected engine."""

    place: int
    serial: int
    """How many engines this pool was given before."""
    arrival: Arrival
    lock: threading.Lock
    """Held for one question and its answer."""
    num_receivers: int = 1
    """Processes of it that take part in a broadcast of weights."""

    def ask(self, message: Mapping[str, Any], timeout_s: float) -> Any:
        """One question and its answer.

        Raises:
            PeerLost: where it died or took too long; it must be ended then.
            EngineError: where its engine failed.
            UserError, ValueError, RuntimeError: as its engine raised them.
        """
        with self.lock:
            send(self.arrival.connection, message)
            return result_of(receive(self.arrival.connection, timeout_s))


def at_once[A, T](work: Callable[[A], T], things: list[A]) -> list[T]:
    """`work` for all things, each in a thread of its own, which mostly wait for other processes."""
    if len(things) <= 1:
        return [work(thing) for thing in things]
    threads = ThreadPoolExecutor(len(things))
    try:
        futures = [threads.submit(work, thing) for thing in things]
        wait(futures)
        return [future.result() for future in futures]
    finally:
        # Not waited for: an interrupt must not hang on engines that are still at work; `close` ends them.
        threads.shutdown(wait=False)
