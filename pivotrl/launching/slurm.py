"""The few SLURM commands a launched run needs, and RUN/launch/jobs.json, which records every submission.

Commands run with an environment of their own: SBATCH_* and SLURM_* variables of the shell would be options nobody sees. Called by
submit.py and status.py.
"""

from __future__ import annotations

import os
import pwd
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from pivotrl.artifacts import JobsRecord, read_artifact
from pivotrl.errors import UserError
from pivotrl.rundir import write_json

JOBS = "jobs.json"
# Longer than a busy controller takes to answer.
_PATIENCE_S = 120


@dataclass(frozen=True, slots=True)
class Submission:
    """One accepted sbatch."""

    stage: str
    job_id: str
    """Of the array where it is one."""
    num_shards: int
    depends_on: str | None
    command: tuple[str, ...]
    submitted_at: str
    """UTC, ISO 8601."""


@dataclass(frozen=True, slots=True)
class QueuedJob:
    """A job as the queue shows it; one per array member that is not waiting with the rest."""

    job_id: str
    """As in Submission, with `_INDEX` for members of arrays."""
    state: str
    reason: str
    nodes: str
    elapsed: str
    num_restarts: int

    @property
    def array_id(self) -> str:
        return self.job_id.partition("_")[0]


@dataclass(frozen=True, slots=True)
class Slurm:
    """One cluster's commands."""

    slurm_conf: str | None
    """None: the system's own."""
    path: str
    """PATH on which the commands are."""

    def _environment(self) -> dict[str, str]:
        user = pwd.getpwuid(os.getuid())
        configured = {} if self.slurm_conf is None else {"SLURM_CONF": self.slurm_conf}
        return {"PATH": self.path, "HOME": user.pw_dir, "USER": user.pw_name, "LOGNAME": user.pw_name, **configured}

    def run(self, *words: str) -> str:
        """Standard output of a command.

        Raises:
            UserError: where the command is missing or refuses, in its own words.
        """
        program, environment = shutil.which(words[0], path=self.path), self._environment()
        if program is None:
            raise UserError(
                f"{words[0]} was not found on {self.path}",
                rule="jobs are submitted and followed on a machine with SLURM's commands",
                fix="log in there, correct `path` in the cluster file, or use --dry-run with a run directory that was never launched",
            )
        try:
            done = subprocess.run([program, *words[1:]], env=environment, capture_output=True, text=True, timeout=_PATIENCE_S, check=False)
        except subprocess.TimeoutExpired as error:
            raise UserError(
                f"{words[0]} gave no answer within {_PATIENCE_S} s", rule="SLURM's controller must answer", fix="try again later"
            ) from error
        if done.returncode:
            raise UserError(
                f"{' '.join(words)}: {' '.join(done.stderr.split())}", rule="SLURM must accept it", fix="see the cluster file and `man sbatch`"
            )
        return done.stdout

    def queue(self, job_ids: Sequence[str]) -> list[QueuedJob]:
        """Those of the jobs that the queue still knows: waiting, running, or ended a few minutes ago."""
        # All of the user's jobs are listed because squeue refuses a list with a number it has forgotten.
        names = ("JobID", "JobArrayID", "State", "Reason", "NodeList", "TimeUsed", "RestartCnt")
        listing = self.run(
            "squeue", "--noheader", "--states=all", f"--user={self._environment()['USER']}", f"--Format={','.join(f'{name}:|' for name in names)}"
        )
        found: list[QueuedJob] = []
        for line in listing.splitlines():
            _, job_id, state, reason, nodes, elapsed, restarts = line.split("|")[: len(names)]
            job = QueuedJob(job_id, state, reason, nodes, elapsed, int(restarts or 0))
            if job.array_id in job_ids:
                found.append(job)
        return found


def recorded(launch_dir: Path) -> tuple[Slurm | None, list[Submission]]:
    """The SLURM that the run was submitted to and the submissions, by jobs.json; None and none where nothing was submitted."""
    path = launch_dir / JOBS
    if not path.is_file():
        return None, []
    record = read_artifact(path, JobsRecord)
    names = Submission.__dataclass_fields__
    rows = [{name: row[name] for name in names} for row in record["submissions"]]
    return Slurm(record["slurm_conf"], record["path"]), [Submission(**{**row, "command": tuple(row["command"])}) for row in rows]


def record(launch_dir: Path, cluster_name: str, slurm: Slurm, submissions: Sequence[Submission]) -> None:
    """Writes jobs.json whole or not at all."""
    rows: list[Mapping[str, object]] = [asdict(submission) for submission in submissions]
    write_json(launch_dir / JOBS, {"cluster": cluster_name, "slurm_conf": slurm.slurm_conf, "path": slurm.path, "submissions": rows})
