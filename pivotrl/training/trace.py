"""A torch profiler trace of a few steps, on request: RUN/<stage>/trace/steps_<first>-<last>.json, for Perfetto or chrome://tracing.

Traces the process that runs the loop. A step that a resume repeats is traced again.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from pivotrl.config.training import TraceConfig

if TYPE_CHECKING:
    from torch.profiler import profile

TRACE = "trace"


class StepTrace:
    """Starts the profiler at the first step asked for and writes its file after the last; does nothing where none is asked for."""

    def __init__(self, stage_dir: Path, config: TraceConfig | None) -> None:
        self._config, self._folder = config, stage_dir / TRACE
        self._profiler: profile | None = None

    def reach(self, step: int) -> None:
        """The loop is about to take optimizer step `step`, or has taken its last one."""
        if self._config is None:
            return
        end = self._config.first_step + self._config.num_steps
        if self._profiler is None and self._config.first_step <= step < end:
            self._start()
        elif self._profiler is not None and step >= end:
            self.close()

    def __enter__(self) -> StepTrace:
        return self

    def __exit__(self, *_exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Writes what was traced so far."""
        if self._profiler is None or self._config is None:
            return
        self._profiler.stop()
        self._folder.mkdir(exist_ok=True)
        last = self._config.first_step + self._config.num_steps - 1
        self._profiler.export_chrome_trace(str(self._folder / f"steps_{self._config.first_step}-{last}.json"))
        self._profiler = None

    def _start(self) -> None:
        from torch.profiler import profile, supported_activities

        self._profiler = profile(activities=supported_activities(), record_shapes=True)
        self._profiler.start()
