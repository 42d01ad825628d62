"""The verb `sweep`, wired: a specification to runs, run by warm processes. Called by cli.py.

Every run is an ordinary run directory made by `pipeline.run_all`; the work of sharing them out is in pivotrl/sweeping/.
"""

from __future__ import annotations

import gc
import os
import shlex
import signal
import sys
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from rich.table import Table

from pivotrl.config.load import load_section
from pivotrl.config.sweep import SweepConfig
from pivotrl.console import results_console
from pivotrl.errors import UserError
from pivotrl.locks import NumberedLocks
from pivotrl.progress import progress_bar
from pivotrl.rundir import Stage
from pivotrl.sweeping.runs import SweepRun, only, runs_of
from pivotrl.sweeping.schedule import FAILED, RECORD, Sweep, read_records

LOG = "sweep.log"
"""Below a run: what its stages printed."""

_LOCK = ".sweep.lock"
_LAST_STAGE = "report"


@dataclass(frozen=True, slots=True)
class SweepRequest:
    """The words of the command line."""

    spec: Path
    root: Path
    overrides: Sequence[str] = ()
    only: Sequence[str] = ()
    num_workers: int | None = None
    """None: one per CPU core that this process may use."""
    retry_failed: bool = False
    """Whether runs that an earlier call gave up are tried again."""


def print_runs(request: SweepRequest) -> None:
    """One line per run: its directory, its recipe, every override, and whether it is finished.

    Raises:
        UserError: for a specification or a recipe that cannot be read.
    """
    _, runs = _checked_runs(request)
    table = Table("run", "recipe", "overrides", "state", title=f"{len(runs)} runs below {request.root}", title_justify="left", box=None)
    for run in runs:
        table.add_row(run.name, str(run.recipe), shlex.join(run.overrides), _state(request.root / run.name))
    results_console(file_width=1000).print(table)


def run_sweep(request: SweepRequest) -> bool:
    """Does what is missing of every run; False where some failed twice.

    Raises:
        UserError: for a specification or a recipe that cannot be read, or where another sweep runs below the root.
    """
    name, runs = _checked_runs(request)
    _check_needs(runs, request.root)
    num_workers = request.num_workers or len(os.sched_getaffinity(0))
    request.root.mkdir(parents=True, exist_ok=True)
    with _alone(request.root), _ended_as_interrupted():
        records = read_records(request.root)
        if request.retry_failed:
            records = {key: record for key, record in records.items() if record.status != FAILED}
        sweep = Sweep(name, request.root, runs, records)
        with progress_bar(f"sweep {name}", len(runs), "runs") as bar:
            sweep.execute(_do, num_workers=num_workers, bar=bar)
    for run in sweep.failed:
        sys.stderr.write(f"failed: {request.root / run.name}: {sweep.records[run.name].errors[-1]}\n")
    done = len(runs) - len(sweep.failed)
    again = "; --retry-failed tries the others again" if sweep.failed else ""
    sys.stderr.write(f"sweep: {done} of {len(runs)} runs finished ({request.root / RECORD}){again}\n")
    return not sweep.failed


def _checked_runs(request: SweepRequest) -> tuple[str, list[SweepRun]]:
    """The runs of the specification that the filters let through, every recipe loaded once, so that a misspelt key shows before the first run."""
    from pivotrl import pipeline

    config = load_section(SweepConfig, file=request.spec, overrides=request.overrides)
    runs = only(runs_of(config, request.spec.parent), request.only)
    for run in runs:
        try:
            pipeline.load(run.recipe, run.overrides)
        except UserError as error:
            raise UserError(f"run {run.name}: {error.problem}", rule=error.rule, fix=error.fix) from error
    return config.name, runs


def _check_needs(runs: Sequence[SweepRun], root: Path) -> None:
    """What a run reads and the filters left out must be there."""
    chosen = {run.name for run in runs}
    for run in runs:
        for name in run.after:
            if name not in chosen and not Stage.is_done(root / name, _LAST_STAGE):
                raise UserError(
                    f"{run.name} reads {name}, which is not finished", rule="--only must leave what a run reads", fix="let it through too"
                )


def _state(run: Path) -> str:
    return "finished" if Stage.is_done(run, _LAST_STAGE) else "begun" if run.is_dir() else "missing"


def _do(run: SweepRun, root: Path) -> str | None:
    """One run from start to end in this process; its error in one line, or None. What it prints goes to its own log."""
    from pivotrl import pipeline

    directory = root / run.name
    directory.mkdir(parents=True, exist_ok=True)
    with _output_to(directory / LOG):
        try:
            pipeline.run_all(pipeline.load(run.recipe, run.overrides), directory)
        except Exception as error:  # noqa: BLE001 - the boundary of a run: whatever ends it, the sweep goes on with the next
            traceback.print_exc()
            return " ".join(f"{type(error).__name__}: {error}".split())
        finally:
            # Models and engines hang in cycles, and the next run should not start beside them.
            gc.collect()
    return None


@contextmanager
def _output_to(log: Path) -> Iterator[None]:
    """Standard output and error of this process, those of libraries and children included, appended to a file."""
    sys.stdout.flush()
    sys.stderr.flush()
    saved = os.dup(1), os.dup(2)
    with log.open("ab") as stream:
        for number in (1, 2):
            os.dup2(stream.fileno(), number)
    try:
        yield
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        for number, descriptor in zip((1, 2), saved, strict=True):
            os.dup2(descriptor, number)
            os.close(descriptor)


@contextmanager
def _alone(root: Path) -> Iterator[None]:
    with NumberedLocks(root / _LOCK) as locks:
        if not locks.try_acquire(0):
            raise UserError(f"another sweep runs below {root}", rule="one process shares out the runs of a root", fix="wait for it or stop it")
        yield


@contextmanager
def _ended_as_interrupted() -> Iterator[None]:
    """SIGTERM as Ctrl-C: workers are stopped, and the same command resumes."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        del number, frame
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    except KeyboardInterrupt:
        sys.stderr.write("sweep: stopped; the same command resumes\n")
        raise
    finally:
        signal.signal(signal.SIGTERM, before)
