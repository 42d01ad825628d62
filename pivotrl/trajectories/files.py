"""From named paths to raw rows: discovery, decompression and JSON reading that no broken byte can stop.

Adapters call `jsonl_rows`, `array_rows`, `record_rows`, `document_rows` and `json_document`; detection calls `probe` and `head_value`;
`ingest.py` calls `discover`. Every broken line or file becomes a `RowQuarantined` value with file, line and reason, and reading goes on where it
can. Memory holds one row at a time (JSONL, arrays past `WHOLE_DOCUMENT_BYTES`) or one document of at most that size.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import stat
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import ijson

from pivotrl.trajectories.parsing import Parsed, parse_json
from pivotrl.trajectories.source import Probe, RawRow, RowQuarantined, SourceUnit
from pivotrl.trajectories.streams import COMPRESSION_SUFFIXES, READ_ERRORS, open_stream, read_error_reason

HEAD_BYTES = 64 << 10
WHOLE_DOCUMENT_BYTES = 64 << 20
"""Arrays in files up to this size (after decompression) are parsed whole with orjson, larger ones streamed with ijson."""
MAX_ROW_BYTES = 512 << 20
"""One row (a JSONL line, or a document that is one trajectory) beyond this is quarantined: its parsed form would take gigabytes."""

_share: ContextVar[tuple[int, int]] = ContextVar("share", default=(0, 1))
_ANOTHERS_ROW = RowQuarantined("read by another process")
_DATA_SUFFIXES = frozenset({".json", ".jsonl", ".ndjson", ".jsonlines", ".traj"})
_LFS_POINTER = b"version https://git-lfs.github.com/spec/"
_UTF8_BOM = b"\xef\xbb\xbf"
_UTF16_BOMS = (b"\xff\xfe", b"\xfe\xff")

type Row = RawRow | RowQuarantined


@dataclass(frozen=True, slots=True)
class FoundFile:
    """One file to read, with the directory its name is relative to."""

    path: Path
    root: Path
    num_bytes: int

    @property
    def name(self) -> str:
        return self.path.relative_to(self.root).as_posix()


@dataclass(frozen=True, slots=True)
class Discovery:
    """The files below the named paths in a stable order, and what was passed over, by reason."""

    files: tuple[FoundFile, ...]
    skipped: Mapping[str, int]


def discover(paths: Sequence[Path]) -> Discovery:
    """Data files below `paths`, sorted by name within each path; a file that is named itself is taken whatever its suffix.

    Names are relative to a named directory (to its parent where several paths are named, which keeps two directories' files apart).
    Links are followed once: a loop, or a file reached twice, is counted in `skipped`. Paths must exist.
    """
    skipped: Counter[str] = Counter()
    found: list[FoundFile] = []
    seen_files: set[tuple[int, int]] = set()
    for named in paths:
        path = Path(os.path.abspath(named))  # noqa: PTH100 - resolve() would leave the root through links
        is_directory = path.is_dir()
        root = path if is_directory and len(paths) == 1 else path.parent
        candidates = _walk(path, skipped) if is_directory else [path]
        for file in candidates:
            entry = _found(file, root, skipped, seen_files)
            if entry is not None:
                found.append(entry)
    return Discovery(tuple(found), dict(sorted(skipped.items())))


def data_suffix(path: Path) -> str:
    """The suffix of the data inside: ``.jsonl`` for ``rows.jsonl.gz``; lower case."""
    suffix = path.suffix.lower()
    return Path(path.stem).suffix.lower() if suffix in COMPRESSION_SUFFIXES else suffix


def printable_name(name: str) -> str:
    """A file name as valid Unicode: bytes that are no UTF-8 become escapes."""
    return name.encode("utf-8", "backslashreplace").decode("utf-8")


def probe(path: Path, root: Path) -> Probe:
    """What detection may look at of one file.

    Raises:
        RowQuarantined: where nothing can be read: empty, unreadable, binary, a git-LFS pointer, broken compression.
    """
    name = path.relative_to(root).as_posix()
    try:
        with open_stream(path) as stream:
            head = _read_up_to(stream, HEAD_BYTES)
    except READ_ERRORS as error:
        raise RowQuarantined(read_error_reason(error), file=name) from error
    reason = _not_text_reason(head)
    if reason is not None:
        raise RowQuarantined(reason, file=name)
    head = head.removeprefix(_UTF8_BOM)
    return Probe(name=name, suffix=data_suffix(path), head=head, first_row=_first_row(head, is_whole=len(head) < HEAD_BYTES - len(_UTF8_BOM)))


def head_value(probe: Probe) -> Any:
    """`probe.first_row`, or as much of the first value as the head shows (a truncated document: its first keys, its first elements)."""
    if probe.first_row is not None:
        return probe.first_row
    builder = ijson.ObjectBuilder()
    try:
        for event, value in ijson.basic_parse(probe.head, use_float=True):
            builder.event(event, value)
    except (ijson.JSONError, ValueError, UnicodeDecodeError):
        pass
    return getattr(builder, "value", None)


@contextlib.contextmanager
def sharing_rows(index: int, count: int) -> Iterator[None]:
    """Within the block, `record_rows` of a JSONL file may leave rows unparsed whose number does not leave `index` after division by `count`.

    Each still yields something in its place, so that numbers stay: a RowQuarantined that nobody may look at.
    """
    token = _share.set((index, count))
    try:
        yield
    finally:
        _share.reset(token)


def jsonl_rows(unit: SourceUnit, share: tuple[int, int] = (0, 1)) -> Iterator[Row]:
    """One row per non-empty line of each of the unit's files. Lines end at newline only: U+2028 is legal inside a string.

    Args:
        share: see `sharing_rows`.
    """
    indices = itertools.count()
    for path in unit.paths:
        try:
            with open_stream(path) as stream:
                yield from _line_rows(_lines(stream), unit.name, indices, share)
        except READ_ERRORS as error:
            yield RowQuarantined(read_error_reason(error), file=unit.name)


def array_rows(unit: SourceUnit, *, key: str | None = None, shared_keys: Sequence[str] = ()) -> Iterator[Row]:
    """One row per element of a JSON array: the whole document, or the list under the top-level `key` of an object.

    Args:
        shared_keys: other top-level keys whose values every row gets as `RawRow.shared`, a dict; absent keys are left out.

    An array that is broken half way gives its leading elements and then the break.
    """
    path = unit.paths[-1]
    try:
        with open_stream(path) as stream:
            data = _read_up_to(stream, WHOLE_DOCUMENT_BYTES + 1)
        if len(data) > WHOLE_DOCUMENT_BYTES:
            yield from _streamed_array(unit, path, key, shared_keys)
            return
        try:
            parsed = parse_json(data.removeprefix(_UTF8_BOM))
        except RowQuarantined:
            yield from _streamed_array(unit, path, key, shared_keys)
            return
    except READ_ERRORS as error:
        yield RowQuarantined(read_error_reason(error), file=unit.name)
        return
    elements = parsed.value if key is None else parsed.value.get(key) if isinstance(parsed.value, dict) else None
    if not isinstance(elements, list):
        yield RowQuarantined(_no_array_reason(key), file=unit.name)
        return
    shared = {name: parsed.value[name] for name in shared_keys if name in parsed.value} if key is not None else None
    for index, element in enumerate(elements):
        yield RawRow(unit.name, index, None, element, shared, parsed.repairs)


def document_rows(unit: SourceUnit) -> Iterator[Row]:
    """The unit's last file as one row."""
    try:
        parsed = json_document(unit)
    except RowQuarantined as broken:
        yield broken
        return
    yield RawRow(unit.name, 0, None, parsed.value, None, parsed.repairs)


def record_rows(unit: SourceUnit) -> Iterator[Row]:
    """Rows by content, for formats that come as JSONL, as a JSON array, or as one object: decided by the first bytes, not by the suffix."""
    path = unit.paths[-1]
    try:
        with open_stream(path) as stream:
            first = _read_up_to(stream, HEAD_BYTES).removeprefix(_UTF8_BOM).lstrip()
    except READ_ERRORS as error:
        yield RowQuarantined(read_error_reason(error), file=unit.name)
        return
    if first.startswith(b"["):
        yield from array_rows(unit)
    elif _is_one_document(first, data_suffix(path)):
        yield from document_rows(unit)
    else:
        # Of several files one may break off, after which numbers are no longer those of the lines.
        yield from jsonl_rows(unit, _share.get() if len(unit.paths) == 1 else (0, 1))


def json_document(unit: SourceUnit, path: Path | None = None) -> Parsed:
    """The JSON value of one file of the unit (the last one where `path` is None) and the repairs it needed.

    Raises:
        RowQuarantined: where it cannot be read or parsed, or is larger than `MAX_ROW_BYTES`.
    """
    path = unit.paths[-1] if path is None else path
    try:
        with open_stream(path) as stream:
            data = _read_up_to(stream, MAX_ROW_BYTES + 1)
        if len(data) > MAX_ROW_BYTES:
            raise RowQuarantined(f"one document of more than {MAX_ROW_BYTES >> 20} MiB")
        return parse_json(data.removeprefix(_UTF8_BOM))
    except READ_ERRORS as error:
        raise RowQuarantined(read_error_reason(error), file=unit.name) from error
    except RowQuarantined as broken:
        raise RowQuarantined(broken.reason, file=unit.name) from broken


def _walk(directory: Path, skipped: Counter[str]) -> list[Path]:
    files: list[Path] = []
    seen: set[tuple[int, int]] = set()

    def unreadable(_error: OSError) -> None:
        skipped["unreadable directory"] += 1

    for folder, folders, names in os.walk(directory, followlinks=True, onerror=unreadable):
        entry = Path(folder).stat()
        if (entry.st_dev, entry.st_ino) in seen:
            skipped["directory reached twice through a link"] += 1
            folders.clear()
            continue
        seen.add((entry.st_dev, entry.st_ino))
        skipped["hidden"] += sum(name.startswith(".") for name in (*folders, *names))
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in names:
            if name.startswith("."):
                continue
            if data_suffix(Path(name)) in _DATA_SUFFIXES:
                files.append(Path(folder) / name)
            else:
                skipped[f"not a data file ({Path(name).suffix.lower() or 'no suffix'})"] += 1
    skipped += Counter()
    return sorted(files, key=lambda path: path.relative_to(directory).parts)


def _found(path: Path, root: Path, skipped: Counter[str], seen: set[tuple[int, int]]) -> FoundFile | None:
    try:
        entry = path.stat()
    except OSError:
        skipped["broken link"] += 1
        return None
    if not stat.S_ISREG(entry.st_mode):
        # Opening a pipe or a device could wait for ever.
        skipped["not a regular file"] += 1
        return None
    if (entry.st_dev, entry.st_ino) in seen:
        skipped["file reached twice"] += 1
        return None
    seen.add((entry.st_dev, entry.st_ino))
    return FoundFile(path, root, entry.st_size)


def _read_up_to(stream: BinaryIO, limit: int) -> bytes:
    blocks: list[bytes] = []
    left = limit
    while left > 0 and (block := stream.read(min(left, 4 << 20))):
        blocks.append(block)
        left -= len(block)
    return blocks[0] if len(blocks) == 1 else b"".join(blocks)


def _not_text_reason(head: bytes) -> str | None:
    if not head.strip():
        return "empty file"
    if head.startswith(_LFS_POINTER):
        return "git-LFS pointer, not the data: run `git lfs pull`"
    if head.startswith(_UTF16_BOMS):
        return "UTF-16 text: convert it to UTF-8"
    if head.removeprefix(_UTF8_BOM).lstrip()[:1] not in (b"{", b"["):
        return "binary file" if b"\0" in head else "not JSON: the first character is neither { nor ["
    return None


def _first_row(head: bytes, *, is_whole: bool) -> Any:
    if is_whole:
        try:
            return parse_json(head).value
        except RowQuarantined:
            pass
    lines = head.split(b"\n")
    for line in lines if is_whole else lines[:-1]:
        # Inner lines of an indented document are indented, so a line that starts with a brace and parses is a JSONL row.
        if line.startswith((b"{", b"[")):
            try:
                value = parse_json(line).value
            except RowQuarantined:
                continue
            if value:
                return value
    return None


def _is_one_document(head: bytes, suffix: str) -> bool:
    """True for an indented object, and for one on one line in a file that does not call itself JSONL."""
    if head.split(b"\n", 1)[0].strip() == b"{":
        return True
    return suffix in (".json", ".traj") and b"\n{" not in head


def _lines(stream: BinaryIO) -> Iterator[bytes | None]:
    """Lines without length limits below `MAX_ROW_BYTES`; None for a longer one, which is skipped without being held."""
    while line := stream.readline(MAX_ROW_BYTES):
        if len(line) < MAX_ROW_BYTES or line.endswith(b"\n"):
            yield line
            continue
        while (rest := stream.readline(1 << 20)) and not rest.endswith(b"\n"):
            pass
        yield None


def _line_rows(lines: Iterator[bytes | None], name: str, indices: Iterator[int], share: tuple[int, int]) -> Iterator[Row]:
    share_index, count = share
    for number, line in enumerate(lines, start=1):
        if line is None:
            next(indices)
            yield RowQuarantined(f"a line of more than {MAX_ROW_BYTES >> 20} MiB", file=name, line=number)
            continue
        if number == 1:
            line = line.removeprefix(_UTF8_BOM)
        if not line.strip():
            continue
        index = next(indices)
        if index % count != share_index:
            yield _ANOTHERS_ROW
            continue
        try:
            parsed = parse_json(line)
        except RowQuarantined as broken:
            yield RowQuarantined(broken.reason, file=name, line=number)
            continue
        yield RawRow(name, index, number, parsed.value, None, parsed.repairs)


def _streamed_array(unit: SourceUnit, path: Path, key: str | None, shared_keys: Sequence[str]) -> Iterator[Row]:
    index = 0
    try:
        shared = {} if key is None else _streamed_shared(path, shared_keys)
        with open_stream(path) as stream:
            for element in ijson.items(stream, "item" if key is None else f"{key}.item", use_float=True):
                yield RawRow(unit.name, index, None, element, shared if key is not None else None)
                index += 1
    except (ijson.JSONError, UnicodeDecodeError) as error:
        reason = " ".join(str(error).split("\n")[0].split()) or "unexpected end"
        yield RowQuarantined(f"invalid JSON: {reason}", file=unit.name)
        return
    if index == 0:
        yield RowQuarantined(_no_array_reason(key), file=unit.name)


def _streamed_shared(path: Path, shared_keys: Sequence[str]) -> dict[str, Any]:
    shared: dict[str, Any] = {}
    for name in shared_keys:
        with open_stream(path) as stream:
            for value in ijson.items(stream, name, use_float=True):
                shared[name] = value
                break
    return shared


def _no_array_reason(key: str | None) -> str:
    return "wrong schema: the document is not an array" if key is None else f"wrong schema: no list under {key!r}"
