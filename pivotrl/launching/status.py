"""What becomes of a launched run: its jobs with state and progress, their logs, and how to end them.

The queue forgets a job minutes after its end; then the run's own files say how it ended. Called by verbs/launch.py.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pivotrl.artifacts import StepRow, read_artifact_lines
from pivotrl.config.load import load_recipe
from pivotrl.errors import UserError
from pivotrl.launching.render import LAUNCH
from pivotrl.launching.slurm import QueuedJob, Slurm, Submission, recorded
from pivotrl.launching.submit import OVER
from pivotrl.rundir import STAGES, Stage

# No state of SLURM's: the queue has forgotten the job and it left no word, as one does that was cancelled or killed.
GONE = "GONE"
_NOTE_WIDTH = 70


@dataclass(frozen=True, slots=True)
class JobStatus:
    """One job, or one array, of a run."""

    stage: str
    job_id: str
    state: str
    """SLURM's, with counts where an array's members differ."""
    nodes: str
    elapsed: str
    num_restarts: int
    progress: str
    """How far its stage is; where it waits, for what."""


def run_status(run: Path) -> list[JobStatus]:
    """The newest submission of each stage, in order.

    Raises:
        UserError: where nothing of the run was submitted, or SLURM does not answer.
    """
    slurm, submissions = _open(run)
    queued = slurm.queue([one.job_id for one in submissions])
    newest = {one.stage: one for one in submissions}
    return [_job_status(run, one, [job for job in queued if job.array_id == one.job_id]) for one in newest.values()]


def cancel(run: Path) -> list[str]:
    """Cancels every job of the run that is not over and returns their numbers."""
    slurm, submissions = _open(run)
    ids = [one.job_id for one in submissions]
    active = sorted({job.array_id for job in slurm.queue(ids) if job.state not in OVER}, key=int)
    if active:
        # All at once: the end of one must not start the next.
        slurm.run("scancel", *reversed(active))
    return active


def log_files(run: Path, stage: str | None) -> list[Path]:
    """The logs of a stage's newest job (of each member of an array), or of the newest job that has one.

    Raises:
        UserError: where the stage was not launched or has not started.
    """
    _, submissions = _open(run)
    chosen = [one for one in submissions if stage is None or one.stage == stage]
    if not chosen:
        known = ", ".join(dict.fromkeys(one.stage for one in submissions))
        raise UserError(f"{run} has no job {stage!r}", rule=f"its jobs are {known}", fix="name one of them")
    for one in reversed(chosen):
        found = sorted((run / LAUNCH / "logs").glob(f"{one.stage}.{one.job_id}[._]*out"), key=lambda path: (len(path.name), path.name))
        if found:
            return found
    raise UserError(f"{chosen[-1].stage} {chosen[-1].job_id} has no log", rule="a log exists from a job's start", fix=f"see `pivotrl status {run}`")


def _open(run: Path) -> tuple[Slurm, list[Submission]]:
    slurm, submissions = recorded(run / LAUNCH)
    if slurm is None or not submissions:
        raise UserError(f"{run} has no submitted jobs", rule="the run must have been launched", fix="give a run of `pivotrl launch`")
    return slurm, submissions


def _job_status(run: Path, one: Submission, queued: Sequence[QueuedJob]) -> JobStatus:
    active = [job for job in queued if job.state not in OVER]
    counts = Counter(job.state for job in queued)
    state = next(iter(counts)) if len(counts) == 1 else ", ".join(f"{state} {count}" for state, count in sorted(counts.items()))
    if not active:
        state = _ended(run, one, state)
    waiting = [job.reason for job in active if job.state == "PENDING"]
    progress = f"waits: {waiting[0]}" if waiting and len(waiting) == len(active) else _progress(run, one)
    nodes = ",".join(job.nodes for job in queued if job.nodes)
    elapsed = max((job.elapsed for job in queued), key=lambda text: (len(text), text), default="")
    return JobStatus(one.stage, one.job_id, state, nodes, elapsed, max((job.num_restarts for job in queued), default=0), progress)


def _ended(run: Path, one: Submission, state: str) -> str:
    """By the files that jobs leave at their end; `state` where they left none."""
    codes = [path.read_text().strip() for path in (run / LAUNCH / "attempts").glob(f"{one.stage}.{one.job_id}[._]*end")]
    failed = [code for code in codes if code != "0"]
    if failed:
        return f"FAILED ({failed[0]})"
    return "COMPLETED" if len(codes) == one.num_shards else state or GONE


def _progress(run: Path, one: Submission) -> str:
    if one.stage in STAGES and Stage.is_done(run, one.stage):
        return "done"
    if one.stage in ("sft", "train") and (metrics := run / one.stage / "metrics.jsonl").is_file():
        recipe = load_recipe(run / LAUNCH / "recipe").recipe
        section = recipe.train if one.stage == "train" else recipe.sft
        step = max((row["step"] + 1 for row in read_artifact_lines(metrics, StepRow, is_growing=True)), default=0)
        return f"step {step}/{section.num_steps if section else '?'}"
    logs = sorted((run / LAUNCH / "attempts").glob(f"{one.stage}.{one.job_id}[._]*/{one.stage}.0.log"), key=lambda path: path.stat().st_mtime)
    lines = logs[-1].read_text(errors="replace").split("\n") if logs else []
    return next((line.strip()[:_NOTE_WIDTH] for line in reversed(lines) if line.strip()), "")
