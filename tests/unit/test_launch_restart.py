"""What a job's shell does after a failure, a time limit or a bad node: the rendered scripts in bash, with a stand-in for SLURM's commands."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from pivotrl.config.load import load_recipe
from pivotrl.launching.render import load_target, render

ROOT = Path(__file__).resolve().parents[2]
RECIPE = ROOT / "tests" / "golden" / "tiny_recipe"
LOCAL = ROOT / "launch" / "clusters" / "local.yaml"
_JOB = """
scontrol() {{
  case "$*" in
    "show hostnames"*) printf '%s\\n' {hosts} ;;
    *"show node"*) echo "NodeName=n1 Arch=x NodeAddr=10.0.0.1 NodeHostName=n1" ;;
    *"show job"*) ;;
    *) echo "$*" >>{folder}/calls ;;
  esac
}}
srun() {{ :; }}
timeout() {{ while [ "$1" != srun ] && [ "$1" != scontrol ]; do shift; done; "$@"; }}
sleep() {{ :; }}
export SLURM_JOB_ID=3 SLURM_JOB_NODELIST=n SLURM_JOB_NUM_NODES=1 SLURM_RESTART_COUNT={start}
stage={stage} gpus=0 per_node=1 generation_nodes={generation_nodes} saves_when_asked=1
. {folder}/run/launch/job.sh
touch "$log"
{then}
"""


@pytest.fixture
def launched(tmp_path: Path) -> Path:
    """A folder with run/launch rendered for a cluster that excludes n9 and allows two failures."""
    file = tmp_path / "cluster.yaml"
    file.write_text(f"extends: {LOCAL}\nvenv: /shared/venv\nexclude: [n9]\nmax_failures: 2\n")
    _render(tmp_path)
    return tmp_path


def _render(folder: Path) -> None:
    render(load_recipe(RECIPE, ("launch.profile_shards=4",)), load_target(folder / "cluster.yaml"), folder / "run")


def _start(
    folder: Path, then: str, *, stage: str = "train", start: int = 0, hosts: str = "n1", before: str = "", generation_nodes: int = 0
) -> tuple[int, list[str]]:
    """One start of a job: its exit code and what it asked of SLURM."""
    (folder / "calls").unlink(missing_ok=True)
    source = before + _JOB.format(folder=folder, then=then, stage=stage, start=start, hosts=hosts, generation_nodes=generation_nodes)
    done = subprocess.run(["bash", "-c", source], capture_output=True, text=True, check=False, env={"PATH": "/usr/bin:/bin"}, timeout=100)
    assert done.stderr == "", done.stderr
    return done.returncode, (folder / "calls").read_text().splitlines() if (folder / "calls").exists() else []


@pytest.mark.parametrize("bad", ["", "bad=(n3)"])
def test_a_member_of_an_array_queues_itself_again_and_no_other(launched: Path, bad: str) -> None:
    """The SLURM_JOB_ID of one member is the number of the whole array."""
    member = "export SLURM_ARRAY_JOB_ID=3 SLURM_ARRAY_TASK_ID=1\n"
    code, asked = _start(launched, f"{bad}\nis_preempted\nstart_again 'a test'", stage="profile", before=member)
    assert code == 1
    assert asked == (["requeuehold 3_1", "update JobId=3_1 ExcNodeList=n3,n9", "release 3_1"] if bad else ["requeue 3_1"])


def test_a_bad_node_is_left_by_all_jobs_of_the_run_and_counted_once(launched: Path) -> None:
    """SLURM's update replaces the cluster file's list, and a job that was queued before knows nothing of the node."""
    launch = launched / "run" / "launch"
    assert _start(launched, "bad=(n3)\nfailed health 1") == (1, ["requeuehold 3", "update JobId=3 ExcNodeList=n3,n9", "release 3"])
    failures = launch / "attempts" / "train.3.failures"
    assert failures.read_text() == "1\n"
    # Another job meets the node, before its own check.
    code, asked = _start(launched, f"echo works >{launched}/worked", stage="eval", hosts="n2 n3")
    assert (code, asked) == (1, ["requeuehold 3", "update JobId=3 ExcNodeList=n3,n9", "release 3"])
    assert not (launched / "worked").exists()
    assert not (launch / "attempts" / "eval.3.failures").exists()
    # Where SLURM starts it there all the same, it does not go round for ever.
    assert _start(launched, "true", stage="eval", start=1, hosts="n2 n3") == (1, [])
    assert (launch / "attempts" / "eval.3.end").read_text() == "1\n"
    assert _start(launched, "true", stage="eval", start=2, hosts="n1 n2") == (0, [])
    # Jobs that are launched later are not put there.
    _render(launched)
    assert all("#SBATCH --exclude=n9,n3\n" in path.read_text() for path in launch.glob("*.sbatch"))


@pytest.mark.parametrize(
    ("stage", "made"),
    [
        ("train", "train/checkpoints/step_4"),
        ("train", "train/pivot_sets/2/profile/units/7.parquet"),
        ("profile", "profile/units/3.parquet"),
        ("ingest", "ingest/.parts/000001.json"),
        ("select", "profile/_SUCCESS"),
    ],
)
def test_a_time_limit_is_no_failure_where_something_new_is_kept(launched: Path, stage: str, made: str) -> None:
    path = launched / "run" / made
    then = f"mkdir -p {path.parent}; touch {path}\ntime_is_up=1\nfailed {stage} 75"
    for start in range(4):
        assert _start(launched, then, stage=stage, start=start) == (1, ["requeue 3"])
    assert not (launched / "run" / "launch" / "attempts" / f"{stage}.3.failures").exists()


def test_a_slot_too_short_for_a_checkpoint_is_a_failure_and_not_repeated_for_ever(launched: Path) -> None:
    old = launched / "run" / "train" / "checkpoints" / "step_4"
    old.mkdir(parents=True)
    # What a step leaves on its way is no progress.
    then = f"mkdir -p {old.parent}/.step_8.tmp/weights; touch {old.parent.parent}/metrics.jsonl\ntime_is_up=1\nfailed train 138"
    for start in range(2):
        assert _start(launched, then, start=start) == (1, ["requeue 3"])
    assert _start(launched, then, start=2) == (138, [])
    attempts = launched / "run" / "launch" / "attempts"
    assert ((attempts / "train.3.failures").read_text(), (attempts / "train.3.end").read_text()) == ("3\n", "138\n")


@pytest.mark.parametrize(
    ("verdicts", "excluded"),
    [
        ({"n1": "ok", "n2": "ok", "n3": "ok", "n4": "bad 1 GPUs are usable, 8 should be"}, ["n4"]),
        ({"n1": "ok", "n2": "ok", "n3": "ok"}, ["n4"]),
        ({"n1": "ok", "n2": "ok", "n3": "ok", "n4": "silent its processes came late"}, ["n4"]),
        ({"n1": "ok", "n2": "blames n1 it cannot be reached", "n3": "ok", "n4": "ok"}, ["n1"]),
        # A slow image or file system, not three bad nodes; what a node says of itself still counts.
        ({"n1": "ok"}, []),
        ({"n1": "ok", "n2": "silent late", "n3": "silent late", "n4": "silent late"}, []),
        ({"n1": "bad its disk is full"}, ["n1"]),
        ({}, []),
    ],
)
def test_silent_nodes_are_excluded_unless_most_are(launched: Path, verdicts: dict[str, str], excluded: list[str]) -> None:
    answers = "; ".join(f"echo {verdict!r} >$health/{node}.0" for node, verdict in verdicts.items())
    then = f". {launched}/run/launch/health.sh\nsrun() {{ {answers or ':'}; }}\ncheck_health"
    code, asked = _start(launched, then, hosts="n1 n2 n3 n4")
    assert code == 1
    expected = ["requeuehold 3", f"update JobId=3 ExcNodeList={','.join([*excluded, 'n9'])}", "release 3"] if excluded else ["requeue 3"]
    assert asked == expected
    # Most silent at every start is given up, too.
    assert (launched / "run" / "launch" / "attempts" / "train.3.failures").read_text() == "1\n"


def test_a_healthy_job_goes_on(launched: Path) -> None:
    then = f". {launched}/run/launch/health.sh\nsrun() {{ echo ok >$health/n1.0; echo ok >$health/n2.0; }}\ncheck_health; touch {launched}/worked"
    assert _start(launched, then, hosts="n1 n2") == (0, [])
    assert (launched / "worked").exists()


@pytest.mark.parametrize("code", [2, 3])
def test_a_lost_service_may_be_an_engine_of_the_job(launched: Path, code: int) -> None:
    then = f"echo '{code} 0 n1' >$attempt/train.first; touch $attempt/train.0.log\nfailed train {code}"
    checkpoint = launched / "run" / "train" / "checkpoints" / "step_4"
    made = f"mkdir -p {checkpoint}; touch {checkpoint}\n"
    assert _start(launched, made + then) == (code, [])
    assert _start(launched, made + then, generation_nodes=1, start=1) == ((1, ["requeue 3"]) if code == 3 else (2, []))
    # Engines that have never worked would not the next time.
    assert _start(launched, then, generation_nodes=1, start=2) == (code, [])


def test_a_failure_that_cannot_be_counted_is_the_last(launched: Path) -> None:
    """As on a full disk, where the file would stay as it was and the job start again for ever."""
    assert _start(launched, "mv() { return 1; }\nfailed health 1") == (1, [])


def test_a_signal_before_there_is_a_program_starts_none(launched: Path) -> None:
    then = f"kill -USR1 $$\nrun_step train 0 1 1 python\ntouch {launched}/ran"
    assert _start(launched, then) == (1, ["requeue 3"])
    early = "compgen() { kill -USR1 $$; }\n"
    assert _start(launched, f"run_step train 0 1 1 python\ntouch {launched}/ran", before=early, start=1) == (1, ["requeue 3"])
    assert not (launched / "ran").exists()


def test_a_controller_that_does_not_answer_is_asked_again(launched: Path) -> None:
    answers = """scontrol() {{
  echo "$*" >>{folder}/calls
  [ "$(grep -c requeue {folder}/calls)" -gt {silent} ]
}}
start_again 'a test'"""
    assert _start(launched, answers.format(folder=launched, silent=3)) == (1, ["requeue 3"] * 4)
    assert _start(launched, answers.format(folder=launched, silent=30)) == (1, ["requeue 3"] * 10)
    assert (launched / "run" / "launch" / "attempts" / "train.3.end").read_text() == "1\n"


def test_a_preemption_is_seen_where_the_controller_answers_late(launched: Path) -> None:
    """Else the job, which SIGTERM has asked to stop, would end for good."""
    answers = f"""scontrol() {{
  echo "$*" >>{launched}/calls
  case "$*" in *"show job"*) [ "$(grep -c 'show job' {launched}/calls)" = 3 ] && echo "JobId=3 PreemptTime=2026-12-01T03:56:41 Restarts=0" ;; esac
}}
failed train 75"""
    assert _start(launched, answers) == (1, [*["--oneliner show job 3"] * 3, "requeue 3"])


def test_the_end_that_a_requeue_brings_ends_the_script_at_once(launched: Path) -> None:
    """Were the signal ignored, the nodes would stay taken for KillWait; did it end the request, the job would be lost."""
    then = f"""sleep() {{ touch {launched}/slept; command sleep 60; }}
scontrol() {{ command kill -TERM $$ $BASHPID; command sleep 0.2; echo "$*" >>{launched}/calls; }}
start_again 'a test'"""
    assert _start(launched, then) == (1, ["requeue 3"])
    assert not (launched / "slept").exists()
