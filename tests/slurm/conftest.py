"""A real SLURM of two nodes on this host for the tests of this folder, and what they ask it.

Needs root and the packages of launch/local_slurm/install.sh; skipped without them, an error where CI=true. Not collected with the rest
of the suite: `make slurm` runs the short file, `make test-slurm` all.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from pivotrl.config.load import load_recipe
from pivotrl.launching.render import load_target, render
from pivotrl.launching.slurm import QueuedJob, Slurm, Submission
from pivotrl.launching.status import run_status
from pivotrl.launching.submit import submit

ROOT = Path(__file__).resolve().parents[2]
LOCAL = ROOT / "launch" / "local_slurm"
RECIPE = ROOT / "tests" / "golden" / "tiny_recipe"
TIME_FILES = {"timing.json", "timing.jsonl"}
# Two nodes train one model between them, and two jobs share the profiling.
WORDS = (
    *("launch.train_nodes=2", "parallel.tensor_model_parallel_size=2", "launch.profile_shards=2"),
    *("sft.num_steps=4", "profile.max_candidates=16", "train.num_steps=32", "train.checkpoint_every=4", "train.validation=null"),
)
_PATIENCE_S = 400


@dataclass(frozen=True)
class LocalCluster:
    """The running SLURM."""

    directory: Path
    slurm: Slurm

    @property
    def file(self) -> Path:
        return self.directory / "cluster.yaml"

    def variant(self, name: str, *lines: str) -> Path:
        """A cluster file with some keys changed."""
        path = self.directory / f"{name}.yaml"
        path.write_text("\n".join([f"extends: {self.file}", *lines]) + "\n")
        return path

    def launch(self, run: Path, *words: str, cluster: Path | None = None, only: tuple[str, ...] = ()) -> dict[str, Submission]:
        """Submits a run's jobs (those named in `only`, where some are) and returns them by stage."""
        target = load_target(cluster or self.file)
        scripts = render(load_recipe(RECIPE, (*WORDS, *words)), target, run)
        return {one.stage: one for one in submit([script for script in scripts if not only or script.job.name in only], target, run)}

    def job(self, job_id: str) -> QueuedJob | None:
        found = self.slurm.queue([job_id])
        return found[0] if found else None

    def wait_until(self, what: str, condition: Callable[[], bool]) -> None:
        """Looks twice a second; prints the cluster's own logs where it never comes true."""
        deadline_s = time.monotonic() + _PATIENCE_S
        while not condition():
            if time.monotonic() > deadline_s:
                logs = "\n".join(path.read_text(errors="replace")[-3000:] for path in sorted(self.directory.glob("*.log")))
                pytest.fail(f"not within {_PATIENCE_S} s: {what}\n{logs}")
            time.sleep(0.5)

    def wait_for_state(self, run: Path, stage: str, *states: str) -> None:
        def reached() -> bool:
            return next(job.state for job in run_status(run) if job.stage == stage).startswith(states)

        try:
            self.wait_until(f"{stage} of {run} is {' or '.join(states)}", reached)
        except BaseException:
            for path in sorted((run / "launch").rglob("*.out")) + sorted((run / "launch" / "attempts").rglob("*.log")):
                sys.stderr.write(f"--- {path}\n{path.read_text(errors='replace')[-3000:]}\n")
            raise


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    """A cluster for all tests of the session; what it started is stopped, and nothing else."""
    missing = [name for name in ("slurmctld", "slurmd", "sbatch", "munged") if shutil.which(name) is None]
    if missing or os.getuid() != 0:
        reason = f"no local SLURM: {', '.join(missing) + ' missing' if missing else 'not root'}; see {LOCAL / 'install.sh'}"
        if os.environ.get("CI") == "true":
            pytest.fail(reason)
        pytest.skip(reason)
    directory = tmp_path_factory.mktemp("slurm")
    try:
        subprocess.run([LOCAL / "start.sh", directory, str(_three_free_ports()), Path(sys.prefix)], check=True)
        yield LocalCluster(directory, Slurm(str(directory / "slurm.conf"), os.environ["PATH"]))
    finally:
        subprocess.run([LOCAL / "stop.sh", directory], check=True)


def _three_free_ports() -> int:
    for first in range(16817, 18000, 3):
        try:
            for port in range(first, first + 3):
                with socket.socket() as probe:
                    probe.bind(("", port))
        except OSError:
            continue
        return first
    raise RuntimeError("no free ports")


@pytest.fixture(scope="session")
def undisturbed(cluster: LocalCluster, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run from trajectories to report, every stage a job."""
    run = tmp_path_factory.mktemp("undisturbed") / "run"
    cluster.launch(run)
    cluster.wait_for_state(run, "report", "COMPLETED", "GONE", "FAILED", "CANCELLED")
    return run


def contents(stage: Path) -> dict[str, bytes]:
    """Every file of a stage that may not depend on the clock or on interruptions."""
    files = (path for path in stage.rglob("*") if path.is_file() and path.name not in TIME_FILES and "checkpoints" not in path.parts)
    return {str(path.relative_to(stage)): path.read_bytes() for path in files}


def newest_checkpoint(run: Path) -> int:
    """Step of the training job's newest checkpoint; 0 where there is none."""
    return max((int(path.name.removeprefix("step_")) for path in (run / "train" / "checkpoints").glob("step_*")), default=0)


def without(run: Path, target: Path, *stages: str) -> Path:
    """A copy of a run that lacks some stages and was never launched."""
    shutil.copytree(run, target, ignore=lambda folder, names: [*stages, "launch"] if Path(folder) == run else [])
    return target
