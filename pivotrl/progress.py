"""Progress of long work: a rich bar on a terminal, one line every ten seconds elsewhere, both with rate and ETA.

Bottom tier. Never writes to stdout, which belongs to results.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

_LINE_EVERY_S = 10.0


class ProgressBar(Protocol):
    """Counts finished work of one stage."""

    def advance(self, amount: float, note: str = "") -> None:
        """Adds finished work; `note` (cost so far, last reward) is shown at the end of the line."""
        ...

    def skip(self, amount: float) -> None:
        """Adds work that an earlier, interrupted call did: it counts as done but not in the rate."""
        ...


class _RichBar:
    def __init__(self, progress: Progress, description: str, total: float | None) -> None:
        self._progress = progress
        self._task = progress.add_task(description, total=total, note="", rate="")
        self._started_s, self._done = time.monotonic(), 0.0

    def skip(self, amount: float) -> None:
        self._progress.update(self._task, advance=amount)

    def advance(self, amount: float, note: str = "") -> None:
        self._done += amount
        rate = self._done / max(time.monotonic() - self._started_s, 1e-9)
        self._progress.update(self._task, advance=amount, note=note, rate=f"{_rate(rate)}/s")


class _LineBar:
    def __init__(self, description: str, total: float | None, unit: str) -> None:
        self._description, self._total, self._unit = description, total, unit
        self._started_s = self._shown_s = time.monotonic()
        self._done = self._skipped = 0.0

    def skip(self, amount: float) -> None:
        self._done += amount
        self._skipped += amount

    def advance(self, amount: float, note: str = "") -> None:
        self._done += amount
        if time.monotonic() - self._shown_s >= _LINE_EVERY_S:
            self._shown_s = time.monotonic()
            self.show(note)

    def show(self, note: str) -> None:
        elapsed_s = max(time.monotonic() - self._started_s, 1e-9)
        rate = (self._done - self._skipped) / elapsed_s
        of, eta = "", ""
        if self._total:
            of = f"/{_amount(self._total)}"
            # Sums of parts of a file may pass its size by a rounding error.
            eta = f", ETA {max(self._total - self._done, 0.0) / rate:,.0f} s" if rate > 0 else ""
        done = f"{_amount(self._done)}{of} {self._unit}"
        print(f"{self._description}: {done}, {_rate(rate)} {self._unit}/s{eta} {note}".rstrip(), file=sys.stderr, flush=True)


def _amount(value: float) -> str:
    return f"{value:,.0f}" if value >= 10 or value.is_integer() else f"{value:.2f}"


def _rate(rate: float) -> str:
    return f"{rate:,.1f}" if rate >= 1 else f"{rate:.3f}"


@contextmanager
def progress_bar(description: str, total: float | None, unit: str) -> Iterator[ProgressBar]:
    """A bar for one stage.

    Args:
        total: amount of work in `unit`s, what an interrupted call did included, or None where it cannot be known.
        unit: plural noun shown after the numbers, for example ``candidates`` or ``MB``.
    """
    console = Console(stderr=True)
    if console.is_terminal:
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn(unit),
            TextColumn("{task.fields[rate]}"),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[note]}"),
        )
        with Progress(*columns, console=console) as progress:
            yield _RichBar(progress, description, total)
    else:
        bar = _LineBar(description, total, unit)
        yield bar
        bar.show("")
