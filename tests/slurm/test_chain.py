"""A recipe through the queue: stages as jobs in order, profiling as an array, training on two nodes with tensor parallelism across them."""

from __future__ import annotations

from pathlib import Path

from conftest import LocalCluster

from pivotrl.launching.status import log_files, run_status
from pivotrl.rundir import read_json


def test_a_recipe_runs_through_the_queue(cluster: LocalCluster, undisturbed: Path) -> None:
    jobs = {job.stage: job for job in run_status(undisturbed)}
    assert list(jobs) == ["ingest", "sft", "profile", "select", "train", "eval", "report"]
    assert {stage: job.state for stage, job in jobs.items() if job.state != "COMPLETED"} == {}
    assert all((undisturbed / stage / "_SUCCESS").exists() for stage in jobs)

    submitted = read_json(undisturbed / "launch" / "jobs.json")["submissions"]
    assert [row["depends_on"] for row in submitted] == [None, *(row["job_id"] for row in submitted[:-1])]
    # One log per member of the array; a process's log per node.
    assert [path.name for path in log_files(undisturbed, "profile")] == [f"profile.{jobs['profile'].job_id}_{shard}.out" for shard in (0, 1)]
    assert len(list((undisturbed / "launch" / "attempts").glob("train.*/train.?.log"))) == 2
    assert "all nodes are healthy: n1 n2" in log_files(undisturbed, "train")[0].read_text()
