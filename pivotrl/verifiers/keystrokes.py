"""Keystrokes for a terminal as what they do, in order: shell statements, keys, and text that is no shell.

Entries are one stream, as the terminal sees them: one entry with two lines is two entries with one line, a line without its line break is not
executed, and text typed before it belongs to it. Comments and waits (empty entries) do nothing. What a program that was started reads
(an editor, an interpreter, a pager) and what the shell reader cannot read is compared as it is typed.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from pivotrl.verifiers.shell_effects import Statement, in_any_read_order, in_steps, is_interactive
from pivotrl.verifiers.shell_tree import MAX_CHARS, ShellText, continued_command

# tmux's names of keys (man tmux, "KEY BINDINGS"), which the harness sends as keys when they are a whole entry.
_KEY = re.compile(
    r"\^[A-Za-z\[\]\\@^_?]|(?:[CMS]-)+\S{1,10}|Up|Down|Left|Right|BSpace|BTab|DC|End|Enter|Escape|F(?:[1-9]|1[0-2])|Home|IC|NPage|PageDown|PgDn|PPage"
    r"|PageUp|PgUp|Space|Tab"
)
_CONTROLS = {"\x03": "C-c", "\x04": "C-d", "\x1a": "C-z", "\x1b": "Escape", "\x0c": "C-l"}
# Keys after which the shell is back.
_ENDING_KEYS = frozenset(("C-c", "C-d", "C-z", "C-\\"))
# Entries whose lines one command spans (a here-document typed line by line).
_MAX_JOINED_ENTRIES = 8
# Each unreadable text may take the parser's whole time bound.
_MAX_UNREADABLE = 4


@dataclass(frozen=True, slots=True)
class Key:
    """One key that is not text."""

    name: str


@dataclass(frozen=True, slots=True)
class Typed:
    """Text as it is typed, line breaks included."""

    text: str


type Stroke = Statement | Key | Typed


def strokes(
    entries: Sequence[str], *, splits_chains: bool, orders_reads: bool, directory: str | None = None, real: frozenset[str] = frozenset()
) -> tuple[Stroke, ...]:
    """What a sequence of entries does.

    Args:
        splits_chains: ``cd x && make`` is two steps (`shell_effects.in_steps`).
        orders_reads: the order of neighbouring commands that only look does not count.
        directory: absolute working directory in front of the entries, where it is known: paths are resolved.
        real: absolute paths that are directories and no links.
    """
    read, _ = typed_into(entries, directory, real)
    if not (splits_chains or orders_reads):
        return read
    return tuple(_rewritten(read, splits_chains=splits_chains, orders_reads=orders_reads))


def typed_into(entries: Sequence[str], directory: str | None, real: frozenset[str] = frozenset()) -> tuple[tuple[Stroke, ...], str | None]:
    """What entries do in a shell that stands in `directory` (None: unknown), as written, and where they leave it if nothing fails."""
    if sum(map(len, entries)) > MAX_CHARS:
        return (Typed("".join(entries)),), None
    reader = _StrokeReader([_as_key(entry) for entry in entries if entry], directory, real)
    return reader.read(), reader.directory


def statements_of(read: Sequence[Stroke]) -> tuple[Statement, ...]:
    """The shell statements among strokes."""
    return tuple(stroke for stroke in read if not isinstance(stroke, Key | Typed))


def _rewritten(read: Sequence[Stroke], *, splits_chains: bool, orders_reads: bool) -> list[Stroke]:
    rewritten: list[Stroke] = []
    run: list[Statement] = []
    for stroke in (*read, None):
        if stroke is not None and not isinstance(stroke, Key | Typed):
            run.append(stroke)
            continue
        statements = in_steps(tuple(run)) if splits_chains else tuple(run)
        rewritten += in_any_read_order(statements) if orders_reads else statements
        run = []
        if stroke is not None:
            rewritten.append(stroke)
    return rewritten


def _as_key(entry: str) -> str | Key:
    if entry in _CONTROLS:
        return Key(_CONTROLS[entry])
    if len(entry) > 32 or not _KEY.fullmatch(entry):
        return entry.replace("\r\n", "\n").replace("\r", "\n")
    if entry.startswith("^") and len(entry) == 2:
        entry = f"C-{entry[1].lower()}"
    return "\n" if entry == "Enter" else Key(entry)


class _StrokeReader:
    """Reads one stream of entries."""

    def __init__(self, entries: Sequence[str | Key], directory: str | None, real: frozenset[str]) -> None:
        self._entries = entries
        self._place = 0
        self._num_unreadable = 0
        self._is_in_program = False
        self.directory, self._real = directory, real
        self._read: list[Stroke] = []

    def read(self) -> tuple[Stroke, ...]:
        pending = ""
        while self._place < len(self._entries):
            entry = self._entries[self._place]
            self._place += 1
            if isinstance(entry, Key):
                self._type(pending)
                pending = ""
                self._read.append(entry)
                self._is_in_program &= entry.name not in _ENDING_KEYS
                continue
            text, line_break, rest = (pending + entry).rpartition("\n")
            pending = rest
            if line_break:
                self._execute(text)
        self._type(pending)
        return tuple(self._read)

    def _type(self, text: str) -> None:
        if text:
            self._read.append(Typed(text))

    def _execute(self, text: str) -> None:
        """Lines sent to the shell, or to the program in front of it."""
        if not text.strip("\n"):
            self._read.append(Key("Enter"))
            return
        if self._is_in_program:
            self._read.append(Typed(text + "\n"))
            return
        read = self._shell_text(text)
        if read is None:
            self._read.append(Typed(text + "\n"))
            self.directory = None
            return
        statements = read.script.statements
        self._read += statements
        self.directory = read.directory
        self._is_in_program = bool(statements) and _runs_in_front(statements[-1])

    def _shell_text(self, text: str) -> ShellText | None:
        """The statements of `text`, joined with the entries after it where it needs them; None for what is no shell."""
        start = self._place
        for end in range(start, min(len(self._entries), start + _MAX_JOINED_ENTRIES) + 1):
            if self._num_unreadable >= _MAX_UNREADABLE:
                return None
            following = self._entries[start:end]
            if any(isinstance(entry, Key) or not entry.endswith("\n") for entry in following):
                break
            read = continued_command("\n".join((text, *(str(entry).removesuffix("\n") for entry in following))), self.directory, self._real)
            # Lines behind an interactive program are its input.
            if read is not None and not any(map(_runs_in_front, read.script.statements[:-1])):
                self._place = end
                return read
            self._num_unreadable += 1
        return None


def _runs_in_front(statement: Statement) -> bool:
    return not statement[1] and is_interactive(statement[0])
