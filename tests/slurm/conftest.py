"""A real SLURM of two nodes on this host for the tests of this folder, and what they ask it.

Needs root and the packages of launch/local_slurm/install.sh; skipped without them, an error where CI=true. Not collected with the rest
of the suite: `make slurm` runs the short file, `make test-slurm` all. Under pytest-xdist every worker has a SLURM of its own; the run that
nothing happens to is made by one of them for all.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from fakes.stage_files import contents

from pivotrl.config.load import load_recipe
from pivotrl.errors import UserError
from pivotrl.launching.render import load_target, render
from pivotrl.launching.slurm import QueuedJob, Slurm, Submission
from pivotrl.launching.status import log_files, run_status
from pivotrl.launching.submit import OVER, submit
from pivotrl.rundir import Stage

ROOT = Path(__file__).resolve().parents[2]
LOCAL = ROOT / "launch" / "local_slurm"
RECIPE = ROOT / "tests" / "golden" / "tiny_recipe"
# Two nodes train one model between them, and two jobs share the profiling.
WORDS = (
    *("launch.train_nodes=2", "parallel.tensor_model_parallel_size=2", "launch.profile_shards=2"),
    *("sft.num_steps=4", "profile.max_candidates=16", "train.num_steps=32", "train.checkpoint_every=4", "train.validation=null"),
)
_PATIENCE_S = 400
# Of the ports of one worker's clusters, the number from the first to the next worker's.
_PORTS_PER_WORKER = 60


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

    @contextmanager
    def configured(self, line: str) -> Iterator[None]:
        """slurm.conf has one line more meanwhile."""
        conf = self.directory / "slurm.conf"
        kept = conf.read_text()
        try:
            conf.write_text(f"{kept}{line}\n")
            self.slurm.run("scontrol", "reconfigure")
            yield
        finally:
            conf.write_text(kept)
            self.slurm.run("scontrol", "reconfigure")

    def launch(self, run: Path, *words: str, cluster: Path | None = None, only: tuple[str, ...] = ()) -> dict[str, Submission]:
        """Submits a run's jobs (those named in `only`, where some are) and returns them by stage."""
        target = load_target(cluster or self.file)
        scripts = render(load_recipe(RECIPE, (*WORDS, *words)), target, run)
        return {one.stage: one for one in submit([script for script in scripts if not only or script.job.name in only], target, run)}

    def job(self, job_id: str) -> QueuedJob | None:
        found = self.slurm.queue([job_id])
        return found[0] if found else None

    def preempt(self, job: Submission) -> None:
        """Submits a job of the high partition that wants both nodes for some seconds; returns when it has them and the other one waits."""
        words = ("--parsable", "--partition=high", "--nodes=2", "--output=/dev/null", "--chdir=/", "--wrap=sleep 4")
        above = self.slurm.run("sbatch", *words).strip()
        self.wait_until("the job above has the nodes", lambda: (found := self.job(above)) is not None and found.state == "RUNNING")
        below = self.job(job.job_id)
        assert below is not None
        assert below.state == "PENDING"

    def processes(self, node: str, job: Submission, *, program: str) -> list[int]:
        """Processes of a job on a node whose executable's name starts so: by what SLURM put into their environment, so never another's."""
        # Numbers of jobs are unique among the clusters that start.sh has started with different ports; the file names the cluster.
        marks = {f"SLURM_JOB_ID={job.job_id}", f"SLURMD_NODENAME={node}", f"SLURM_CONF={self.directory / 'slurm.conf'}"}
        found: list[int] = []
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                environment = (folder / "environ").read_bytes().decode(errors="replace").split("\0")
                name = (folder / "exe").readlink().name
            except OSError:
                continue
            if marks.issubset(environment) and name.startswith(program):
                found.append(int(folder.name))
        return found

    def wait_until(self, what: str, condition: Callable[[], bool]) -> None:
        """Looks twice a second; prints the cluster's own logs where it never comes true."""

        def is_true() -> bool:
            try:
                return condition()
            except UserError:
                # On a busy machine a command of SLURM's may fail: munge waits two seconds for its client.
                return False

        deadline_s = time.monotonic() + _PATIENCE_S
        while not is_true():
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


@dataclass(frozen=True)
class Undisturbed:
    """A run from trajectories to report, every stage a job; another worker may still be at it."""

    run: Path
    cluster: LocalCluster

    def before_training(self, target: Path) -> Path:
        """A copy that has not trained and was never launched."""
        self._wait("select")
        left_out = ("train", "eval", "report", "launch", "engines")
        shutil.copytree(self.run, target, ignore=lambda folder, _names: left_out if Path(folder) == self.run else ())
        return target

    def assert_trained_alike(self, run: Path) -> None:
        """Waits for the end of the run's training job: it has completed, and every file of the stage that may not depend on the clock is the same."""
        self.cluster.wait_for_state(run, "train", "COMPLETED", "FAILED", "GONE", "CANCELLED", "TIMEOUT")
        assert run_status(run)[0].state == "COMPLETED", log_files(run, "train")[0].read_text()
        self._wait("train")
        expected, actual = contents(self.run / "train"), contents(run / "train")
        assert sorted(actual) == sorted(expected)
        assert [name for name in expected if actual[name] != expected[name]] == []
        assert any(name.endswith(".safetensors") for name in expected)

    def _wait(self, stage: str) -> None:
        self.cluster.wait_until(f"{stage} of {self.run}", lambda: Stage.is_done(self.run, stage))


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
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    start = 16817 + worker * _PORTS_PER_WORKER
    for first in range(start, start + _PORTS_PER_WORKER, 3):
        try:
            for port in range(first, first + 3):
                with socket.socket() as probe:
                    probe.bind(("", port))
        except OSError:
            continue
        return first
    raise RuntimeError("no free ports")


@pytest.fixture(scope="session")
def undisturbed(cluster: LocalCluster, tmp_path_factory: pytest.TempPathFactory) -> Undisturbed:
    """Made by the worker that asks first, which waits for its end: what it does to its nodes later must not meet it."""
    base = tmp_path_factory.getbasetemp()
    shared = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    made = Undisturbed(shared / "undisturbed", cluster)
    try:
        made.run.mkdir()
    except FileExistsError:
        return made
    cluster.launch(made.run)
    cluster.wait_for_state(made.run, "report", *OVER, "GONE")
    return made


@pytest.fixture
def ingested(cluster: LocalCluster, tmp_path: Path) -> Path:
    """A run that has done all before `sft`, and the folder of another launch."""
    run = tmp_path / "run"
    cluster.launch(run, only=("ingest",))
    cluster.wait_for_state(run, "ingest", *OVER, "GONE")
    shutil.rmtree(run / "launch")
    return run


def newest_checkpoint(run: Path) -> int:
    """Step of the training job's newest checkpoint; 0 where there is none."""
    return max((int(path.name.removeprefix("step_")) for path in (run / "train" / "checkpoints").glob("step_*")), default=0)
