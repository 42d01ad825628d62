"""Processor time of a call, for bounds that hostile input must not break."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable


def processor_seconds[T](run: Callable[[], T]) -> tuple[float, T]:
    """Seconds this thread spent in a call, and its result. The collector waits: a pass over a large test process takes a second of its own."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        started_s = time.thread_time()
        result = run()
        return time.thread_time() - started_s, result
    finally:
        if was_enabled:
            gc.enable()
