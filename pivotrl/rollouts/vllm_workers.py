"""New weights for a vLLM of several worker processes: each worker takes part in the trainer's broadcasts, checks what arrived and loads its part.

The engine's process passes on what the trainer announces (`relay`), over a socket that only this user reaches; the bytes do not pass through it.
vLLM mixes `WeightReceiver` into its worker class (`worker_extension_cls`). Called by vllm.py; imports no vllm.
"""

from __future__ import annotations

import contextlib
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pivotrl.rollouts.engine import EngineError
from pivotrl.rollouts.incoming import Incoming
from pivotrl.rollouts.replies import error_reply, result_of
from pivotrl.rollouts.wire import Arrival, Door, PeerLost, hang_up, knock, make_key, send
from pivotrl.weights.broadcast import KIND as BROADCAST
from pivotrl.weights.broadcast import Member
from pivotrl.weights.manifest import VerifiedStream, WeightCensus, check_stream

EXTENSION = f"{__name__}.WeightReceiver"
# For a worker that is idle to connect to the engine's process, and how often it is looked whether vLLM has given it up.
_PATIENCE_S, _LOOK_EVERY_S = 60.0, 0.5


class WeightReceiver:
    """What vLLM's worker gains: one method, and its place in the group of the broadcasts, kept from one hand-over to the next."""

    rank: int
    """vLLM's own: which of the engine's workers this is."""
    reload_weights: Callable[..., None]
    """vLLM's own."""
    weight_member: Member | None = None

    def receive_weights(self, address: str, key: bytes, invitation: Mapping[str, Any], census: WeightCensus) -> dict[str, Any]:
        """One hand-over, to its end whatever happens, so that neither the trainer nor other workers wait for this one.

        Returns:
            a reply (rollouts/replies.py): an error that vLLM is left to carry would end as text, and leave the others' answers unread.
        """
        if self.weight_member is None:
            self.weight_member = Member()
        try:
            connection = knock(address, key, name=str(self.rank))
            with contextlib.closing(connection):
                incoming = Incoming(connection, {BROADCAST: self.weight_member.read})
                try:
                    self.weight_member.join({**invitation, "rank": invitation["rank"] + self.rank})
                    return {"ok": self._load(incoming, census)}
                finally:
                    incoming.drain()
        except Exception as error:  # noqa: BLE001 - the boundary between two processes: the other one decides what it means
            return error_reply(error)

    def _load(self, incoming: Incoming, census: WeightCensus) -> dict[str, float]:
        started_s = time.perf_counter()
        stream = check_stream(VerifiedStream(incoming.tensors()), census)
        self.reload_weights(weights_iterator=stream)
        for name, _ in stream:
            raise RuntimeError(f"vLLM stopped reading before tensor {name!r}")
        return {"read_s": incoming.read_s, "load_s": time.perf_counter() - started_s - incoming.waited_s - incoming.read_s}


@dataclass(frozen=True, slots=True)
class Received:
    """What all workers of an engine received."""

    digests: Mapping[str, str]
    """By name, as announced; every worker has found them."""
    read_s: float
    """Seconds to receive and check, of the slowest worker."""
    load_s: float


def relay(
    messages: Iterator[Mapping[str, Any]],
    call: Callable[..., list[Any]],
    invitation: Mapping[str, Any],
    census: WeightCensus,
    *,
    num_workers: int,
) -> Received:
    """Passes the announcements of one hand-over on to all workers while they receive it.

    Args:
        messages: as they came from the trainer, to the end of the hand-over.
        call: vLLM's `collective_rpc`: calls a method of all workers and waits for their answers.

    Raises:
        UserError, EngineError, ValueError, RuntimeError: as the first worker in order raised them; the others have taken part to the end.
        EngineError: where a worker was lost.
        Aborted: as `messages` does.
    """
    digests: dict[str, str] = {}
    threads = ThreadPoolExecutor(1, thread_name_prefix="weights")
    with tempfile.TemporaryDirectory(prefix="pivotrl-workers-") as directory:
        address = str(Path(directory) / "door")
        key = make_key(Path(directory) / "key")
        door = Door(address, key)
        workers: list[Arrival] = []
        try:
            answers = threads.submit(call, "receive_weights", args=(address, key, dict(invitation), census))
            _let_in(door, answers, workers, num_workers)
            for message in messages:
                digests |= {record["name"]: record["digest"] for record in message["records"]}
                _tell(workers, message)
            _tell(workers, {"op": "end"})
            replies = _replies(answers)
        except BaseException:
            _tell(workers, {"op": "abort"})
            raise
        finally:
            door.close()
            # Waited for: the next call of vLLM's must not read these answers.
            threads.shutdown()
            for worker in workers:
                hang_up(worker.connection)
    parts = [result_of(reply) for reply in replies]
    return Received(digests, max(part["read_s"] for part in parts), max(part["load_s"] for part in parts))


def _let_in(door: Door, answers: Future[list[Any]], workers: list[Arrival], num_workers: int) -> None:
    deadline_s = time.monotonic() + _PATIENCE_S
    while len(workers) < num_workers:
        with contextlib.suppress(PeerLost):
            workers.append(door.next(_LOOK_EVERY_S))
        if answers.done() or time.monotonic() > deadline_s:
            raise EngineError(f"{num_workers - len(workers)} of vLLM's {num_workers} workers did not come for new weights")


def _tell(workers: list[Arrival], message: Mapping[str, Any]) -> None:
    """A worker that is lost is vLLM's to notice."""
    for worker in workers:
        with contextlib.suppress(PeerLost):
            send(worker.connection, message)


def _replies(answers: Future[list[Any]]) -> list[Any]:
    try:
        return answers.result()
    except Exception as error:
        raise EngineError(f"vLLM lost a worker while it took new weights: {error}") from error
