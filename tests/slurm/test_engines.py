"""A training job with engines on a node of their own: an engine that is killed, an engine's shell that is killed, and a preemption of both groups.
The trainer's two processes then share one node; the job ends with the bytes of the run whose trainer had two nodes and its engine inside.
"""

from __future__ import annotations

import os
import re
import signal
import socket
from pathlib import Path

from conftest import LocalCluster, Undisturbed, newest_checkpoint

from pivotrl.launching.status import log_files


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def test_lost_engines_and_a_preemption_change_no_byte(cluster: LocalCluster, undisturbed: Undisturbed, tmp_path: Path) -> None:
    run = undisturbed.before_training(tmp_path / "run")
    words = (
        *("launch.train_nodes=1", "launch.processes_per_node=2", "launch.generation_nodes=1"),
        *("placement.type=remote", f"placement.listen=127.0.0.1:{_free_port()}"),
    )
    job = cluster.launch(run, *words, cluster=cluster.variant("engines", "partition: low_grace"), only=("train",))["train"]
    attempt = run / "launch" / "attempts" / f"train.{job.job_id}.0"

    cluster.wait_until("a checkpoint", lambda: newest_checkpoint(run) >= 4)
    (engine,) = cluster.processes("n2", job, program="python")
    os.kill(engine, signal.SIGKILL)
    cluster.wait_until("another engine", lambda: newest_checkpoint(run) >= 8)
    assert "the engine ended with 137; starting it again" in (attempt / "engine.0.log").read_text()
    assert "lost" in (attempt / "train.0.log").read_text()

    reached = newest_checkpoint(run)
    cluster.preempt(job)
    stopped = re.search(r"stopped after step (\d+) as SIGTERM asked", (attempt / "train.0.log").read_text())
    assert stopped is not None
    assert newest_checkpoint(run) == int(stopped[1]) >= reached
    assert "starts again: preemption" in log_files(run, "train")[0].read_text()
    undisturbed.assert_trained_alike(run)
    assert not attempt.with_name(f"train.{job.job_id}.failures").exists()
