"""Directories that appear whole or not at all: written beside their place, marked complete, renamed.

For checkpoints and exported models, which are too large to be one atomic file. Imports neither torch nor megatron-core.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pivotrl.rundir import SUCCESS, atomic_write

KEPT = 2
"""Resumable checkpoints of a stage that are kept, the newest ones."""


@contextmanager
def atomic_directory(path: Path) -> Iterator[Path]:
    """Yields an empty directory that becomes `path`, in place of what lies there, when the block ends.

    After an exception `path` is as it was. The completion marker is written last, before the rename, so that `is_complete` also rejects a
    copy that was cut short. A crash leaves the old directory or the new one, or none in the instant between the two renames.
    """
    temporary, replaced = temporary_path(path), path.with_name(f".{path.name}.old")
    for leftover in (temporary, replaced):
        shutil.rmtree(leftover, ignore_errors=True)
    temporary.mkdir(parents=True)
    try:
        yield temporary
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    atomic_write(temporary / SUCCESS, b"")
    if path.exists():
        path.rename(replaced)
    temporary.rename(path)
    shutil.rmtree(replaced, ignore_errors=True)


def temporary_path(path: Path) -> Path:
    """Where `atomic_directory` writes what will become `path`."""
    return path.with_name(f".{path.name}.tmp")


def is_complete(path: Path) -> bool:
    """True for a directory that `atomic_directory` finished; the hidden names it works under never count."""
    return not path.name.startswith(".") and (path / SUCCESS).exists()
