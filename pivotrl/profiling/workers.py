"""Local worker processes of the profile stage: starts them, shows one progress line for all, starts those that die again.

Consumes one command per shard; a worker is such a command, with its own engine. Looks at nothing but exit codes and the unit
files that appear. Called by verbs/profile.py, which merges afterwards.
"""

from __future__ import annotations

import re
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from pivotrl.artifacts import UnitRow, read_artifact_lines
from pivotrl.child_process import own_environment
from pivotrl.errors import EXIT_INFRA, EXIT_USER, InfraLimitError, UserError
from pivotrl.pivots.dataset import PROFILES
from pivotrl.profiling.measure import ProfileSettings
from pivotrl.profiling.units import UNITS, Ledger, Work, unit_path
from pivotrl.progress import ProgressBar, progress_bar
from pivotrl.rundir import Stage
from pivotrl.trajectories.store import CandidateStore

# Starts of one worker beyond the first: a machine that kills one for memory more often than this will not stop doing so.
_MAX_RESTARTS = 3
_LOOK_EVERY_S = 1.0


@dataclass(slots=True)
class _Worker:
    name: str
    command: Sequence[str]
    environment: Mapping[str, str]
    log: Path
    num_starts: int = 0
    process: subprocess.Popen[bytes] = field(init=False)

    def start(self) -> None:
        self.num_starts += 1
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(self.command, env=self.environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log)

    @property
    def last_words(self) -> str:
        """The last line of the log: an error's message, where it ended with one."""
        lines = self.log.read_text(errors="replace").split("\n")
        return next((line.removeprefix("pivotrl: error: ") for line in reversed(lines) if line.strip()), "it wrote nothing")


def run_workers(commands: Sequence[Sequence[str]], stage: Stage, candidates: CandidateStore, settings: ProfileSettings) -> None:
    """Runs one process per command until all units of the stage are on disk.

    A worker that a signal ended is started again, three times at most, and resumes at its next unit. One that stops for any
    other reason stops all of them.

    Raises:
        UserError: what a worker refused to do (exit code 2).
        InfraLimitError: where a worker stopped because the infrastructure failed too often (exit code 3), or signals end it again and again.
        RuntimeError: for any other exit code; names the worker's log.
    """
    if (stage.path / PROFILES).exists():
        return
    (stage.path / UNITS).mkdir(exist_ok=True)
    environments = _environments(len(commands))
    workers = [
        _Worker(f"{index}/{len(commands)}", command, environments[index], stage.path / UNITS / f".worker-{index}.log")
        for index, command in enumerate(commands)
    ]
    work = Work(candidates, settings)
    with progress_bar("profile", work.num_candidates(range(work.num_units)), "candidates") as bar:
        watch = _Watch(stage.path, work, Ledger(settings.profile.num_samples), bar, len(workers))
        watch.look(is_first=True)
        try:
            for worker in workers:
                worker.start()
            at_work = workers
            while at_work:
                at_work = [worker for worker in at_work if _is_at_work(worker)]
                watch.look()
                time.sleep(_LOOK_EVERY_S if at_work else 0)
        finally:
            for worker in workers:
                if hasattr(worker, "process") and worker.process.poll() is None:
                    worker.process.terminate()
                    worker.process.wait()
    assert not watch.missing, f"all workers ended well but {len(watch.missing)} units of the profile are missing"


def _is_at_work(worker: _Worker) -> bool:
    """Whether the process runs; starts it again where a signal ended it."""
    code = worker.process.poll()
    if code is None or code == 0:
        return code is None
    if code < 0 and worker.num_starts <= _MAX_RESTARTS:
        worker.start()
        return True
    if code == EXIT_USER:
        raise UserError(worker.last_words, rule="all workers stop where one refuses to work", fix=f"its log is {worker.log}")
    if code == EXIT_INFRA:
        raise InfraLimitError(worker.last_words)
    if code < 0:
        raise InfraLimitError(
            f"worker {worker.name} of the profile was ended by signal {-code}, {worker.num_starts} times; its log is {worker.log}; "
            "free memory or lower profile.num_workers, and run the same command to resume"
        )
    raise RuntimeError(f"worker {worker.name} of the profile ended with exit code {code}: {worker.last_words}; its log is {worker.log}")


class _Watch:
    """Reads every unit file once, when it appears."""

    def __init__(self, stage_dir: Path, work: Work, ledger: Ledger, bar: ProgressBar, num_workers: int) -> None:
        self._stage_dir, self._work, self._ledger, self._bar, self._num_workers = stage_dir, work, ledger, bar, num_workers
        self._started_s = time.monotonic()
        self.missing = set(range(work.num_units))

    def look(self, *, is_first: bool = False) -> None:
        """Books the units that appeared; those of the first look were made before."""
        names = {path.name for path in (self._stage_dir / UNITS).iterdir()}
        for number in sorted(self.missing):
            path = unit_path(self._stage_dir, number)
            if path.name not in names:
                continue
            self.missing.remove(number)
            self._ledger.add(read_artifact_lines(path, UnitRow))
            size = self._work.num_candidates([number])
            if is_first:
                self._bar.skip(size)
            else:
                worker_h = self._num_workers * (time.monotonic() - self._started_s) / 3600
                self._bar.advance(size, f"{self._ledger.note}, {worker_h:.2f} worker hours")


def _environments(num_workers: int) -> list[dict[str, str]]:
    """The environment of each worker: GPUs are dealt out where there are enough of them."""
    inherited = own_environment()
    visible = inherited.get("CUDA_VISIBLE_DEVICES")
    present = sorted(int(match[1]) for path in Path("/dev").glob("nvidia*") if (match := re.fullmatch(r"nvidia(\d+)", path.name)))
    devices = visible.split(",") if visible else list(map(str, range(len(present))))
    return [{**inherited, **share} for share in device_shares(devices, num_workers)]


def device_shares(devices: Sequence[str], num_workers: int) -> list[dict[str, str]]:
    """CUDA_VISIBLE_DEVICES per worker, equally many each; nothing is set where there are fewer devices than workers.

    >>> device_shares(["0", "1", "2", "3", "4"], 2)
    [{'CUDA_VISIBLE_DEVICES': '0,1'}, {'CUDA_VISIBLE_DEVICES': '2,3'}]
    >>> device_shares([], 2)
    [{}, {}]
    """
    size = len(devices) // num_workers
    return [{"CUDA_VISIBLE_DEVICES": ",".join(devices[index * size : (index + 1) * size])} if size else {} for index in range(num_workers)]
