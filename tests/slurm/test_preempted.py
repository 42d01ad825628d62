"""A training job of a low partition loses its nodes to a job of a high one: by SLURM's own preemption, once without notice and once with a grace
period. SLURM queues it again, it goes on from its last checkpoint, and it ends with the bytes of the run that nothing happened to.
"""

from __future__ import annotations

import re
from pathlib import Path

from conftest import LocalCluster, contents, newest_checkpoint, without

from pivotrl.launching.status import log_files, run_status


def _submit_above(cluster: LocalCluster) -> str:
    """A job of the high partition that wants both nodes for some seconds; its number."""
    words = ("--parsable", "--partition=high", "--nodes=2", "--output=/dev/null", "--chdir=/", "--wrap=sleep 8")
    return cluster.slurm.run("sbatch", *words).strip()


def _state(cluster: LocalCluster, job_id: str) -> str:
    found = cluster.job(job_id)
    return found.state if found else "GONE"


def test_a_preempted_training_job_gives_way_and_changes_no_byte(cluster: LocalCluster, undisturbed: Path, tmp_path: Path) -> None:
    run = without(undisturbed, tmp_path / "run", "train", "eval", "report")
    job = cluster.launch(run, cluster=cluster.variant("preemptible", "partition: low"), only=("train",))["train"]
    attempts = run / "launch" / "attempts"

    cluster.wait_until("a checkpoint", lambda: newest_checkpoint(run) >= 4)
    above = _submit_above(cluster)
    cluster.wait_until("the job above has the nodes", lambda: _state(cluster, above) == "RUNNING")
    assert _state(cluster, job.job_id) == "PENDING"
    # SLURM did it: the job's script had no time to.
    assert "starts again" not in log_files(run, "train")[0].read_text()
    cluster.slurm.run("scontrol", "update", f"JobId={job.job_id}", "Partition=low_grace")
    reached = newest_checkpoint(run)

    cluster.wait_until("the second start has a new checkpoint", lambda: newest_checkpoint(run) > reached)
    above = _submit_above(cluster)
    cluster.wait_until("the job above has the nodes", lambda: _state(cluster, above) == "RUNNING")
    stopped = re.search(r"stopped after step (\d+) as SIGTERM asked", (attempts / f"train.{job.job_id}.1" / "train.0.log").read_text())
    assert stopped is not None
    # No step was lost, though this one is no multiple of train.checkpoint_every.
    assert newest_checkpoint(run) == int(stopped[1])
    assert "starts again: preemption" in log_files(run, "train")[0].read_text()

    cluster.wait_for_state(run, "train", "COMPLETED", "FAILED", "GONE", "CANCELLED", "TIMEOUT")
    assert run_status(run)[0].state == "COMPLETED", log_files(run, "train")[0].read_text()
    assert sorted(path.name for path in attempts.iterdir() if path.is_dir()) == [f"train.{job.job_id}.{start}" for start in range(3)]
    # Preemption is no failure, of which max_failures are allowed.
    assert not (attempts / f"train.{job.job_id}.failures").exists()
    expected, actual = contents(undisturbed / "train"), contents(run / "train")
    assert sorted(actual) == sorted(expected)
    assert [name for name in expected if actual[name] != expected[name]] == []
    assert any(name.endswith(".safetensors") for name in expected)
