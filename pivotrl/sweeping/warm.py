"""Worker processes that stay: each imports once and runs one task after another. Knows nothing of runs.

A worker dies with its parent, however that ends, so that no orphan goes on writing. Interrupts are the parent's to handle.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable
from concurrent.futures import Future, ProcessPoolExecutor
from multiprocessing.connection import wait
from typing import Any


class WarmProcess:
    """One process for tasks one after the other. Where it dies, the task's future raises `BrokenProcessPool` and the next task gets a new one."""

    def __init__(self) -> None:
        self._pool, self._pid = self._start()

    def submit[ResultT](self, task: Callable[..., ResultT], *arguments: Any) -> Future[ResultT]:
        """Starts a task; arguments and result are pickled."""
        return self._pool.submit(task, *arguments)

    def replace(self) -> None:
        """A new process for a dead one."""
        self._pool.shutdown(wait=False)
        self._pool, self._pid = self._start()

    def kill(self) -> None:
        """Ends the process at once, whatever it does."""
        # Already ended: its future has failed.
        with contextlib.suppress(ProcessLookupError, RuntimeError):
            os.kill(self._pid.result(), signal.SIGKILL)
        self._pool.shutdown(wait=True, cancel_futures=True)

    def close(self) -> None:
        """Ends an idle process."""
        self._pool.shutdown(wait=True)

    @staticmethod
    def _start() -> tuple[ProcessPoolExecutor, Future[int]]:
        # spawn: a fork would inherit the parent's threads and locks.
        pool = ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn"), initializer=_serve_one_parent)
        return pool, pool.submit(os.getpid)


def _serve_one_parent() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    assert parent is not None

    def watch() -> None:
        wait([parent.sentinel])
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
