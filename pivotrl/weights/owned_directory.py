"""Directories for weights below one that others use too: made under an own name, and removed by their owner or, after a kill, by the next one.

What is owned holds the file OWNER, locked by the process that made it; the lock dies with that process. To it belong files beside it that
have its name and a suffix. Nothing else is ever touched. Used by filesystem.py, and in memory by shared_memory.py and rollouts/vllm.py.
"""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from pivotrl.locks import NumberedLocks

OWNER = "OWNER"
_PREFIX = "pivotrl-weights-"
# A process gets its own locks again and loses them when it closes their file once more, so it must not try those of its own directories.
_owned_here: set[Path] = set()


class OwnedDirectory:
    """A new directory below `parent`, which is made where it is missing; removed by `close`.

    Raises:
        OSError: where the parent cannot be written to, or its filesystem has no locks.
    """

    def __init__(self, parent: Path) -> None:
        parent.mkdir(parents=True, exist_ok=True)
        self.path = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent)).absolute()
        _owned_here.add(self.path.resolve())
        # Locked before it has the name that others look for, so that nobody finds it without its lock.
        claimed = self.path / f".{OWNER}"
        self._locks = NumberedLocks(claimed)
        self._locks.acquire(0)
        claimed.rename(self.path / OWNER)

    def close(self) -> None:
        """Removes it with all that it holds; doing so twice is no error."""
        if (known := self.path.resolve()) in _owned_here:
            # Closed first: a network filesystem keeps an open file, and with it the directory.
            self._locks.close()
            shutil.rmtree(self.path, ignore_errors=True)
            _owned_here.remove(known)


@contextlib.contextmanager
def owned_directory(parent: Path) -> Iterator[Path]:
    """A new directory for the length of a block, in place of those that a killed process left."""
    remove_abandoned(parent)
    own = OwnedDirectory(parent)
    try:
        yield own.path
    finally:
        own.close()


def remove_abandoned(parent: Path) -> list[Path]:
    """Removes the owned directories whose process is gone, with what belongs to them; those it removed."""
    removed: list[Path] = []
    for owner in sorted(parent.glob(f"{_PREFIX}*/{OWNER}")):
        # Another user's, or one that its owner is just removing.
        with contextlib.suppress(OSError):
            if owner.parent.resolve() not in _owned_here and _is_free(owner):
                _remove_marked(owner.parent)
                removed.append(owner.parent)
    return removed


def _remove_marked(directory: Path) -> None:
    """All that belongs to it, the mark last: a kill in the middle leaves a directory that the next one recognizes."""
    for path in [*directory.parent.glob(f"{directory.name}.*"), *directory.iterdir()]:
        if path.is_dir():
            shutil.rmtree(path)
        elif path.name != OWNER:
            path.unlink()
    shutil.rmtree(directory)


def _is_free(owner: Path) -> bool:
    with NumberedLocks(owner, make=False) as locks:
        return locks.try_acquire(0)
