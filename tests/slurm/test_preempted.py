"""A training job of a low partition loses its nodes to a job of a high one: by SLURM's own preemption, once without notice, once with a grace
period, and once where the cluster sends the job's own signal then. SLURM queues it again, it goes on from its last checkpoint, and it ends with
the bytes of the run that nothing happened to.
"""

from __future__ import annotations

import re
from pathlib import Path

from conftest import LocalCluster, Undisturbed, newest_checkpoint

from pivotrl.launching.status import log_files


def test_a_preempted_training_job_gives_way_and_changes_no_byte(cluster: LocalCluster, undisturbed: Undisturbed, tmp_path: Path) -> None:
    run = undisturbed.before_training(tmp_path / "run")
    job = cluster.launch(run, cluster=cluster.variant("preemptible", "partition: low"), only=("train",))["train"]
    attempts = run / "launch" / "attempts"

    cluster.wait_until("a checkpoint", lambda: newest_checkpoint(run) >= 4)
    cluster.preempt(job)
    # SLURM did it: the job's script had no time to.
    assert "starts again" not in log_files(run, "train")[0].read_text()
    cluster.slurm.run("scontrol", "update", f"JobId={job.job_id}", "Partition=low_grace")
    reached = newest_checkpoint(run)

    cluster.wait_until("the second start has a new checkpoint", lambda: newest_checkpoint(run) > reached)
    cluster.preempt(job)
    stopped = re.search(r"stopped after step (\d+) as SIGTERM asked", (attempts / f"train.{job.job_id}.1" / "train.0.log").read_text())
    assert stopped is not None
    # No step was lost, though this one is no multiple of train.checkpoint_every.
    reached = newest_checkpoint(run)
    assert reached == int(stopped[1])
    assert "starts again: preemption" in log_files(run, "train")[0].read_text()

    with cluster.configured("SlurmctldParameters=preempt_send_user_signal"):
        cluster.wait_until("the third start has a new checkpoint", lambda: newest_checkpoint(run) > reached)
        cluster.preempt(job)
        stopped = re.search(r"stopped after step (\d+) as .*/stop asks", (attempts / f"train.{job.job_id}.2" / "train.0.log").read_text())
        assert stopped is not None
        assert newest_checkpoint(run) == int(stopped[1])
    assert log_files(run, "train")[0].read_text().count("starts again: preemption") == 2

    undisturbed.assert_trained_alike(run)
    assert sorted(path.name for path in attempts.iterdir() if path.is_dir()) == [f"train.{job.job_id}.{start}" for start in range(4)]
    # Preemption is no failure, of which max_failures are allowed.
    assert not (attempts / f"train.{job.job_id}.failures").exists()
