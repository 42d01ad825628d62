"""The buckets of one hand-over of weights as they are announced over a connection, and where the time went.

Consumes the messages "bucket", then "end" or "abort". Used by an engine's process (replica.py) and, where it has several, by its workers
(vllm_workers.py), to whom the engine's process passes the same messages on.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Mapping
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any

from pivotrl.rollouts.replies import Aborted
from pivotrl.rollouts.wire import receive
from pivotrl.weights.broadcast import KIND as BROADCAST
from pivotrl.weights.buckets import Bucket, Reader, read_bucket
from pivotrl.weights.manifest import TensorRecord

if TYPE_CHECKING:
    import torch


class Incoming:
    """One hand-over.

    Args:
        readers: by kind of bucket; without one for broadcasts this process takes no part in them.
    """

    def __init__(self, connection: Connection, readers: Mapping[str, Reader]) -> None:
        self._connection, self._readers = connection, readers
        self._is_over = False
        self.waited_s = self.read_s = 0.0

    def tensors(self) -> Iterator[tuple[TensorRecord, torch.Tensor]]:
        """All tensors, each checked against its record, bytes included."""
        for message in self.messages():
            started_s = time.perf_counter()
            verified = read_bucket(Bucket.of(message), self._readers)
            self.read_s += time.perf_counter() - started_s
            yield from verified

    def messages(self) -> Iterator[Mapping[str, Any]]:
        """The announcements of buckets as they came.

        Raises:
            Aborted: where the sender gave up.
        """
        while True:
            started_s = time.perf_counter()
            message = receive(self._connection, None)
            self.waited_s += time.perf_counter() - started_s
            self._is_over = message["op"] != "bucket"
            if message["op"] == "abort":
                raise Aborted("the sender gave up in the middle of a hand-over")
            if self._is_over:
                return
            yield message

    def drain(self) -> None:
        """Reads on to the end of the hand-over, so that the next message is a request again.

        Broadcasts are received and dropped: the sender and the other members wait for all to take part, and the error behind this should be
        told at once, not after a timeout.
        """
        can_take_part = BROADCAST in self._readers
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
