"""SIGKILL for a process that is at work, told by the processor time it has spent: a busy machine makes a moment of a clock any moment of the work."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path

_LOOK_EVERY_S = 0.002


def kill_at_work(pid: int, *, after_s: float) -> threading.Thread:
    """A started thread that kills the process once it has spent `after_s` seconds of processor time from now on; join it."""
    until_s = _processor_s(pid) + after_s

    def watch() -> None:
        while _processor_s(pid) < until_s:
            time.sleep(_LOOK_EVERY_S)
        os.kill(pid, signal.SIGKILL)

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    return thread


def _processor_s(pid: int) -> float:
    """User and system time of all its threads, in steps of the kernel's clock (10 ms)."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
