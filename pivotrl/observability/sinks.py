"""Metrics of a run on disk, one JSON object per step, and one console line per step.

metrics.jsonl holds what must be equal after a resume; timing names (`MetricSpec.is_timing`) go to timing.jsonl. A checkpoint
stores `position()`; a resumed run opens the sink at that position, which cuts everything a later, lost step had written.
Called by training and sft loops, one writer per directory.
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from io import FileIO
from pathlib import Path

import orjson

from pivotrl.metrics import check_name

METRICS = "metrics.jsonl"
TIMING = "timing.jsonl"
PARITY_FINDINGS = "parity_findings.jsonl"
NON_FINITE = "data/non_finite/count"

# Console columns: metric, header, format. Fixed order and width, so that a log can be read down a column.
_COLUMNS = (
    ("rollout/reward/mean", "reward", "7.4f"),
    ("rollout/reward/std", "std", "7.4f"),
    ("rollout/group_zero_variance/frac", "zero_var", "8.3f"),
    ("objective/loss/mean", "loss", "9.5f"),
    ("objective/kl_reference/mean", "kl", "8.5f"),
    ("objective/ratio_clipped/frac", "clip", "6.3f"),
    ("objective/entropy/mean", "entropy", "7.3f"),
    ("optim/grad_norm/mean", "grad", "8.3f"),
    ("rollout/malformed/frac", "malformed", "9.3f"),
    ("rollout/truncated/frac", "truncated", "9.3f"),
    ("eval/held_out_reward/mean", "held_out", "8.4f"),
    ("perf/env_turns/sum", "turns", "9,.0f"),
)
_HEADER_EVERY = 25


@dataclass(frozen=True, slots=True)
class SinkPosition:
    """Bytes of both files that belong to the steps written so far; stored in a checkpoint.

    >>> SinkPosition(metrics_bytes=120, timing_bytes=80).as_dict()
    {'metrics_bytes': 120, 'timing_bytes': 80}
    """

    metrics_bytes: int
    timing_bytes: int

    def as_dict(self) -> dict[str, int]:
        """JSON-ready form; `SinkPosition(**value)` reads it back."""
        return asdict(self)


class MetricSink:
    """Appends one object per step to metrics.jsonl and timing.jsonl.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder, MetricSink(Path(folder)) as sink:
    ...     sink.write(3, {"rollout/reward/mean": 0.5, "time/train_s/sum": 2.0})
    ...     (Path(folder) / "metrics.jsonl").read_text()
    '{"step":3,"rollout/reward/mean":0.5,"data/non_finite/count":0}\\n'
    """

    def __init__(self, directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self._metrics = _open_for_append(directory / METRICS)
        self._timing = _open_for_append(directory / TIMING)
        self._lines_shown = 0

    def __enter__(self) -> MetricSink:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Appends one step.

        A NaN or infinite value is stored as null; the number of them is the step's `data/non_finite/count`.

        Raises:
            KeyError: for a name that pivotrl/metrics.py does not register.
        """
        timing = {name: value for name, value in values.items() if check_name(name).is_timing}
        counted = {name: value for name, value in values.items() if name not in timing}
        num_non_finite = sum(not math.isfinite(value) for value in counted.values())
        _append(self._metrics, {"step": step, **_finite(counted), NON_FINITE: num_non_finite})
        _append(self._timing, {"step": step, **_finite(timing)})

    def show(self, step: int, num_steps: int, values: Mapping[str, float]) -> None:
        """Writes the step's console line to stderr, which a progress bar on the same terminal keeps above itself."""
        if self._lines_shown % _HEADER_EVERY == 0:
            sys.stderr.write(console_header(num_steps) + "\n")
        sys.stderr.write(console_line(step, num_steps, values) + "\n")
        self._lines_shown += 1

    def position(self) -> SinkPosition:
        """The end of what was written, after making it durable: a checkpoint that names it can rely on it."""
        for stream in (self._metrics, self._timing):
            os.fsync(stream.fileno())
        return SinkPosition(self._metrics.tell(), self._timing.tell())

    def truncate(self, position: SinkPosition) -> None:
        """Cuts both files back to a checkpoint's position: steps after it will be written again.

        Raises:
            ValueError: where a file is shorter than its position, so that steps the checkpoint counts are lost.
        """
        for stream, size in ((self._metrics, position.metrics_bytes), (self._timing, position.timing_bytes)):
            present = stream.seek(0, os.SEEK_END)
            if present < size:
                raise ValueError(f"{stream.name} has {present} bytes but the checkpoint was taken at {size}; the file was cut or replaced")
            stream.truncate(size)
            stream.seek(size)

    def close(self) -> None:
        """Makes both files durable and closes them; closing twice is harmless."""
        for stream in (self._metrics, self._timing):
            if not stream.closed:
                os.fsync(stream.fileno())
                stream.close()


def console_header(num_steps: int) -> str:
    """The column names of `console_line`."""
    return "  ".join(["step".rjust(2 * len(str(num_steps)) + 1), *(title.rjust(_width(title, form)) for _, title, form in _COLUMNS)])


def console_line(step: int, num_steps: int, values: Mapping[str, float]) -> str:
    """One step as fixed columns; a metric the step does not have is a dash."""
    digits = len(str(num_steps))
    cells = [f"{step:>{digits}}/{num_steps}"]
    for name, title, form in _COLUMNS:
        text = format(values[name], form) if name in values else "-"
        cells.append(text.rjust(_width(title, form)))
    return "  ".join(cells)


def _width(title: str, form: str) -> int:
    return max(len(title), int(form.split(".")[0].rstrip(",")))


def _open_for_append(path: Path) -> FileIO:
    """Unbuffered, positioned at the end: a killed process leaves whole lines or one partial line that `truncate` cuts."""
    stream = path.open("r+b" if path.exists() else "w+b", buffering=0)
    stream.seek(0, os.SEEK_END)
    return stream


def _append(stream: FileIO, row: Mapping[str, object]) -> None:
    stream.write(orjson.dumps(row, option=orjson.OPT_APPEND_NEWLINE))


def _finite(values: Mapping[str, float]) -> dict[str, float | None]:
    return {name: value if math.isfinite(value) else None for name, value in values.items()}
