"""Puts a run's scripts into the queue, each waiting for the one whose result it reads, and records each the moment it is accepted.

Jobs that wait for none are held until the whole chain is recorded, so that a submission that is interrupted runs nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from pivotrl.errors import UserError
from pivotrl.launching.jobs import predecessors
from pivotrl.launching.render import LAUNCH, Script, Target
from pivotrl.launching.slurm import Slurm, Submission, record, recorded

# States of a job that is over; the queue shows them for a while.
OVER = frozenset(("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY", "DEADLINE", "BOOT_FAIL", "PREEMPTED"))


def refuse_queued(run: Path) -> None:
    """Raises UserError where jobs of the run wait or run: two jobs must not write one stage."""
    slurm, submissions = recorded(run / LAUNCH)
    if slurm is None:
        return
    queued = [job for job in slurm.queue([one.job_id for one in submissions]) if job.state not in OVER]
    if queued:
        raise UserError(
            f"{run} has {len(queued)} jobs in the queue, the first is {queued[0].job_id}",
            rule="a run is worked on by one chain of jobs",
            fix=f"wait, or `pivotrl cancel {run}` first",
        )


def submit(scripts: Sequence[Script], target: Target, run: Path) -> list[Submission]:
    """Submits the scripts as a chain and returns the new submissions.

    Raises:
        UserError: where SLURM refuses one, in SLURM's words; those accepted before it are cancelled.
    """
    cluster, launch_dir = target.cluster, run.resolve() / LAUNCH
    slurm = Slurm(cluster.slurm_conf, cluster.path)
    _, earlier = recorded(launch_dir)
    new: list[Submission] = []
    numbers: dict[str | None, str] = {}
    try:
        for script, after in zip(scripts, predecessors([script.job for script in scripts]), strict=True):
            before = numbers.get(after)
            waiting = (f"--dependency=afterok:{before}", "--kill-on-invalid-dep=yes") if before else ("--hold",)
            command = ("sbatch", "--parsable", *waiting, str(script.path))
            # A federation answers JOB;CLUSTER.
            job_id = slurm.run(*command).strip().partition(";")[0]
            new.append(Submission(script.job.name, job_id, script.job.num_shards, before, command, datetime.now(UTC).isoformat(timespec="seconds")))
            numbers[script.job.name] = job_id
            record(launch_dir, cluster.name, slurm, [*earlier, *new])
        slurm.run("scontrol", "release", ",".join(one.job_id for one in new if one.depends_on is None))
    except UserError:
        if new:
            slurm.run("scancel", *(one.job_id for one in new))
        raise
    return new
