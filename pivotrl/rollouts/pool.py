"""Engines in processes of their own, as one engine: requests dealt by prompt, lost replicas rebuilt, weights handed to all.

Consumes `GenerationRequest`s and a trainer's tensors; produces `Completion`s. A replica that dies, exceeds the recipe's deadline or fails
is ended, rebuilt with the current weights and given the same requests again, as often as the recipe allows; after that the call fails
with EngineError, which the sampler turns into infra verdicts. Tokens depend neither on the number of replicas nor on who died: seeds
belong to samples. What happened is written to stderr and counted (`take_cost`).

Concurrency: `generate`, `load_weights` and `close` exclude each other; within a call there is one thread per replica.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pivotrl.config.engines import ProcessesPlacement, RemotePlacement
from pivotrl.errors import InfraLimitError, UserError
from pivotrl.rollouts.dealing import Dealer
from pivotrl.rollouts.engine import EngineError, GenerationRequest
from pivotrl.rollouts.launchers import Launcher
from pivotrl.rollouts.wire import Arrival, PeerLost, completions_of, hang_up, receive, request_rows, send
from pivotrl.types import Completion
from pivotrl.weights.buckets import Bucket, WeightStore, bucketed
from pivotrl.weights.manifest import SentStream, WeightCensus, check_stream, first_difference

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class Replica:
    """One connected engine."""

    arrival: Arrival
    lock: threading.Lock
    """Held for one question and its answer."""

    def ask(self, message: Mapping[str, Any], timeout_s: float) -> Any:
        """One question and its answer.

        Raises:
            PeerLost: where it died or took too long; it must be ended then.
            EngineError: where its engine failed.
            UserError, ValueError, RuntimeError: as its engine raised them.
        """
        with self.lock:
            send(self.arrival.connection, message)
            return _result(receive(self.arrival.connection, timeout_s))


class EnginePool:
    """The engine protocol over replicas.

    Args:
        launcher: where replicas come from; closed with the pool.
        store: where weights lie on their way, and until the next hand-over; closed with the pool. None: they cannot be handed over.
        start: the message that tells a replica which engine to build, see verbs/engine.py.

    Raises:
        UserError: for whatever the engine itself refuses.
        InfraLimitError: where no replica could be started.
    """

    def __init__(self, launcher: Launcher, store: WeightStore, placement: ProcessesPlacement | RemotePlacement, start: Mapping[str, Any]) -> None:
        self._launcher, self._store, self._placement, self._start = launcher, store, placement, start
        self._dealer, self._lock, self._events_lock = Dealer(), threading.Lock(), threading.Lock()
        self._replicas: dict[int, Replica] = {}
        self._census: WeightCensus | None = None
        self._version = 0
        self._kept: list[Bucket] | None = None
        self._sent: dict[str, str] | None = None
        self._was_pushed = self._is_partial = self._is_started = False
        self._events: Counter[str] = Counter()
        self.last_push: Mapping[str, float] = {}
        try:
            self._fill()
            self._is_started = True
        except BaseException:
            self.close()
            raise

    @property
    def policy_version(self) -> int:
        return self._version

    def generate(self, requests: Sequence[GenerationRequest]) -> list[tuple[Completion, ...]]:
        """Completions by request, then by seed; see `Engine.generate`.

        Raises:
            EngineError: where a share of the requests failed on every attempt the recipe allows.
            InfraLimitError: where no replica is left and none can be started.
        """
        with self._lock:
            if self._is_partial:
                raise RuntimeError("the engines hold partial weights since a load_weights failed; load a complete set first")
            self._fill()
            shares = self._dealer.deal(requests, sorted(self._replicas))
            results: list[tuple[Completion, ...]] = [()] * len(requests)
            answers = _at_once(lambda place: self._answer(place, [requests[index] for index in shares[place]]), list(shares))
            for indices, completions in zip(shares.values(), answers, strict=True):
                for index, samples in zip(indices, completions, strict=True):
                    results[index] = samples
            return results

    def weight_census(self) -> WeightCensus | None:
        """What the replicas' engines demand; None where they hold no model."""
        return self._census

    def load_weights(self, named_tensors: Iterable[tuple[str, torch.Tensor]], version: int) -> None:
        """Hands all tensors to all replicas, bucket by bucket, while they load; see `Engine.load_weights`.

        A replica that is lost meanwhile is rebuilt from what was sent.

        Raises:
            ValueError: for a tensor that does not fit, and RuntimeError for one that arrived as another, naming it.
            InfraLimitError: where no replica is left.
        """
        with self._lock:
            started_s = time.perf_counter()
            self._kept, self._sent = None, None
            self._was_pushed = self._is_partial = True
            stream = named_tensors if isinstance(named_tensors, SentStream) else SentStream(named_tensors)
            sent, put_s = self._send_all(stream, version)
            self._version, self._sent = version, sent
            reports = _at_once(self._finish_load, list(self._replicas))
            self._fill()
            self._is_partial = False
            parts = [report for report in reports if report is not None]
            slowest = {f"replica_{part}": max((report[part] for report in parts), default=0.0) for part in ("read_s", "load_s", "digest_s")}
            self.last_push = {"digest_s": stream.digest_s, "put_s": put_s, **slowest, "total_s": time.perf_counter() - started_s}

    def weight_digests(self) -> Mapping[str, str]:
        """What the replicas hold; `load_weights` has seen that all hold the same."""
        with self._lock:
            if self._sent is None and self._replicas:
                return next(iter(self._replicas.values())).ask({"op": "digests"}, self._placement.start_deadline_s)
            return self._sent or {}

    def take_cost(self) -> Mapping[str, float]:
        """What went wrong since the last call, under registered metric names; empty where nothing did."""
        with self._events_lock:
            events, self._events = self._events, Counter()
        return {f"rollout/engine_{name}/sum": float(count) for name, count in sorted(events.items())}

    def close(self) -> None:
        """Ends all replicas and frees the memory of the weights."""
        for place in list(self._replicas):
            replica = self._replicas.pop(place)
            with contextlib.suppress(PeerLost):
                send(replica.arrival.connection, {"op": "close"})
            hang_up(replica.arrival.connection)
        self._launcher.close()
        self._store.close()

    def _answer(self, place: int, requests: Sequence[GenerationRequest]) -> list[tuple[Completion, ...]]:
        """One replica's share, on that replica or on what replaces it."""
        message = {"op": "generate", "requests": request_rows(requests)}
        reason = ""
        for _ in range(1 + self._placement.max_retries):
            holder = place
            try:
                holder = self._holder(place)
                return completions_of(self._replicas[holder].ask(message, self._placement.deadline_s))
            except (PeerLost, EngineError, KeyError) as error:
                reason = str(error)
                self._lose(holder, reason)
                self._count("retries")
        raise EngineError(f"engine {place} failed {1 + self._placement.max_retries} times on {len(requests)} prompts; the last time: {reason}")

    def _fill(self) -> None:
        """Fills all places, at once where that is possible; then at least one is filled."""
        missing = [place for place in range(self._placement.num_replicas) if place not in self._replicas]
        failures = [failure for failure in _at_once(self._try_fill, missing) if failure is not None]
        if not self._replicas:
            raise InfraLimitError(f"no engine could be started: {failures[0]}; the engines' logs say more; the same command resumes")

    def _try_fill(self, place: int) -> str | None:
        for _ in range(1 + self._placement.max_retries):
            try:
                self._build(place, self._placement.start_deadline_s if self._may_wait() else 0.0)
            except (PeerLost, EngineError) as error:
                reason = str(error)
                self._lose(place, reason)
                if not self._launcher.can_restart:
                    return reason
            else:
                return None
        return reason

    def _may_wait(self) -> bool:
        """Remote engines are waited for at the start and where none is left; otherwise those that are there do the work."""
        return self._launcher.can_restart or not self._is_started or not self._replicas

    def _holder(self, place: int) -> int:
        """Who answers a share: its own replica, which is rebuilt where it was lost, or where nobody comes another one that lives."""
        if place not in self._replicas:
            try:
                self._build(place, self._placement.start_deadline_s if self._may_wait() else 0.0)
            except PeerLost:
                if self._launcher.can_restart or not self._replicas:
                    raise
                return min(self._replicas)
        return place

    def _build(self, place: int, timeout_s: float) -> None:
        """Connects a process, lets it build its engine, and gives it the current weights."""
        replica = Replica(self._launcher.summon(place, timeout_s), threading.Lock())
        try:
            started = replica.ask({"op": "start", **self._start}, self._placement.start_deadline_s)
            self._census = None if started["census"] is None else WeightCensus.of(started["census"])
            if self._was_pushed:
                self._reload(replica)
        except BaseException:
            hang_up(replica.arrival.connection)
            raise
        self._replicas[place] = replica

    def _reload(self, replica: Replica) -> None:
        if self._kept is None:
            raise PeerLost(f"the weights of policy version {self._version} were not kept; a rebuilt engine waits for the next hand-over")
        connection = replica.arrival.connection
        send(connection, {"op": "load", "version": self._version, "invitation": {}})
        for bucket in self._kept:
            send(connection, {"op": "bucket", **bucket.as_dict()})
        self._check_digests(replica, replica.ask({"op": "end"}, self._placement.start_deadline_s))

    def _send_all(self, stream: SentStream, version: int) -> tuple[dict[str, str], float]:
        """Announces every bucket to every replica as soon as its bytes lie in the store.

        Returns:
            digest by name of all that was sent, and the seconds spent putting it into the store.
        """
        sent: dict[str, str] = {}
        buckets: list[Bucket] = []
        put_s = 0.0
        checked = stream if self._census is None else check_stream(stream, self._census)
        self._announce(version)
        self._store.begin(version)
        try:
            for tensors in bucketed(checked, self._placement.bucket_bytes):
                started_s = time.perf_counter()
                bucket = self._store.put([(stream.records[name], tensor) for name, tensor in tensors])
                put_s += time.perf_counter() - started_s
                buckets.append(bucket)
                sent |= {record.name: record.digest for record in bucket.records}
                self._tell_all({"op": "bucket", **bucket.as_dict()})
                self._store.deliver()
        except BaseException:
            self._tell_all({"op": "abort"})
            _at_once(self._hear_abort, list(self._replicas))
            raise
        self._store.finish()
        self._kept = buckets if self._store.is_kept else None
        return sent, put_s

    def _finish_load(self, place: int) -> Mapping[str, float] | None:
        replica = self._replicas[place]
        try:
            report = replica.ask({"op": "end"}, self._placement.deadline_s)
        except (PeerLost, EngineError) as error:
            self._lose(place, str(error))
            return None
        self._check_digests(replica, report)
        return report

    def _check_digests(self, replica: Replica, report: Mapping[str, Any]) -> None:
        difference = first_difference(self._sent or {}, report["digests"]) if self._census is not None else None
        if difference:
            raise RuntimeError(f"{replica.arrival.description} holds other weights than were sent: {difference}")

    def _hear_abort(self, place: int) -> None:
        """Its answer to an aborted hand-over is an error by design; what matters is that it was read."""
        try:
            receive(self._replicas[place].arrival.connection, self._placement.deadline_s)
        except PeerLost as error:
            self._lose(place, str(error))

    def _announce(self, version: int) -> None:
        """Tells every replica that a hand-over begins, and how to take part."""
        members = dict(self._replicas)
        invitations = self._store.invite([f"{place} {replica.arrival.description}" for place, replica in members.items()])
        for (place, replica), invitation in zip(members.items(), invitations, strict=True):
            try:
                send(replica.arrival.connection, {"op": "load", "version": version, "invitation": invitation})
            except PeerLost as error:
                self._lose(place, str(error))

    def _tell_all(self, message: Mapping[str, Any]) -> None:
        for place, replica in list(self._replicas.items()):
            try:
                send(replica.arrival.connection, message)
            except PeerLost as error:
                self._lose(place, str(error))

    def _lose(self, place: int, reason: str) -> None:
        """Ends what is left of a replica and says so; a place that nobody came to lost nothing."""
        replica = self._replicas.pop(place, None)
        if replica is None and not self._launcher.can_restart:
            return
        who = f" ({replica.arrival.description})" if replica else ""
        sys.stderr.write(f"engine {place}{who} was lost: {reason}\n")
        self._count("losses")
        self._launcher.end(place)
        if replica:
            hang_up(replica.arrival.connection)

    def _count(self, event: str) -> None:
        with self._events_lock:
            self._events[event] += 1


def _at_once[T](work: Callable[[int], T], places: list[int]) -> list[T]:
    """`work` for all places, each in a thread of its own, which mostly wait for other processes."""
    if len(places) <= 1:
        return [work(place) for place in places]
    threads = ThreadPoolExecutor(len(places))
    try:
        futures = [threads.submit(work, place) for place in places]
        wait(futures)
        return [future.result() for future in futures]
    finally:
        # Not waited for: an interrupt must not hang on engines that are still at work; `close` ends them.
        threads.shutdown(wait=False)


def _result(reply: Mapping[str, Any]) -> Any:
    match reply.get("error"):
        case None:
            return reply["ok"]
        case "user":
            raise UserError(reply["problem"], rule=reply["rule"], fix=reply["fix"])
        case "engine":
            raise EngineError(reply["message"])
        case "value":
            raise ValueError(reply["message"])
        case "runtime":
            raise RuntimeError(reply["message"])
        case _:
            raise RuntimeError(f"an engine's process failed:\n{reply['message']}")
