"""Bytes of a file after transparent decompression, bounded, with every read counted for progress.

The one place that opens a user's data file. Compression is recognised by its magic bytes, never by the suffix.
"""

from __future__ import annotations

import bz2
import contextlib
import gzip
import io
import lzma
import zlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from pathlib import Path
from typing import Any, BinaryIO, cast

from pivotrl.progress import ProgressBar

MB = 1e6
COMPRESSION_SUFFIXES = frozenset({".gz", ".zst", ".bz2", ".xz"})
_MAGIC_BYTES = 6
_GZIP, _BZIP2, _XZ, _ZSTD = b"\x1f\x8b", b"BZh", b"\xfd7zXZ\x00", b"\x28\xb5\x2f\xfd"
_BUFFER_BYTES = 1 << 17

# JSON text rarely shrinks by more than 50; a file that grows by more than this, past a size that does no harm, is a bomb.
MAX_EXPANSION = 200
HARMLESS_BYTES = 1 << 30


class ExpansionError(OSError):
    """A compressed file grew beyond `MAX_EXPANSION` times its size."""


READ_ERRORS = (OSError, EOFError, zlib.error, lzma.LZMAError)
"""What opening or reading a damaged or forbidden file can raise; `open_stream` turns pyarrow's errors into OSError."""

_meter: ContextVar[Callable[[int], None] | None] = ContextVar("meter", default=None)


@contextlib.contextmanager
def metered(count: Callable[[int], None]) -> Iterator[None]:
    """Within the block, `count(n)` is called for every n bytes read from disk: progress in units of what the user sees on disk."""
    token = _meter.set(count)
    try:
        yield
    finally:
        _meter.reset(token)


class Meter:
    """Turns bytes read from disk into the progress of one task, in MB; a file that is looked at twice still counts once."""

    def __init__(self, bar: ProgressBar, num_bytes: int) -> None:
        self._bar, self._left = bar, num_bytes

    def count(self, num_bytes: int) -> None:
        """For `metered`."""
        step = min(num_bytes, self._left)
        self._left -= step
        self._bar.advance(step / MB)

    def finish(self, note: str = "") -> None:
        """The task is done, whatever was read of its files."""
        self._bar.advance(self._left / MB, note)


@contextlib.contextmanager
def open_stream(path: Path) -> Iterator[BinaryIO]:
    """A buffered binary stream of the file's decompressed bytes.

    Raises:
        OSError, EOFError, zlib.error, lzma.LZMAError: on opening or reading, where the file is unreadable, truncated or a decompression bomb.
    """
    with contextlib.ExitStack() as stack:
        raw = stack.enter_context(_MeteredFile(path, "rb"))
        plain = stack.enter_context(io.BufferedReader(raw, _BUFFER_BYTES))
        decompressor = _decompressor(plain, plain.peek(_MAGIC_BYTES)[:_MAGIC_BYTES])
        if decompressor is None:
            yield cast("BinaryIO", plain)
            return
        bounded = _Bounded(decompressor, max(HARMLESS_BYTES, MAX_EXPANSION * path.stat().st_size))
        yield cast("BinaryIO", stack.enter_context(io.BufferedReader(bounded, _BUFFER_BYTES)))


def read_error_reason(error: BaseException) -> str:
    """A short, countable reason without a machine path."""
    match error:
        case ExpansionError():
            return f"decompression bomb: grows more than {MAX_EXPANSION} times"
        case EOFError():
            return "truncated compressed file"
        case PermissionError():
            return "unreadable: permission denied"
        case OSError(strerror=str() as text):
            return f"unreadable: {text}"
        case _:
            return f"damaged compressed file: {str(error) or type(error).__name__}"


class _MeteredFile(io.FileIO):
    def readinto(self, buffer: Any, /) -> int | None:
        count = super().readinto(buffer)
        meter = _meter.get()
        if meter is not None and count:
            meter(count)
        return count


class _Bounded(io.RawIOBase):
    """Passes reads on until `limit` bytes were produced."""

    def __init__(self, source: Any, limit: int) -> None:
        # read1 hands over what is decompressed so far, so that a truncated file loses no more than its last row.
        self._read, self._left = getattr(source, "read1", source.read), limit

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any, /) -> int:
        try:
            block = self._read(min(len(buffer), _BUFFER_BYTES))
        except ValueError as error:  # pyarrow.ArrowInvalid
            raise OSError(str(error)) from error
        self._left -= len(block)
        if self._left < 0:
            raise ExpansionError("decompressed size")
        buffer[: len(block)] = block
        return len(block)


def _decompressor(plain: Any, magic: bytes) -> Any:
    if magic.startswith(_GZIP):
        return gzip.GzipFile(fileobj=plain, mode="rb")
    if magic.startswith(_BZIP2):
        return bz2.BZ2File(plain)
    if magic.startswith(_XZ):
        return lzma.LZMAFile(plain)
    if magic.startswith(_ZSTD):
        import pyarrow as pa

        return pa.CompressedInputStream(pa.PythonFile(plain, mode="r"), "zstd")
    return None
