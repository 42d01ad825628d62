"""An exported program on the package nemo_run (`make nemo-run`): its batch scripts ask for what ours ask for, in the same order,
and start again as often.

The package lives in an environment of its own, .venv-nemo-run, since it brings over a hundred others. sbatch is a stand-in that numbers its
jobs from 101; the batch scripts run with stand-ins for srun and scontrol.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

from pivotrl.config.load import load_recipe
from pivotrl.launching.nemo_run import export
from pivotrl.launching.render import load_target, render

ROOT = Path(__file__).resolve().parents[2]
PYTHON = ROOT / ".venv-nemo-run" / "bin" / "python"
RECIPE = ROOT / "tests" / "golden" / "tiny_recipe"
WORDS = (
    *("launch.train_nodes=2", "launch.generation_nodes=1", "placement.type=remote", "placement.num_replicas=2"),
    *("launch.profile_shards=4", "launch.profile_shards_at_once=2", "launch.convert_to=megatron"),
)
_SBATCH = """#!/bin/bash
touch "{folder}/calls"
echo "$@" >>"{folder}/calls"
echo $((100 + $(wc -l <"{folder}/calls")))
"""
# Fails as a program would whose task.sh left a note.
_SRUN = """#!/bin/bash
case "$*" in *hostname*) echo 10.0.0.1; exit ;; esac
echo "srun $*" >>"{folder}/started"
echo "1 n1" >"$PIVOTRL_ATTEMPT/train.0.exit"
exit 1
"""
_SCONTROL = """#!/bin/bash
case "$*" in requeue*) touch "{folder}/requeued" ;; *hostnames*) echo n1 ;; *) echo "NodeName=n1 NodeAddr=10.0.0.1 x" ;; esac
"""

pytestmark = pytest.mark.skipif(not PYTHON.exists(), reason="nemo_run is not installed; `make nemo-run` installs it")


@dataclass(frozen=True)
class Submitted:
    """What the package gave to sbatch."""

    ours: dict[str, str]
    """Our scripts by job."""
    calls: list[list[str]]
    scripts: dict[str, Path]
    tasks: dict[str, str]
    """The files that its sruns run, by name."""
    folder: Path


def _submit(tmp_path: Path, cluster: str, *words: str) -> Submitted:
    folder = tmp_path / "bin"
    folder.mkdir()
    for name, text in (("sbatch", _SBATCH), ("srun", _SRUN), ("scontrol", _SCONTROL)):
        (folder / name).write_text(text.replace("{folder}", str(folder)))
        (folder / name).chmod(0o755)
    file = tmp_path / "cluster.yaml"
    file.write_text(cluster.replace("{path}", f"{folder}:/usr/bin:/bin"))
    loaded, target, program = load_recipe(RECIPE, words), load_target(file), tmp_path / "program.py"
    scripts = render(loaded, target, tmp_path / "run")
    export(scripts, loaded, target, tmp_path / "run", program)
    home = tmp_path / "home"
    environment = {"PATH": f"{folder}:{os.environ['PATH']}", "HOME": str(tmp_path), "NEMORUN_HOME": str(home)}
    done = subprocess.run([PYTHON, program], env=environment, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    calls = [shlex.split(line) for line in (folder / "calls").read_text().splitlines()]
    (experiment,) = (home / "experiments" / "pivotrl-run").iterdir()
    return Submitted(
        {script.job.name: script.path.read_text() for script in scripts},
        calls,
        {path.name.removesuffix("_sbatch.sh"): path for path in experiment.glob("*_sbatch.sh")},
        {path.stem: path.read_text() for path in experiment.glob("*/scripts/*.sh")},
        folder,
    )


def _options(text: str) -> dict[str, str]:
    words = [word for line in re.findall(r"^#SBATCH (.*)$", text, re.MULTILINE) for word in shlex.split(line)]
    pairs = [word.removeprefix("--").partition("=") for word in words]
    return {name: value for name, _, value in pairs if name not in ("job-name", "output", "signal", "requeue", "kill-on-invalid-dep")}


@pytest.mark.timeout(300)
def test_its_batch_scripts_ask_for_what_ours_ask_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    found = _submit(tmp_path, f"extends: {ROOT}/launch/clusters/example.yaml\npath: {{path}}\nexclude: [n3, n4]\nreservation: lab\n", *WORDS)
    names = list(found.ours)
    assert sorted(found.scripts) == sorted(names)
    # In order, each waiting for the number that the one before was given.
    assert [Path(call[-1]).name for call in found.calls] == [f"{name}_sbatch.sh" for name in names]
    waits = [[word for word in call if word.startswith("--dependency")] for call in found.calls]
    assert waits == [[], *([f"--dependency=afterok:{100 + number}"] for number in range(1, len(names)))]
    for name, ours in found.ours.items():
        theirs = found.scripts[name].read_text()
        assert _options(theirs) == _options(ours)
        assert "#SBATCH --kill-on-invalid-dep=yes\n" in theirs
        assert "#SBATCH --signal=TERM@900\n" in theirs
        subprocess.run(["bash", "-n", found.scripts[name]], check=True)
    assert found.tasks.keys() == {*names, "train-0", "train-1"} - {"train"}
    for file, (name, step) in {name: (name, name) for name in names if name != "train"}.items() | {
        ("train-0", ("train", "train")),
        ("train-1", ("train", "engine")),
    }:
        ((_, words),) = re.findall(rf'^(run_step|start) {step} \d+ \d+ \d+ "\$python" (-m .*)$', found.ours[name], re.MULTILINE)
        last = found.tasks[file].splitlines()[-1]
        assert last == (
            f'exec bash {tmp_path}/run/launch/task.sh "$PIVOTRL_ATTEMPT/{step}" "$MASTER_ADDR" "$MASTER_PORT" python3 '
            + words.replace('"$master"', '"$MASTER_ADDR"')
        )
    starts = re.findall(r"^srun --output \S+ (.*) bash /nemo_run/scripts/(\S+)\.sh", found.scripts["train"].read_text(), re.MULTILINE)
    containers = [dict(re.findall(r"--(container-image|container-env) (\S+)", options)) for options, _ in starts]
    assert containers[0] == containers[1]
    assert f'"--container-image={containers[0]["container-image"]}"' in (tmp_path / "run" / "launch" / "job.sh").read_text()
    assert f'"--container-env={containers[0]["container-env"]}"' in (tmp_path / "run" / "launch" / "job.sh").read_text()
    places = [(file, *re.findall(r"--(?:relative|nodes|ntasks|ntasks-per-node)=(\d+)", options)) for options, file in starts]
    assert places == [("train-0", "0", "2", "16", "8"), ("train-1", "2", "1", "2", "2")]


@pytest.mark.timeout(300)
def test_its_batch_script_starts_again_until_the_failures_are_used_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a cluster without account and container; the time limit's stops in between do not count."""
    monkeypatch.chdir(ROOT)
    found = _submit(tmp_path, f"extends: {ROOT}/launch/clusters/local.yaml\nvenv: /v\npath: {{path}}\nmax_failures: 2\nhealth: null\n")
    attempts = tmp_path / "run" / "launch" / "attempts"
    requeued: list[bool] = []
    for restarts in range(5):
        (found.folder / "requeued").unlink(missing_ok=True)
        environment = {"PATH": "/usr/bin:/bin", "SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n1", "SLURM_RESTART_COUNT": str(restarts)}
        done = subprocess.run(["bash", found.scripts["train"]], env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 1, done.stderr
        requeued.append((found.folder / "requeued").exists())
        if restarts in (1, 2):
            # As task.sh leaves it where SLURM asked: no note of an end.
            (attempts / f"nemo.train.7.{restarts}" / "train.0.exit").rename(attempts / f"nemo.train.7.{restarts}" / "train.0.asked")
    # Failures at starts 0, 3 and 4, of which two are forgiven.
    assert requeued == [True, True, True, True, False]
    started = (found.folder / "started").read_text().splitlines()
    assert len(started) == 5
    assert all("bash" in line and "--export=ALL" in line for line in started)
