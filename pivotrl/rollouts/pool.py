"""Engines in processes of their own, as one engine: requests dealt by prompt, lost replicas rebuilt, weights handed to all.

Consumes `GenerationRequest`s and a trainer's tensors; produces `Completion`s. A replica that dies, exceeds the recipe's deadline or fails
is ended, rebuilt with the current weights and given the same requests again, as often as the recipe allows; after that the call fails
with EngineError, which the sampler turns into infra verdicts. A place that cannot be filled is left alone for a while, and the others do
its work. Tokens depend neither on the number of replicas nor on who died: seeds belong to samples. What happened is written to stderr and
counted (`take_cost`).

Concurrency: `generate`, `load_weights` and `close` exclude each other; within a call there is one thread per replica.
"""

from __future__ import annotations

import contextlib
import itertools
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from pivotrl.config.engines import ProcessesPlacement, RemotePlacement
from pivotrl.errors import InfraLimitError
from pivotrl.rollouts.connected import Replica, at_once
from pivotrl.rollouts.dealing import Dealer
from pivotrl.rollouts.engine import EngineError, GenerationRequest
from pivotrl.rollouts.launchers import Launcher
from pivotrl.rollouts.wire import Arrival, PeerLost, completions_of, hang_up, reached_at, receive, request_rows, send
from pivotrl.types import Completion
from pivotrl.weights.buckets import Bucket, Invited, WeightStore, bucketed
from pivotrl.weights.manifest import SentStream, WeightCensus, check_stream, first_difference

if TYPE_CHECKING:
    import torch


# Between two attempts to start an engine: the driver takes seconds to free the memory of one that was killed.
_PAUSE_S = 5.0
# A place that could not be filled is tried again once after so many times what its last attempts took, so that it costs about a tenth of the
# time, and not sooner than this many seconds.
_REST_FACTOR, _MIN_REST_S = 10.0, 60.0


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
        self._is_partial = self._is_started = False
        self._rests: dict[int, float] = {}
        self._serials = itertools.count()
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

    @property
    def _can_give_weights(self) -> bool:
        """Whether an engine that starts now can be given the current weights; without a hand-over it has them from the checkpoint."""
        return self._sent is None or self._kept is not None

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
            answers = at_once(lambda place: self._answer(place, [requests[index] for index in shares[place]]), list(shares))
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
            # Before the hand-over begins, so that engines which wait for it take part.
            self._fill()
            self._is_partial = True
            stream = named_tensors if isinstance(named_tensors, SentStream) else SentStream(named_tensors)
            sent, put_s = self._send_all(stream, version)
            self._version, self._sent = version, sent
            reports = at_once(self._finish_load, list(self._replicas.values()))
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
        """One replica's share, on that replica, on what replaces it or on another."""
        message = {"op": "generate", "requests": request_rows(requests)}
        reasons: list[str] = []
        while len(reasons) <= self._placement.max_retries and (replica := self._holder(place)) is not None:
            if reasons:
                self._count("retries")
            try:
                return completions_of(replica.ask(message, self._placement.deadline_s))
            except (PeerLost, EngineError) as error:
                reasons.append(str(error))
                self._lose(replica, reasons[-1])
        last = f"the last time: {reasons[-1]}" if reasons else "no other is left"
        raise EngineError(f"engine {place} failed {len(reasons)} times on {len(requests)} prompts; {last}")

    def _holder(self, place: int) -> Replica | None:
        """Who answers a share: its own replica, which is rebuilt where it was lost, or where that fails another one that lives."""
        if place not in self._replicas:
            self._try_fill(place)
        living = list(self._replicas.values())
        return self._replicas.get(place) or (living[place % len(living)] if living else None)

    def _fill(self) -> None:
        """Fills all places, at once where that is possible; then at least one is filled."""
        missing = [place for place in range(self._placement.num_replicas) if place not in self._replicas]
        failures = [failure for failure in at_once(self._try_fill, missing) if failure is not None]
        if not self._replicas:
            raise InfraLimitError(f"no engine could be started: {failures[0]}; the engines' logs say more; the same command resumes")

    def _try_fill(self, place: int) -> str | None:
        """Starts an engine, as often as the recipe allows; the reason where the place stays empty."""
        if not self._can_give_weights:
            return f"the weights of policy version {self._version} were not kept; a rebuilt engine waits for the next hand-over"
        rest_s = self._rests.get(place, 0.0)
        if rest_s > time.monotonic() and self._replicas:
            return "it could not be started before"
        reason, started_s = "", time.monotonic()
        for attempt in range(1 if rest_s else 1 + self._placement.max_retries):
            if attempt:
                time.sleep(_PAUSE_S)
            try:
                arrival = self._launcher.summon(place, self._placement.start_deadline_s if self._may_wait() else 0.0)
            except PeerLost as error:
                if not self._launcher.can_restart:
                    # A place that nobody came to need not rest; one whose engine failed must, since that engine will knock again.
                    if not reason:
                        return str(error)
                    break
                reason = str(error)
                self._failed(place, "", reason)
                continue
            try:
                self._replicas[place] = self._build(place, arrival)
            except EngineError as error:
                reason = str(error)
                self._failed(place, f" ({arrival.description})", reason)
            else:
                self._rests.pop(place, None)
                return None
        now_s = time.monotonic()
        self._rests[place] = now_s + max(_MIN_REST_S, _REST_FACTOR * (now_s - started_s))
        return reason

    def _may_wait(self) -> bool:
        """Remote engines are waited for at the start and where none is left; otherwise those that are there do the work."""
        return self._launcher.can_restart or not self._is_started or not self._replicas

    def _build(self, place: int, arrival: Arrival) -> Replica:
        """Lets a process that connected build its engine, and gives it the current weights.

        Raises:
            EngineError: where it failed or was lost, and for whatever it refuses once another one was built of the same settings and checkpoint.
            UserError: where the first one refuses them.
            ValueError, RuntimeError: for weights that arrived as others.
        """
        replica = Replica(place, next(self._serials), arrival, threading.Lock())
        try:
            started = self._start_engine(replica)
            replica = replace(replica, num_receivers=started["num_receivers"])
            self._census = None if started["census"] is None else WeightCensus.of(started["census"])
            if self._sent is not None:
                self._reload(replica)
        except BaseException as error:
            hang_up(arrival.connection)
            if isinstance(error, PeerLost):
                raise EngineError(str(error)) from error
            raise
        return replica

    def _start_engine(self, replica: Replica) -> Mapping[str, Any]:
        try:
            return replica.ask({"op": "start", **self._start}, self._placement.start_deadline_s)
        except (EngineError, PeerLost):
            raise
        except (ValueError, RuntimeError) as error:
            if not self._is_started:
                raise
            raise EngineError(str(error)) from error

    def _reload(self, replica: Replica) -> None:
        assert self._kept is not None, "a place was filled although its engine cannot be given the weights"
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
            self._store.finish()
        except BaseException:
            self._tell_all({"op": "abort"})
            at_once(self._hear_abort, list(self._replicas.values()))
            raise
        self._kept = buckets if self._store.is_kept else None
        return sent, put_s

    def _finish_load(self, replica: Replica) -> Mapping[str, float] | None:
        try:
            report = replica.ask({"op": "end"}, self._placement.deadline_s)
        except (PeerLost, EngineError) as error:
            self._lose(replica, str(error))
            return None
        self._check_digests(replica, report)
        return report

    def _check_digests(self, replica: Replica, report: Mapping[str, Any]) -> None:
        difference = first_difference(self._sent or {}, report["digests"]) if self._census is not None else None
        if difference:
            raise RuntimeError(f"{replica.arrival.description} holds other weights than were sent: {difference}")

    def _hear_abort(self, replica: Replica) -> None:
        """Its answer to an aborted hand-over is an error by design; what matters is that it was read."""
        try:
            receive(replica.arrival.connection, self._placement.deadline_s)
        except PeerLost as error:
            self._lose(replica, str(error))

    def _announce(self, version: int) -> None:
        """Tells every replica that a hand-over begins, and how to take part."""
        members = list(self._replicas.values())
        # By number: a process that was lost and connected again is another member.
        invitations = self._store.invite(
            [Invited(str(replica.serial), reached_at(replica.arrival.connection), replica.num_receivers) for replica in members]
        )
        for replica, invitation in zip(members, invitations, strict=True):
            try:
                send(replica.arrival.connection, {"op": "load", "version": version, "invitation": invitation})
            except PeerLost as error:
                self._lose(replica, str(error))

    def _tell_all(self, message: Mapping[str, Any]) -> None:
        for replica in list(self._replicas.values()):
            try:
                send(replica.arrival.connection, message)
            except PeerLost as error:
                self._lose(replica, str(error))

    def _lose(self, replica: Replica, reason: str) -> None:
        """Ends what is left of a replica and says so, once: several shares may have been with it."""
        with self._events_lock:
            if self._replicas.get(replica.place) is not replica:
                return
            del self._replicas[replica.place]
        self._failed(replica.place, f" ({replica.arrival.description})", reason)
        hang_up(replica.arrival.connection)

    def _failed(self, place: int, who: str, reason: str) -> None:
        sys.stderr.write(f"engine {place}{who} was lost: {reason}\n")
        self._count("losses")
        self._launcher.end(place)

    def _count(self, event: str) -> None:
        with self._events_lock:
            self._events[event] += 1
