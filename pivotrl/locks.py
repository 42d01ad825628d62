"""Locks between processes that die with their holder: no stale lock after a kill, also on a shared filesystem that keeps POSIX locks.

Bottom tier. POSIX record locks (fcntl) belong to a process: taking one twice in the same process succeeds, and closing any
descriptor of the file gives all of them up. So a process opens a lock file once.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType


class NumberedLocks:
    """As many exclusive locks as there are numbers, in one file: lock i is byte i, and the file stays empty.

    Args:
        make: False refuses a file that is not there.

    Raises:
        OSError: where the filesystem has no locks.
    """

    def __init__(self, path: Path, *, make: bool = True) -> None:
        self._descriptor = os.open(path, os.O_RDWR | (os.O_CREAT if make else 0), 0o666)

    def __enter__(self) -> NumberedLocks:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Gives all of them up."""
        os.close(self._descriptor)

    def acquire(self, number: int) -> None:
        """Waits until the lock is free."""
        fcntl.lockf(self._descriptor, fcntl.LOCK_EX, 1, number)

    def try_acquire(self, number: int) -> bool:
        """Takes the lock, or says False where another process holds it."""
        try:
            fcntl.lockf(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, number)
        except (BlockingIOError, PermissionError):
            return False
        return True

    def release(self, number: int) -> None:
        """Gives one lock up; the others are kept."""
        fcntl.lockf(self._descriptor, fcntl.LOCK_UN, 1, number)


@contextmanager
def exclusive(path: Path) -> Iterator[None]:
    """One process at a time; the others wait. The empty lock file stays."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with NumberedLocks(path) as locks:
        locks.acquire(0)
        yield
