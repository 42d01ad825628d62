"""What goes wrong on a cluster, made to go wrong on a real SLURM: a killed process, a lost node, a time limit, a node that does not answer, an
error of the user's, and an end by `cancel`. Whatever is done again ends with the bytes of the run that nothing happened to.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

from conftest import LocalCluster, Undisturbed, newest_checkpoint

from pivotrl.launching.status import cancel, log_files, run_status

# Enough for a start on a busy machine before the script's own deadline: of a limit of three minutes all but ten seconds.
_LONG_LEAD = ("stop_before_s: 170",)


def _stepd(cluster: LocalCluster, node: str) -> list[int]:
    """The daemons that hold a node's steps: children of init whose command names their node."""
    listing = subprocess.run(["ps", "-eo", "pid=,ppid=,args="], capture_output=True, text=True, check=True).stdout
    spool = str(cluster.directory / f"spool.{node}")
    stepds = [line.split() for line in listing.splitlines() if "slurmstepd" in line]
    return [int(words[0]) for words in stepds if any(spool in str(link) for link in _open_files(int(words[0])))]


def _open_files(pid: int) -> list[str]:
    try:
        return [str(link.readlink()) for link in Path(f"/proc/{pid}/fd").iterdir()]
    except OSError:
        return []


def test_a_killed_process_a_lost_node_and_a_time_limit_change_no_byte(cluster: LocalCluster, undisturbed: Undisturbed, tmp_path: Path) -> None:
    run = undisturbed.before_training(tmp_path / "run")
    job = cluster.launch(run, cluster=cluster.variant("disturbed", *_LONG_LEAD), only=("train",))["train"]
    attempts = run / "launch" / "attempts"

    cluster.wait_until("a checkpoint", lambda: newest_checkpoint(run) >= 4)
    (victim,) = cluster.processes("n2", job, program="python")
    os.kill(victim, signal.SIGKILL)
    cluster.wait_until(
        "the second start has a new checkpoint", lambda: (attempts / f"train.{job.job_id}.1").is_dir() and newest_checkpoint(run) >= 12
    )
    assert "starts again: a process was killed" in log_files(run, "train")[0].read_text()

    # A power cut: the node's daemon and all it started are gone at once.
    daemon = int((cluster.directory / "slurmd.n2.pid").read_text())
    for pid in [daemon, *_stepd(cluster, "n2"), *cluster.processes("n2", job, program="")]:
        os.kill(pid, signal.SIGKILL)
    cluster.wait_until("the controller misses the node", lambda: "DOWN" in cluster.slurm.run("scontrol", "show", "node", "n2").upper())
    subprocess.run(["slurmd", "-N", "n2"], env={**os.environ, "SLURM_CONF": str(cluster.directory / "slurm.conf")}, check=True)

    cluster.wait_until("the third start", (attempts / f"train.{job.job_id}.2").is_dir)
    cluster.slurm.run("scontrol", "update", f"JobId={job.job_id}", "TimeLimit=3")
    cluster.wait_until("the fourth start waits", lambda: (found := cluster.job(job.job_id)) is not None and found.state == "PENDING")
    cluster.slurm.run("scontrol", "update", f"JobId={job.job_id}", "TimeLimit=30")
    undisturbed.assert_trained_alike(run)
    assert "starts again: the time limit" in log_files(run, "train")[0].read_text()
    assert re.search(r"stopped after step \d+ as .*/stop asks", (attempts / f"train.{job.job_id}.2" / "train.0.log").read_text())


def test_a_users_error_ends_the_chain_and_stands_at_the_top_of_the_log(cluster: LocalCluster, ingested: Path) -> None:
    run = ingested
    cluster.launch(run, "parallel.pipeline_model_parallel_size=2", only=("sft", "profile", "select"))
    cluster.wait_for_state(run, "sft", "FAILED")
    cluster.wait_for_state(run, "select", "CANCELLED", "GONE")
    lines = log_files(run, "sft")[0].read_text().splitlines()
    assert lines[0].startswith("first error: process 0 on n1 ended with 2")
    assert any("tensor_model_parallel_size x pipeline_model_parallel_size" in line for line in lines[1:5])
    assert not (run / "profile").exists()


def test_a_node_that_does_not_answer_is_excluded_and_nothing_of_the_shell_arrives(cluster: LocalCluster, ingested: Path, tmp_path: Path) -> None:
    """n2's check hangs. The stand-in for python also writes down the environment it gets."""
    run = ingested
    python = tmp_path / "venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(
        f'#!/bin/bash\nenv >"{tmp_path}/environment.$SLURMD_NODENAME"\n[ "$SLURMD_NODENAME" = n2 ] && exec sleep 1000\nexec "{sys.executable}" "$@"\n'
    )
    python.chmod(0o755)
    os.environ["PIVOTRL_AMBIENT"] = os.environ["SBATCH_COMMENT"] = os.environ["NCCL_DEBUG"] = "ambient"
    try:
        file = cluster.variant(
            "hung", f"venv: {tmp_path / 'venv'}", "health: {startup_s: 20, timeout_s: 30, min_free_gib: 0.5, min_pair_gb_per_s: 0.01}"
        )
        job = cluster.launch(run, cluster=file, only=("sft", "profile"))["sft"]
    finally:
        for name in ("PIVOTRL_AMBIENT", "SBATCH_COMMENT", "NCCL_DEBUG"):
            del os.environ[name]
    cluster.wait_until("n2 is excluded", lambda: "ExcNodeList=n2" in cluster.slurm.run("scontrol", "show", "job", job.job_id))
    assert "bad node n2: it did not answer" in log_files(run, "sft")[0].read_text()
    environment = (tmp_path / "environment.n1").read_text()
    names = {line.partition("=")[0] for line in environment.splitlines()}
    allowed = {"PATH", "HOME", "USER", "LOGNAME", "PWD", "OLDPWD", "SHLVL", "_", "RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}
    allowed |= {
        "PYTHONPATH",
        "PYTHONUNBUFFERED",
        "PYTHONSAFEPATH",
        "GLOO_SOCKET_IFNAME",
        "OMP_NUM_THREADS",
        "HF_HUB_OFFLINE",
        "TOKENIZERS_PARALLELISM",
        "TMPDIR",
    }
    assert {name for name in names if not name.startswith(("SLURM", "SRUN_"))} - allowed == set()
    assert "ambient" not in environment

    assert len(cancel(run)) == 2
    cluster.wait_until("the queue is empty", lambda: not [one for one in run_status(run) if one.state in ("PENDING", "RUNNING", "COMPLETING")])
    assert cancel(run) == []
    assert not (run / "profile").exists()
