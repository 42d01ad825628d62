"""A recipe through the queue: stages as jobs in order, profiling as an array, training on two nodes with tensor parallelism across them."""

from __future__ import annotations

from conftest import Undisturbed

from pivotrl.launching.status import log_files, run_status
from pivotrl.rundir import read_json


def test_a_recipe_runs_through_the_queue(undisturbed: Undisturbed) -> None:
    run, cluster = undisturbed.run, undisturbed.cluster
    cluster.wait_until("every stage is a job", lambda: (run / "launch" / "jobs.json").exists() and len(run_status(run)) == 7)
    cluster.wait_for_state(run, "report", "COMPLETED", "GONE", "FAILED", "CANCELLED")
    jobs = {job.stage: job for job in run_status(run)}
    assert list(jobs) == ["ingest", "sft", "profile", "select", "train", "eval", "report"]
    assert {stage: job.state for stage, job in jobs.items() if job.state != "COMPLETED"} == {}
    assert all((run / stage / "_SUCCESS").exists() for stage in jobs)

    submitted = read_json(run / "launch" / "jobs.json")["submissions"]
    assert [row["depends_on"] for row in submitted] == [None, *(row["job_id"] for row in submitted[:-1])]
    # One log per member of the array; a process's log per node.
    assert [path.name for path in log_files(run, "profile")] == [f"profile.{jobs['profile'].job_id}_{shard}.out" for shard in (0, 1)]
    assert len(list((run / "launch" / "attempts").glob("train.*/train.?.log"))) == 2
    assert "all nodes are healthy: n1 n2" in log_files(run, "train")[0].read_text()
