"""Submission against stand-ins for SLURM's commands: what is recorded when, in which environment, and what an interruption leaves."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from pivotrl.config.load import load_recipe
from pivotrl.errors import UserError
from pivotrl.launching.render import Script, Target, load_target, render
from pivotrl.launching.slurm import Slurm, recorded
from pivotrl.launching.status import cancel, run_status
from pivotrl.launching.submit import refuse_queued, submit
from pivotrl.rundir import read_json
from pivotrl.verbs.launch import print_status

ROOT = Path(__file__).resolve().parents[2]
RECIPE = ROOT / "tests" / "golden" / "tiny_recipe"
# Numbers its jobs from 101; refuses what FAIL names; notes each call with the jobs recorded by then.
_SBATCH = """#!/bin/bash
calls={folder}/calls; touch $calls
case "$*" in *{refused}*) echo "sbatch: error: Invalid account" >&2; exit 1 ;; esac
number=$((101 + $(grep -c ^sbatch $calls 2>/dev/null)))
echo "sbatch $* recorded=$(grep -c '"job_id"' {run}/launch/jobs.json 2>/dev/null) environment=$(env | cut -d= -f1 | sort | paste -sd,)" >>$calls
echo "$number;somewhere"
"""
# The first three jobs, of which the second waits.
_SQUEUE = """#!/bin/bash
printf '%s|%s|%s|%s|%s|%s|%s\\n' 101 101 RUNNING None n1 0:10 0  102 102 PENDING Dependency "" 0:00 0  103 103 COMPLETED None n2 0:09 1
"""
_OTHER = """#!/bin/bash
echo "$(basename "$0") $* recorded=$(grep -c '"job_id"' {run}/launch/jobs.json)" >>{folder}/calls
"""


def _prepare(tmp_path: Path, refused: str = "nothing", words: tuple[str, ...] = ("launch.profile_shards=3",)) -> tuple[list[Script], Target, Path]:
    run, folder = tmp_path / "run", tmp_path / "bin"
    folder.mkdir()
    for name, text in (("sbatch", _SBATCH), ("squeue", _SQUEUE), ("scontrol", _OTHER), ("scancel", _OTHER)):
        path = folder / name
        path.write_text(text.replace("{folder}", str(folder)).replace("{run}", str(run)).replace("{refused}", refused))
        path.chmod(0o755)
    file = tmp_path / "cluster.yaml"
    file.write_text(
        f"extends: {ROOT / 'launch' / 'clusters' / 'local.yaml'}\nvenv: /shared/venv\npath: {folder}:/usr/bin:/bin\nslurm_conf: /s.conf\n"
    )
    target = load_target(file)
    return render(load_recipe(RECIPE, words), target, run), target, run


def test_jobs_wait_for_each_other_and_the_first_for_the_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SBATCH_PARTITION", "ambient")
    scripts, target, run = _prepare(tmp_path)
    submissions = submit(scripts, target, run)
    calls = (tmp_path / "bin" / "calls").read_text().splitlines()
    assert [one.job_id for one in submissions] == [str(number) for number in range(101, 108)]
    assert "--hold" in calls[0]
    assert all(f"--dependency=afterok:{100 + index}" in calls[index] and "--hold" not in calls[index] for index in range(1, 7))
    # Each call finds all before it recorded; the chain is let go when all are.
    assert [int(call.partition("recorded=")[2].partition(" ")[0] or 0) for call in calls] == [*range(7), 7]
    assert calls[-1].startswith("scontrol release 101 ")
    assert all("SBATCH" not in call for call in calls)
    assert recorded(run / "launch") == (Slurm("/s.conf", target.cluster.path), submissions)
    assert [one.num_shards for one in submissions if one.stage == "profile"] == [3]


def test_a_refused_job_cancels_those_before_it(tmp_path: Path) -> None:
    scripts, target, run = _prepare(tmp_path, refused="select.sbatch")
    with pytest.raises(UserError, match="Invalid account"):
        submit(scripts, target, run)
    calls = (tmp_path / "bin" / "calls").read_text().splitlines()
    assert calls[-1].startswith("scancel 101 102 103 ")
    assert not any(call.startswith("scontrol") for call in calls)
    assert [row["stage"] for row in read_json(run / "launch" / "jobs.json")["submissions"]] == ["ingest", "sft", "profile"]


def test_a_machine_without_slurm_is_named(tmp_path: Path) -> None:
    scripts, target, run = _prepare(tmp_path)
    (tmp_path / "bin" / "sbatch").unlink()
    with pytest.raises(UserError, match="sbatch was not found"):
        submit(scripts, target.__class__(target.cluster.model_copy(update={"path": str(tmp_path / "bin")}), None), run)


@pytest.mark.parametrize("text", ["", "{", "[]", '{"submissions": []}', '{"slurm_conf": null, "submissions": [{"stage": "x"}]}'])
@pytest.mark.parametrize("verb", ["status", "logs", "cancel"])
def test_a_damaged_record_is_the_users_error(cli: Callable[..., tuple[int, str, str]], tmp_path: Path, verb: str, text: str) -> None:
    (tmp_path / "launch").mkdir()
    (tmp_path / "launch" / "jobs.json").write_text(text)
    code, _, error = cli(verb, tmp_path)
    assert code == 2
    assert "jobs.json" in error
    assert error.count("\n") == 1


def test_slurm_is_found_where_the_cluster_file_says_also_after_the_launch(tmp_path: Path) -> None:
    """Its commands are in the cluster file's `path` alone."""
    scripts, target, run = _prepare(tmp_path)
    submit(scripts, target, run)
    assert [job.state for job in run_status(run)][:3] == ["RUNNING", "PENDING", "COMPLETED"]
    with pytest.raises(UserError, match="has 2 jobs in the queue"):
        refuse_queued(run)
    assert cancel(run) == ["101", "102"]
    assert (tmp_path / "bin" / "calls").read_text().splitlines()[-1].startswith("scancel 102 101 ")


def test_no_job_waits_for_the_conversion(tmp_path: Path) -> None:
    """A conversion that fails takes neither the scores nor the page along."""
    scripts, target, run = _prepare(tmp_path, words=("launch.convert_to=megatron",))
    numbers = {one.stage: one for one in submit(scripts, target, run)}
    assert {stage: numbers[stage].depends_on for stage in ("convert", "eval", "report")} == {
        "convert": numbers["train"].job_id,
        "eval": numbers["train"].job_id,
        "report": numbers["eval"].job_id,
    }


def test_all_jobs_that_wait_for_none_are_held_until_the_chain_is_recorded(tmp_path: Path) -> None:
    scripts, target, run = _prepare(tmp_path, words=("launch.convert_to=megatron",))
    submit([script for script in scripts if script.job.name in ("convert", "eval", "report")], target, run)
    calls = (tmp_path / "bin" / "calls").read_text().splitlines()
    assert ["--hold" in call for call in calls] == [True, True, False, False]
    assert calls[-1].startswith("scontrol release 101,102 recorded=3")


def test_a_dry_run_is_refused_where_jobs_may_wait(cli: Callable[..., tuple[int, str, str]], tmp_path: Path) -> None:
    """It would put another recipe under them."""
    scripts, target, run = _prepare(tmp_path)
    submit(scripts, target, run)
    recipe = (run / "launch" / "recipe" / "recipe.yaml").read_bytes()
    record = run / "launch" / "jobs.json"
    record.write_text(record.read_text().replace(target.cluster.path, str(tmp_path / "nowhere")))
    code, _, error = cli("launch", RECIPE, "--cluster", tmp_path / "cluster.yaml", "--run", run, "--dry-run", "seed=5")
    assert code == 2
    assert "squeue was not found" in error
    assert (run / "launch" / "recipe" / "recipe.yaml").read_bytes() == recipe


def test_what_jobs_say_is_printed_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Brackets of a chat template are no markup, and a metrics file may end in half a line while its stage writes it."""
    scripts, target, run = _prepare(tmp_path)
    submit(scripts, target, run)
    log = run / "launch" / "attempts" / "ingest.101.0" / "ingest.0.log"
    log.parent.mkdir(parents=True)
    log.write_text("says [/INST] :smile:\n")
    (run / "train").mkdir()
    (run / "train" / "metrics.jsonl").write_text('{"step": 0}\n{"st')
    monkeypatch.setattr(Slurm, "queue", lambda *_: [])
    print_status(run)
    printed = capsys.readouterr().out
    assert "[/INST] :smile:" in printed
    assert "step 1/" in printed
