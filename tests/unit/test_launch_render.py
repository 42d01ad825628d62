"""Rendered scripts: valid shell, short, chained in the recipe's order, and free of whatever the submitting shell holds."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from pivotrl.config.launch import ClusterFile
from pivotrl.config.load import load_recipe, load_section
from pivotrl.errors import UserError
from pivotrl.launching.estimate import hours, slots
from pivotrl.launching.jobs import recipe_jobs
from pivotrl.launching.render import Script, load_target, render
from pivotrl.rundir import source_commit

ROOT = Path(__file__).resolve().parents[2]
RECIPE = ROOT / "tests" / "golden" / "tiny_recipe"
EXAMPLE = ROOT / "launch" / "clusters" / "example.yaml"
LOCAL = ROOT / "launch" / "clusters" / "local.yaml"
MAX_LINES = 150
WORDS = (
    "launch.train_nodes=2",
    "launch.generation_nodes=1",
    "placement.type=remote",
    "placement.num_replicas=2",
    "launch.profile_shards=4",
    "launch.profile_shards_at_once=2",
    "launch.convert_to=megatron",
)


@pytest.fixture
def local(tmp_path: Path) -> Path:
    """A cluster without GPUs and with a virtual environment, as start.sh writes it."""
    path = tmp_path / "cluster.yaml"
    path.write_text(f"extends: {LOCAL}\nvenv: /shared/venv\nslurm_conf: /shared/slurm.conf\n")
    return path


def _scripts(cluster: Path, run: Path, *words: str) -> list[Script]:
    return render(load_recipe(RECIPE, words), load_target(cluster), run)


@pytest.mark.parametrize("words", [(), WORDS])
@pytest.mark.parametrize("is_gpu", [True, False])
def test_scripts_are_short_and_valid_shell(
    tmp_path: Path, local: Path, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], is_gpu: bool
) -> None:
    monkeypatch.chdir(ROOT)
    _scripts(EXAMPLE if is_gpu else local, tmp_path / "run", *words)
    files = sorted([*(tmp_path / "run" / "launch").glob("*.sbatch"), *(tmp_path / "run" / "launch").glob("*.sh")])
    assert len(files) >= 10
    for path in files:
        assert path.read_text().count("\n") <= MAX_LINES, path.name
        assert not re.search(r"\{\{|\{%|\}\}", path.read_text())
        subprocess.run(["bash", "-n", str(path)], check=True)
    if shutil.which("shellcheck") is not None:
        checked = subprocess.run(["shellcheck", "--external-sources", *map(str, files)], capture_output=True, text=True, check=False)
        assert checked.returncode == 0, checked.stdout


def test_jobs_follow_the_recipe(tmp_path: Path, local: Path) -> None:
    names = ["ingest", "sft", "profile", "select", "train", "convert", "eval", "report"]
    assert [script.job.name for script in _scripts(local, tmp_path / "run", *WORDS)] == names
    assert [script.job.name for script in _scripts(local, tmp_path / "run")] == [name for name in names if name != "convert"]


def test_a_finished_stage_is_not_launched_again(tmp_path: Path, local: Path) -> None:
    run = tmp_path / "run"
    (run / "ingest").mkdir(parents=True)
    (run / "ingest" / "_SUCCESS").touch()
    assert [script.job.name for script in _scripts(local, run)][:2] == ["sft", "profile"]


def test_a_finished_conversion_is_not_launched_again(tmp_path: Path, local: Path) -> None:
    """`pivotrl convert` would refuse, and a failed evaluation could never be repeated by the same command."""
    run = tmp_path / "run"
    for stage in ("ingest", "sft", "profile", "select", "train"):
        (run / stage).mkdir(parents=True)
        (run / stage / "_SUCCESS").touch()
    assert [script.job.name for script in _scripts(local, run, *WORDS)] == ["convert", "eval", "report"]
    (run / "convert").mkdir()
    assert [script.job.name for script in _scripts(local, run, *WORDS)] == ["eval", "report"]
    (run / "train" / "_SUCCESS").unlink()
    with pytest.raises(UserError, match="convert exists and train is not finished"):
        _scripts(local, run, *WORDS)


@pytest.mark.parametrize("is_made", [False, True])
def test_a_conversion_that_an_earlier_start_has_made_is_left(tmp_path: Path, local: Path, is_made: bool) -> None:
    run = tmp_path / "run"
    script = next(one for one in _scripts(local, run, *WORDS) if one.job.name == "convert")
    if is_made:
        (run / "convert").mkdir()
    body = script.path.read_text().partition("/job.sh\n")[2]
    done = subprocess.run(
        ["bash", "-c", 'run_step() { echo "$1"; }; finish() { echo finished; }\n' + body], capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["finished"] if is_made else ["convert", "finished"]


def test_train_script_asks_for_all_its_nodes_and_places_the_engine_after_the_trainer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    script = next(one for one in _scripts(EXAMPLE, tmp_path / "run", *WORDS) if one.job.name == "train")
    text = script.path.read_text()
    assert "#SBATCH --nodes=3\n" in text
    assert "#SBATCH --gpus-per-node=8\n" in text
    assert "#SBATCH --signal=B:USR1@900\n" in text
    assert "#SBATCH --export=NONE\n" in text
    assert re.search(r"^start engine 2 1 2 ", text, re.MULTILINE)
    assert re.search(r"^run_step train 0 2 8 ", text, re.MULTILINE)
    assert "export PIVOTRL_ENGINE_GPUS=4\n" in text
    assert re.search(r' engine \S+ --run \S+ --connect "\$master":29650$', text, re.MULTILINE)
    profile = (tmp_path / "run" / "launch" / "profile.sbatch").read_text()
    assert "placement.type=in_process" in profile
    assert "placement.type=in_process" not in text
    assert text.index("start engine") < text.index("run_step train")


@pytest.mark.parametrize(
    ("program", "code", "notes"),
    [
        # As a trainer: it saves and ends with 75 while another SIGTERM comes.
        ("trap 'kill -TERM $PPID; exit 75' TERM; kill -TERM $PPID; while :; do sleep 0.1; done", 75, {"train.0.asked": ""}),
        ("kill -TERM $PPID; exec sleep 60", 143, {"train.0.asked": ""}),
        ("exit 75", 75, {"train.0.exit": "75 n1\n"}),
        ("kill -KILL $$", 137, {"train.0.exit": "137 n1\n", "train.first": "137 0 n1\n"}),
        ("exit 0", 0, {}),
    ],
)
def test_a_process_leaves_its_code_and_notes_a_failure_but_no_end_that_slurm_asked_for(
    tmp_path: Path, local: Path, program: str, code: int, notes: dict[str, str]
) -> None:
    _scripts(local, tmp_path / "run")
    prefix = tmp_path / "attempt" / "train"
    prefix.parent.mkdir()
    words = ["bash", tmp_path / "run" / "launch" / "task.sh", prefix, "localhost", "1", "bash", "-c", program]
    environment = {"PATH": "/usr/bin:/bin", "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NTASKS": "1", "SLURMD_NODENAME": "n1"}
    assert subprocess.run(words, env=environment, capture_output=True, check=False, timeout=60).returncode == code
    assert {path.name: path.read_text() for path in prefix.parent.iterdir()} == notes


def test_cpu_jobs_ask_for_no_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    for script in _scripts(EXAMPLE, tmp_path / "run", *WORDS):
        text = script.path.read_text()
        is_cpu = script.job.name in ("ingest", "report")
        assert ("--gpus-per-node" not in text) == is_cpu
        assert f"--partition={'cpu' if is_cpu else 'batch'}\n" in text


def test_preemptible_queues_are_named_by_partition_and_qos(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    cluster = tmp_path / "cluster.yaml"
    cluster.write_text(f"extends: {EXAMPLE}\npartition: preempt,batch\nqos: scavenger\ncpu_qos: normal\n")
    for script in _scripts(cluster, tmp_path / "run", *WORDS):
        partition, qos = ("cpu", "normal") if script.job.name in ("ingest", "report") else ("preempt,batch", "scavenger")
        text = script.path.read_text()
        assert f"#SBATCH --partition={partition}\n" in text
        assert f"#SBATCH --qos={qos}\n" in text
        assert "#SBATCH --account=post_training\n" in text
        assert "#SBATCH --requeue\n" in text


@pytest.mark.parametrize(
    ("lines", "gpu", "cpu"),
    [
        ((), ("r1", "--constraint=h100"), ("r1", "--constraint=h100")),
        # Nodes of another partition are not in the reservation, and have no H100.
        (("cpu_partition: cpu",), ("r1", "--constraint=h100"), (None, None)),
        (("cpu_partition: cpu", "cpu_reservation: r2", "cpu_sbatch_options: [--mem=9G]"), ("r1", "--constraint=h100"), ("r2", "--mem=9G")),
        (("cpu_reservation: r2", "cpu_sbatch_options: []"), ("r1", "--constraint=h100"), ("r2", None)),
    ],
)
def test_options_for_gpu_nodes_do_not_keep_the_other_jobs_waiting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lines: tuple[str, ...], gpu: tuple[str | None, str | None], cpu: tuple[str | None, str | None]
) -> None:
    monkeypatch.chdir(ROOT)
    cluster = tmp_path / "cluster.yaml"
    common = ("name: c", "venv: /v", "hardware: configs/clusters/h100_80gb.yaml", "reservation: r1", "sbatch_options: [--constraint=h100]")
    cluster.write_text("\n".join([*common, *lines]) + "\n")
    for script in _scripts(cluster, tmp_path / "run", *WORDS):
        reservation, option = cpu if script.job.name in ("ingest", "report") else gpu
        options = re.findall(r"^#SBATCH (.*)$", script.path.read_text(), re.MULTILINE)
        assert [one for one in options if one.startswith("--reservation")] == ([f"--reservation={reservation}"] if reservation else [])
        assert [one for one in options if one.startswith(("--constraint", "--mem"))] == ([option] if option else [])


@pytest.mark.parametrize("where", ["gpu_node", "cpu_node"])
def test_a_conversion_has_the_memory_of_a_gpu_node_and_none_of_its_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    """On one GPU the whole model would not fit."""
    monkeypatch.chdir(ROOT)
    cluster = tmp_path / "cluster.yaml"
    cluster.write_text(f"extends: {EXAMPLE}\nconvert_on: {where}\n")
    texts = {script.job.name: script.path.read_text() for script in _scripts(cluster, tmp_path / "run", *WORDS)}
    is_gpu = where == "gpu_node"
    assert ("#SBATCH --partition=batch\n" in texts["convert"]) == ("#SBATCH --gpus-per-node=8\n" in texts["convert"]) == is_gpu
    assert [name for name, text in texts.items() if "PIVOTRL_HIDE_GPUS" in text] == (["convert"] if is_gpu else [])
    task = ["bash", tmp_path / "run" / "launch" / "task.sh", tmp_path / "convert", "localhost", "1", "printenv", "CUDA_VISIBLE_DEVICES"]
    variables = {"PATH": "/usr/bin:/bin", "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NTASKS": "1", "SLURMD_NODENAME": "n1"}
    for hides, seen in (({"PIVOTRL_HIDE_GPUS": "1"}, "\n"), ({}, "0,1\n")):
        done = subprocess.run(task, env={**variables, "CUDA_VISIBLE_DEVICES": "0,1", **hides}, capture_output=True, text=True, check=True)
        assert done.stdout == seen


def test_select_asks_for_a_gpu_only_where_it_joins_shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    for shards, is_gpu in (("1", False), ("2", True)):
        (script,) = [one for one in _scripts(EXAMPLE, tmp_path / shards, f"launch.profile_shards={shards}") if one.job.name == "select"]
        assert ("--gpus-per-node" in script.path.read_text()) == is_gpu


def test_nothing_of_the_shell_is_written(tmp_path: Path, local: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = {script.path.name: script.path.read_text() for script in _scripts(local, tmp_path / "run")}
    for name in ("NCCL_DEBUG", "SBATCH_PARTITION", "SLURM_CONF", "PIVOTRL_SECRET", "PATH"):
        monkeypatch.setenv(name, f"ambient_{name}")
    scripts = _scripts(local, tmp_path / "run")
    assert {script.path.name: script.path.read_text() for script in scripts} == plain
    assert all("ambient" not in path.read_text() for path in (tmp_path / "run" / "launch").rglob("*.sh"))


def test_only_its_owner_reads_the_environment(tmp_path: Path, local: Path) -> None:
    """The key of a judge is there."""
    _scripts(local, tmp_path / "run")
    launch = tmp_path / "run" / "launch"
    assert (launch / "environment.sh").stat().st_mode & 0o777 == 0o600
    assert (launch / "job.sh").stat().st_mode & 0o044


def test_the_recipe_a_job_gets_is_the_one_that_was_checked(tmp_path: Path, local: Path) -> None:
    words = ("train.num_steps=4", "select.rule=eq5", "select.lambda_diff=0.6")
    _scripts(local, tmp_path / "run", *words)
    checked, copied = load_recipe(RECIPE, words), load_recipe(tmp_path / "run" / "launch" / "recipe")
    assert copied.recipe.render.chat_template == "{recipe}/files/chat_template.jinja"
    assert checked.recipe.render.chat_template is not None
    template = copied.expand(copied.recipe.render.chat_template, tmp_path)
    assert template.read_bytes() == checked.expand(checked.recipe.render.chat_template, tmp_path).read_bytes()
    other = copied.recipe.model_copy(update={"render": checked.recipe.render})
    assert other == checked.recipe


def test_code_is_kept_by_content(tmp_path: Path, local: Path) -> None:
    _scripts(local, tmp_path / "run")
    _scripts(local, tmp_path / "run")
    (code,) = (tmp_path / "run" / "launch" / "code").iterdir()
    assert (code / "pivotrl" / "cli.py").read_bytes() == (ROOT / "pivotrl" / "cli.py").read_bytes()
    assert (code / "pivotrl.commit").read_text().strip() == source_commit()
    assert f"PYTHONPATH={code} " in (tmp_path / "run" / "launch" / "task.sh").read_text()


def test_code_is_compiled_so_that_jobs_need_not(tmp_path: Path, local: Path) -> None:
    _scripts(local, tmp_path / "run")
    (code,) = (tmp_path / "run" / "launch" / "code").iterdir()
    environment = {**os.environ, "PYTHONPATH": str(code), "PYTHONSAFEPATH": "1"}
    program = [sys.executable, "-v", "-c", "import pivotrl.errors; print(pivotrl.errors.fail.__code__.co_filename)"]
    words = subprocess.run(program, env=environment, capture_output=True, text=True, check=True, cwd=tmp_path)
    assert words.stdout.strip() == str(code / "pivotrl" / "errors.py")
    assert re.search(rf"code object from '{code}/pivotrl/__pycache__/errors\.[^/]*\.pyc'", words.stderr)


def test_gpu_hours_by_hand() -> None:
    target = load_section(ClusterFile, file=EXAMPLE)
    rows = {row.name: row for row in slots(recipe_jobs(load_recipe(RECIPE, WORDS).recipe, 8), target, 8)}
    # Two trainer nodes and one that generates, eight GPUs each, four hours; four shards of one node for four hours; ingest has no GPU.
    assert (rows["train"].gpu_hours, rows["profile"].gpu_hours, rows["ingest"].gpu_hours) == (96.0, 128.0, 0.0)
    assert [hours(text) for text in ("00:30:00", "2-00:00:00", "1:00:36")] == [0.5, 48.0, 1.01]


@pytest.mark.parametrize(
    ("line", "named"),
    [
        ("venv: relative/venv", "absolute"),
        ("venv: null", "exactly one of container and venv"),
        ("environment: {A: 'x\"; rm -rf y'}", "environment.A"),
        ("time: {trian: '01:00:00'}", "time.trian"),
        ("default_time: 4 hours", "default_time"),
        ("exclude: ['n1 n2']", "exclude.0"),
        ("time: {eval: '00:01:00'}", "time.eval is '00:01:00', which is 60 s, and stop_before_s is 60"),
        ("default_time: '00:00:30'", "default_time is '00:00:30'"),
        ("partition: 'batch, preempt'", "partition"),
    ],
)
def test_a_wrong_cluster_file_is_refused_by_key(local: Path, line: str, named: str) -> None:
    key = line.partition(":")[0]
    kept = "".join(f"{row}\n" for row in local.read_text().splitlines() if not row.startswith(f"{key}:"))
    local.write_text(kept + line + "\n")
    with pytest.raises(UserError, match=re.escape(named)):
        load_target(local)


@pytest.mark.parametrize(
    "words",
    [
        ("launch.generation_nodes=1",),
        ("placement.type=remote",),
        ("launch.generation_nodes=2", "placement.type=remote", "placement.num_replicas=3"),
    ],
)
def test_generation_nodes_and_placement_must_fit(tmp_path: Path, local: Path, words: tuple[str, ...]) -> None:
    with pytest.raises(UserError, match="placement"):
        _scripts(local, tmp_path / "run", *words)


def test_a_run_directory_that_scripts_cannot_hold_is_refused(tmp_path: Path, local: Path) -> None:
    with pytest.raises(UserError, match="plain paths"):
        _scripts(local, tmp_path / "a run")


@pytest.mark.parametrize("name", ["50%j", "a\rb", "a\u2028b", "a;b", "a[/b]"])
def test_characters_that_sbatch_or_a_reader_takes_for_more_are_refused(tmp_path: Path, local: Path, name: str) -> None:
    with pytest.raises(UserError, match="plain paths"):
        _scripts(local, tmp_path / name)
    assert not (tmp_path / name).exists()


def test_no_text_of_a_cluster_file_is_run_by_a_script(tmp_path: Path, local: Path) -> None:
    local.write_text(
        f"extends: {LOCAL}\nvenv: /v;touch<TRAP;#\npath: a;touch TRAP\nsrun_options: ['--x;touch<TRAP;(']\n".replace("TRAP", str(tmp_path / "trap"))
        + f"environment: {{A: '; touch {tmp_path}/trap;#'}}\nhealth: {{scratch_dir: '/tmp;touch<{tmp_path}/trap;#'}}\n"
    )
    _scripts(local, tmp_path / "run")
    launch = tmp_path / "run" / "launch"
    (tmp_path / "trap").unlink(missing_ok=True)
    assignments = [line for line in (launch / "job.sh").read_text().splitlines() if line.startswith(("python=", "srun_options=", "plain_srun"))]
    assert len(assignments) == 3
    # The check's command with everything it calls replaced by a program that prints its words.
    script = "\n".join([*assignments, f". {launch}/environment.sh", 'printf "%s\\n" "$python"'])
    printed = subprocess.run(["bash", "-c", script], capture_output=True, text=True, cwd=tmp_path, check=True).stdout
    assert printed == f"/v;touch<{tmp_path}/trap;#/bin/python\n"
    assert f'--scratch "/tmp;touch<{tmp_path}/trap;#"' in (launch / "health.sh").read_text()
    assert not (tmp_path / "trap").exists()


@pytest.mark.parametrize("listen", ["0.0.0.0:1;touch x", "$(id):1", "h:x", "0.0.0.0", "a b:1", ""])
def test_an_address_whose_port_is_no_number_is_no_address(listen: str) -> None:
    with pytest.raises(UserError, match="listen"):
        load_recipe(RECIPE, ("placement.type=remote", f"placement.listen='{listen}'"))


@pytest.mark.parametrize("words", [(*WORDS, "placement.listen=0.0.0.0:0"), (*WORDS, "render.chat_template={recipe}/nowhere")])
def test_a_refused_launch_has_written_nothing(tmp_path: Path, local: Path, words: tuple[str, ...]) -> None:
    with pytest.raises(UserError, match=r"listen|nowhere"):
        _scripts(local, tmp_path / "run", *words)
    assert not (tmp_path / "run").exists()


def test_gpu_option_is_text_with_one_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    cluster = tmp_path / "cluster.yaml"
    cluster.write_text(f"extends: {EXAMPLE}\ngpu_option: '--gres=gpu:{{gpus}} --comment={{x}}{{'\n")
    scripts = _scripts(cluster, tmp_path / "run")
    assert "#SBATCH --gres=gpu:8 --comment={x}{" in next(script for script in scripts if script.job.name == "train").path.read_text()


def test_a_dry_run_prints_gpu_hours_and_submits_nothing(
    cli: Callable[..., tuple[int, str, str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    code, printed, error = cli("launch", RECIPE, "--cluster", EXAMPLE, "--run", tmp_path / "run", "--dry-run", *WORDS)
    assert code == 0, error
    assert "GPU-hours" in printed
    assert "not estimated (model.type is scratch" in printed
    assert not (tmp_path / "run" / "launch" / "jobs.json").exists()
