"""The nemo-run program of a launched run, without the package: the same jobs, resources and programs as the scripts that `launch` would submit.

The scripts are the oracle: their `#SBATCH` lines and `run_step` calls are read as text. `make nemo-run` checks the program on the package.
"""

from __future__ import annotations

import re
import runpy
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import fakes.nemo_run
import pytest
from fakes.nemo_run import Added, Experiment

from pivotrl.config.load import load_recipe
from pivotrl.errors import UserError
from pivotrl.launching.nemo_run import export
from pivotrl.launching.render import load_target, render

ROOT = Path(__file__).resolve().parents[2]
RECIPE = ROOT / "tests" / "golden" / "tiny_recipe"
EXAMPLE = ROOT / "launch" / "clusters" / "example.yaml"
LOCAL = ROOT / "launch" / "clusters" / "local.yaml"
TWO_NODES = ("launch.train_nodes=2", "launch.convert_to=megatron")
ARRAY = ("launch.profile_shards=4", "launch.profile_shards_at_once=2")
GENERATION = ("launch.train_nodes=2", "launch.generation_nodes=1", "placement.type=remote", "placement.num_replicas=2")
# Written by nemo-run itself, and the signal, which goes to another place.
NOT_COMPARED = {"job-name", "output", "open-mode", "requeue", "signal"}


@pytest.fixture(autouse=True)
def _at_root(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cluster files name hardware files relative to the checkout."""
    monkeypatch.chdir(ROOT)


@pytest.fixture
def local(tmp_path: Path) -> Path:
    """A cluster without GPUs and with a virtual environment, as start.sh writes it."""
    path = tmp_path / "cluster.yaml"
    path.write_text(f"extends: {LOCAL}\nvenv: /shared/venv\nslurm_conf: /shared/slurm.conf\n")
    return path


def _program(cluster: Path, run: Path, out: Path, *words: str) -> dict[str, str]:
    """Writes scripts and program; the scripts' text by job."""
    loaded, target = load_recipe(RECIPE, words), load_target(cluster)
    scripts = render(loaded, target, run)
    export(scripts, loaded, target, run, out)
    return {script.job.name: script.path.read_text() for script in scripts}


def _execute(out: Path, monkeypatch: pytest.MonkeyPatch, *words: str) -> Experiment:
    compile(out.read_text(), str(out), "exec")
    monkeypatch.setitem(sys.modules, "nemo_run", fakes.nemo_run)
    monkeypatch.setattr(sys, "argv", [str(out), *words])
    runpy.run_path(str(out), run_name="__main__")
    return fakes.nemo_run.made


def _options_of_script(text: str) -> dict[str, str]:
    found: dict[str, str] = {}
    for line in re.findall(r"^#SBATCH (.*)$", text, re.MULTILINE):
        for word in shlex.split(line):
            name, _, value = word.removeprefix("--").partition("=")
            found[name] = value
    return {name: value for name, value in found.items() if name not in NOT_COMPARED}


def _options_of_task(task: Added) -> dict[str, str]:
    parameters = task.executors[0].parameters
    options = {**parameters, **parameters["additional_parameters"]}
    ours = {name.replace("_", "-"): "" if value is True else str(value) for name, value in options.items() if value is not None}
    others = "job-name-prefix packager env-vars srun-args setup-lines retries additional-parameters container-image container-mounts container-env"
    groups = "wait-time-for-group-job monitor-group-job-wait-time"
    dropped = {*others.split(), *groups.split(), *NOT_COMPARED, "kill-on-invalid-dep"}
    return {name: value for name, value in ours.items() if name not in dropped}


def _programs_of_script(text: str) -> list[tuple[str, str]]:
    """(name, words after `python -m`) of every step."""
    steps = re.findall(r'^(?:run_step|start) (\w+) \d+ \d+ \d+ "\$python" -m (.*)$', text, re.MULTILINE)
    return sorted((name, words.replace('"$master"', '"$MASTER_ADDR"')) for name, words in steps)


def _programs_of_task(task: Added, launch: Path, python: str) -> list[tuple[str, str]]:
    start = (
        rf'^(?:exec )?bash {re.escape(str(launch))}/task.sh "\$PIVOTRL_ATTEMPT/(\w+)" "\$MASTER_ADDR" "\$MASTER_PORT" {re.escape(python)} -m (.*)$'
    )
    return sorted(found for script in task.scripts for found in re.findall(start, script.inline, re.MULTILINE))


@pytest.mark.parametrize("is_gpu", [True, False])
@pytest.mark.parametrize("words", [(), TWO_NODES, ARRAY, GENERATION], ids=["one node", "two nodes", "array", "generation nodes"])
def test_the_program_has_the_jobs_of_the_scripts(
    tmp_path: Path, local: Path, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], is_gpu: bool
) -> None:
    run, out = tmp_path / "run", tmp_path / "program.py"
    scripts = _program(EXAMPLE if is_gpu else local, run, out, *words)
    experiment = _execute(out, monkeypatch)
    assert (experiment.title, experiment.ran) == ("pivotrl-run", ["run"])
    names = [task.name for task in experiment.added]
    assert names == list(scripts)
    awaited = [name for name in names if name != "convert"]
    assert [task.dependencies for task in experiment.added if task.name != "convert"] == [[], *([name] for name in awaited[:-1])]
    assert [task.dependencies for task in experiment.added if task.name == "convert"] == ([["train"]] if words == TWO_NODES else [])
    for task in experiment.added:
        text = scripts[task.name]
        assert _options_of_task(task) == _options_of_script(text)
        assert _programs_of_task(task, run / "launch", "python3" if is_gpu else "/shared/venv/bin/python") == _programs_of_script(text)
        assert all("\n" not in line and line != "exec " for script in task.scripts for line in script.inline.splitlines())
        (header,) = re.findall(r"^stage=.*$", text, re.MULTILINE)
        checks = int("health.sh" in text)
        expected = f"{header.partition(' saves_when_asked')[0]} checks={checks}\n. {run}/launch/nemo.sh"
        assert task.executors[0].parameters["setup_lines"] == expected
        assert task.executors[0].parameters["signal"] == f"TERM@{re.search(r'USR1@([0-9]+)', text)[1]}"  # type: ignore[index]
    assert _execute(out, monkeypatch, "--dryrun").ran == ["dryrun"]


def test_engines_run_on_the_nodes_after_the_trainers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "program.py"
    text = _program(EXAMPLE, tmp_path / "run", out, *GENERATION)["train"]
    (task,) = [task for task in _execute(out, monkeypatch).added if task.name == "train"]
    places = {name: tuple(map(int, place)) for name, *place in re.findall(r"^(?:run_step|start) (\w+) (\d+) (\d+) (\d+) ", text, re.MULTILINE)}
    for executor, name in zip(task.executors, ("train", "engine"), strict=True):
        first, nodes, per_node = places[name]
        expected = [f"--relative={first}", f"--nodes={nodes}", f"--ntasks={nodes * per_node}", f"--ntasks-per-node={per_node}"]
        assert executor.parameters["srun_args"][-4:] == expected
    assert "export PIVOTRL_ENGINE_GPUS=4\n" in text
    assert "export PIVOTRL_ENGINE_GPUS=4\n" in task.scripts[1].inline


def test_what_the_cluster_file_says_of_containers_and_environment_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "program.py"
    _program(EXAMPLE, tmp_path / "run", out)
    target = load_target(EXAMPLE).cluster
    for task in _execute(out, monkeypatch).added:
        parameters = task.executors[0].parameters
        assert target.container is not None
        assert (parameters["container_image"], tuple(parameters["container_mounts"])) == (target.container.image, target.container.mounts)
        assert parameters["container_env"] == list(target.environment)
        assert parameters["env_vars"] == {"PATH": target.path, **target.environment}
        assert parameters["srun_args"] == ["--export=ALL", *target.srun_options, "--no-container-mount-home"]
        assert parameters["retries"] == target.max_failures


def test_odd_text_reaches_its_place_and_no_shell(tmp_path: Path, local: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Values as a cluster file allows them, and a file name with a space, quotes and a line break."""
    trap = tmp_path / "trap"
    values = {"A_B": f"x; touch {trap} & y", "lower_case": "1 (2) #3", "EMPTY": ""}
    environment = "".join(f"  {name}: '{value}'\n" for name, value in values.items())
    local.write_text(
        f"extends: {LOCAL}\nvenv: /v;touch<{trap};#\nenvironment:\n{environment}sbatch_options: ['--comment=a;b&(c)', '--mem=0 --exclusive']\n"
    )
    out = tmp_path / "a \"program\" 'of\nmine'.py"
    _program(local, tmp_path / "run", out)
    task = _execute(out, monkeypatch).added[0]
    parameters = task.executors[0].parameters
    assert _options_of_task(task)["comment"] == "a;b&(c)"
    # As nemo-run writes them: in capitals and as they are; then the set-up.
    lines = [f"export {name.upper()}={value}" for name, value in parameters["env_vars"].items()]
    lines += [line for line in parameters["setup_lines"].splitlines() if line.startswith("export ")]
    program = task.scripts[0].inline.splitlines()[-1].replace("exec bash", "printf '%s\\n'")
    printed = subprocess.run(["bash", "-c", "\n".join([*lines, "env", program])], capture_output=True, text=True, check=True, cwd=tmp_path).stdout
    assert all(f"\n{name}={value}\n" in printed for name, value in values.items())
    assert f"\n/v;touch<{trap};#/bin/python\n" in printed
    assert not trap.exists()


@pytest.mark.parametrize(
    ("line", "named"),
    [("sbatch_options: ['-C h100']", "-C"), ("sbatch_options: ['--constraint h100']", "h100"), ("venv: /home/me/nemo_run/venv", "/nemo_run")],
)
def test_what_nemo_run_would_change_is_refused(tmp_path: Path, local: Path, line: str, named: str) -> None:
    key = line.partition(":")[0]
    local.write_text("".join(f"{row}\n" for row in local.read_text().splitlines() if not row.startswith(f"{key}:")) + line + "\n")
    with pytest.raises(UserError, match=re.escape(named)):
        _program(local, tmp_path / "run", tmp_path / "program.py")
    assert not (tmp_path / "program.py").exists()


def test_the_command_line_writes_the_program_and_submits_nothing(cli: Callable[..., tuple[int, str, str]], tmp_path: Path, local: Path) -> None:
    out = tmp_path / "program.py"
    code, printed, error = cli("launch", RECIPE, "--cluster", local, "--run", tmp_path / "run", "--export-nemo-run", out)
    assert code == 0, error
    assert str(out) in "".join(printed.split("\n"))
    assert "run.Experiment(" in out.read_text()
    assert not (tmp_path / "run" / "launch" / "jobs.json").exists()
    shell = tmp_path / "run" / "launch" / "nemo.sh"
    subprocess.run(["bash", "-n", str(shell)], check=True)
    if shutil.which("shellcheck") is not None:
        checked = subprocess.run(["shellcheck", "--external-sources", str(shell)], capture_output=True, text=True, check=False)
        assert checked.returncode == 0, checked.stdout


_SOURCE = """
scontrol() {{ if [ "$2" = hostnames ]; then printf '%s\\n' n7 n8; else echo "NodeName=$4 Arch=x NodeAddr=10.0.0.7 NodeHostName=n7"; fi; }}
export SLURM_JOB_ID=30012 SLURM_JOB_NODELIST=n[7-8] SLURM_RESTART_COUNT={restarts} TORCHX_MAX_RETRIES=3
stage=train gpus=0 per_node=1 checks=0
. {launch}/nemo.sh
echo "retries=$TORCHX_MAX_RETRIES attempt=$PIVOTRL_ATTEMPT address=$MASTER_ADDR:$MASTER_PORT"
"""


def _start(launch: Path, restarts: int) -> tuple[int, str]:
    """A start of the job up to where nemo-run starts its programs, with a stand-in for scontrol."""
    done = subprocess.run(["bash", "-c", _SOURCE.format(restarts=restarts, launch=launch)], capture_output=True, text=True, check=False)
    assert done.stderr == ""
    return done.returncode, done.stdout


def test_a_job_starts_again_as_often_as_it_may_fail(tmp_path: Path, local: Path) -> None:
    """nemo-run queues it again while TORCHX_MAX_RETRIES is above the number of restarts."""
    _program(local, tmp_path / "run", tmp_path / "program.py")
    launch = tmp_path / "run" / "launch"
    attempts = launch / "attempts"
    code, printed = _start(launch, 0)
    assert (code, printed) == (0, f"retries=3 attempt={attempts}/nemo.train.30012.0 address=10.0.0.7:20012\n")
    # Each start's traces, as task.sh leaves them, and the failures that may follow.
    for restarts, (name, text, left) in enumerate(
        [("train.0.asked", "", 3), ("train.1.exit", "137 n8\n", 2), ("train.0.asked", "", 2), (None, "", 1), ("train.0.exit", "1 n7\n", 0)], start=1
    ):
        if name is not None:
            (attempts / f"nemo.train.30012.{restarts - 1}" / name).write_text(text)
        code, printed = _start(launch, restarts)
        assert (code, printed.split()[0]) == (0, f"retries={restarts + left}")


@pytest.mark.parametrize("ended", [2, 3, 75])
def test_an_end_that_another_start_would_meet_again_is_the_last(tmp_path: Path, local: Path, ended: int) -> None:
    _program(local, tmp_path / "run", tmp_path / "program.py")
    launch = tmp_path / "run" / "launch"
    _start(launch, 0)
    (launch / "attempts" / "nemo.train.30012.0" / "train.0.exit").write_text(f"{ended} n7\n")
    code, printed = _start(launch, 1)
    assert code == ended
    assert printed.startswith(f"an earlier start ended with {ended}; see {launch}/attempts/nemo.train.30012.0/")
