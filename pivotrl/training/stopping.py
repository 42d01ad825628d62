"""How a training stage is asked to save and stop before it is done: by a file, RUN/stop, or by SIGTERM.

The file is what a batch script writes before its time limit; the signal is what SLURM sends to every process when it takes a job's nodes
away with a grace period, and what other schedulers send before they end a process. Called by stages.py; read by the record.
"""

from __future__ import annotations

import signal
import threading
from pathlib import Path
from types import FrameType
from typing import Any

STOP_FILE = "stop"


class StopRequest:
    """Whether the stage is to stop after the step it is in. Inside the context SIGTERM is noted and has no other effect.

    A later SIGTERM changes nothing either: some process trackers deliver the one of a preemption twice. Python gives signals to its main
    thread alone; in another thread only the file counts.
    """

    def __init__(self, run: Path) -> None:
        self._file = run / STOP_FILE
        self._is_signalled = False
        self._before: Any = None
        self._handles_signal = threading.current_thread() is threading.main_thread()

    def __enter__(self) -> StopRequest:
        if self._handles_signal:
            self._before = signal.signal(signal.SIGTERM, self._note)
            # Or a signal would end a library's system call with EINTR.
            signal.siginterrupt(signal.SIGTERM, False)
        return self

    def __exit__(self, *_exception: object) -> None:
        if self._handles_signal:
            signal.signal(signal.SIGTERM, self._before)

    @property
    def reason(self) -> str | None:
        """Who asks, for the message; None where nobody does."""
        if self._is_signalled:
            return "SIGTERM asked; the same command goes on"
        return f"{self._file} asks; remove it, and the same command goes on" if self._file.exists() else None

    def _note(self, _number: int, _frame: FrameType | None) -> None:
        self._is_signalled = True
