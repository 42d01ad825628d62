"""The order of a sweep's work: which run starts on which idle worker, what is repeated, what is recorded. Called by verbs/sweep.py.

A run that fails is repeated once with the same settings; one that fails again is recorded and the others go on. sweep.json is written at
every change, so that a later call knows what had failed for good. That a run is finished its own stages say, and nothing else.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path

from pivotrl.progress import ProgressBar
from pivotrl.rundir import STAGES, Stage, read_json, write_json
from pivotrl.sweeping.runs import SweepRun
from pivotrl.sweeping.warm import WarmProcess

RECORD = "sweep.json"
ATTEMPTS = 2
WAITING, RUNNING, DONE, FAILED = "waiting", "running", "done", "failed"
# Between two looks at what runs, for the display.
_LOOK_EVERY_S = 1.0
_DIED = "its process died (killed, or out of memory)"

type Work = Callable[[SweepRun, Path], str | None]
"""Does one run below the root; the error in one line, or None."""


@dataclass
class RunRecord:
    """What became of one run, as sweep.json holds it."""

    status: str = WAITING
    """waiting, running, done or failed."""
    errors: list[str] = field(default_factory=list[str])
    """One line per attempt that failed."""
    wall_s: float | None = None
    """Seconds of the last attempt that ended."""


def read_records(root: Path) -> dict[str, RunRecord]:
    """What earlier calls recorded; a run that was underway is waiting again."""
    if not (root / RECORD).exists():
        return {}
    records = {name: RunRecord(**record) for name, record in read_json(root / RECORD)["runs"].items()}
    for record in records.values():
        record.status = WAITING if record.status == RUNNING else record.status
    return records


@dataclass
class _Underway:
    run: SweepRun
    worker: WarmProcess
    started_s: float


class Sweep:
    """One call of the verb: its runs in the order they are tried, and what became of each.

    Args:
        records: of earlier calls; runs that failed there for good are not tried again.
    """

    def __init__(self, name: str, root: Path, runs: Sequence[SweepRun], records: dict[str, RunRecord]) -> None:
        self._name, self._root, self._runs, self.records = name, root, list(runs), records
        for run in runs:
            record = records.setdefault(run.name, RunRecord())
            # A finished run is looked at again: its stages compare what they hold with the recipe.
            record.status = WAITING if record.status == DONE else record.status
        self._waiting = [run for run in runs if records[run.name].status == WAITING]
        self._underway: dict[Future[str | None], _Underway] = {}

    @property
    def failed(self) -> list[SweepRun]:
        """Runs that failed for good, in this call or an earlier one."""
        return [run for run in self._runs if self.records[run.name].status == FAILED]

    def execute(self, work: Work, *, num_workers: int, bar: ProgressBar) -> None:
        """Does everything that waits."""
        bar.skip(len(self._runs) - len(self._waiting))
        with _warm(min(num_workers, len(self._waiting))) as idle:
            while self._waiting or self._underway:
                self._skip_after_failed(bar)
                while idle and (run := self._next()) is not None:
                    worker = idle.pop()
                    self._mark(run, RUNNING)
                    self._underway[worker.submit(work, run, self._root)] = _Underway(run, worker, time.monotonic())
                ended, _ = wait(self._underway, timeout=_LOOK_EVERY_S, return_when=FIRST_COMPLETED)
                for future in ended:
                    idle.append(self._end(future, bar))
                bar.advance(0, self._note())

    def _next(self) -> SweepRun | None:
        """The first waiting run that has what it reads; what is no part of this call was found finished before."""
        chosen = {run.name for run in self._runs}
        for run in self._waiting:
            if all(self.records[name].status == DONE for name in chosen & {*run.after}):
                self._waiting.remove(run)
                return run
        return None

    def _end(self, future: Future[str | None], bar: ProgressBar) -> WarmProcess:
        one = self._underway.pop(future)
        record = self.records[one.run.name]
        record.wall_s = round(time.monotonic() - one.started_s, 3)
        try:
            error = future.result()
        except BrokenProcessPool:
            error = _DIED
            one.worker.replace()
        if error is not None:
            record.errors.append(error)
            if len(record.errors) < ATTEMPTS:
                self._waiting.insert(0, one.run)
                self._mark(one.run, WAITING)
                return one.worker
        self._mark(one.run, DONE if error is None else FAILED)
        bar.advance(1, self._note())
        return one.worker

    def _skip_after_failed(self, bar: ProgressBar) -> None:
        """Runs that would read a failed one fail with it."""
        failed = {run.name for run in self.failed}
        for run in [run for run in self._waiting if failed & {*run.after}]:
            self._waiting.remove(run)
            self.records[run.name].errors.append(f"not run: {min(failed & {*run.after})} failed, which it reads")
            self._mark(run, FAILED)
            bar.advance(1, self._note())

    def _mark(self, run: SweepRun, status: str) -> None:
        self.records[run.name].status = status
        write_json(self._root / RECORD, {"name": self._name, "runs": {name: asdict(record) for name, record in self.records.items()}})

    def _note(self) -> str:
        parts = [f"{one.run.name} ({_stage_of(self._root / one.run.name)})" for one in self._underway.values()]
        return ", ".join([*parts, *([f"{len(self.failed)} failed"] if self.failed else [])])


def _stage_of(run: Path) -> str:
    """The stage that a run is in: the last one that has begun."""
    begun = [name for name in STAGES if (run / name).is_dir()]
    return begun[-1] if begun and not Stage.is_done(run, begun[-1]) else "starting" if not begun else f"after {begun[-1]}"


@contextmanager
def _warm(count: int) -> Iterator[list[WarmProcess]]:
    """So many worker processes: ended in peace after the work, at once where it is interrupted. What they had begun resumes."""
    workers = [WarmProcess() for _ in range(count)]
    try:
        yield list(workers)
    except BaseException:
        for worker in workers:
            worker.kill()
        raise
    for worker in workers:
        worker.close()
