"""Directories that appear whole or not at all: written beside their place, marked complete, renamed.

For checkpoints and exported models, which are too large to be one atomic file. Imports neither torch nor megatron-core.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pivotrl.rundir import SUCCESS, atomic_write


@contextmanager
def atomic_directory(path: Path) -> Iterator[Path]:
    """Yields an empty directory that becomes `path` when the block ends; after an exception or a crash `path` is as it was.

    The completion marker is written last, before the rename, so `is_complete` also rejects a copy that was cut short.
    """
    temporary, replaced = path.with_name(f".{path.name}.tmp"), path.with_name(f".{path.name}.old")
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


def is_complete(path: Path) -> bool:
    """True for a directory that `atomic_directory` finished."""
    return (path / SUCCESS).exists()
