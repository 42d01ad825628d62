"""What `pivotrl launch` and the doctor refuse because a job would not find it on its node: unmounted paths, unset variables."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from pivotrl.config.launch import ClusterFile
from pivotrl.config.load import load_recipe, load_section
from pivotrl.doctor.examine import Request, examine
from pivotrl.launching.missing import missing_mounts, missing_variables

ROOT = Path(__file__).resolve().parents[2]
RECIPE = ROOT / "recipes" / "qwen3_30b_a3b" / "terminal"
MODEL = ROOT / "configs" / "models" / "qwen3_30b_a3b.yaml"
EXAMPLE = ROOT / "launch" / "clusters" / "example.yaml"
GIVEN = ("model.path=/shared/hf", "ingest.paths=[/shared/data]")


def _cluster(tmp_path: Path, *mounts: str, environment: str = "{}") -> Path:
    path = tmp_path / "cluster.yaml"
    image = "container: {image: /i.sqsh, mounts: [" + ", ".join(mounts) + "]}"
    path.write_text(f"name: c\nhardware: configs/clusters/h100_80gb.yaml\n{image}\nenvironment: {environment}\n")
    return path


def _missing(file: Path, run: str, *words: str) -> list[str]:
    return [error.problem for error in missing_mounts(load_recipe(RECIPE, (*GIVEN, *words)), load_section(ClusterFile, file=file), Path(run))]


@pytest.mark.parametrize(
    ("mounts", "run", "words", "named"),
    [
        (("/shared:/shared", "/tmp:/tmp", "CWD:CWD"), "/shared/run", (), []),
        # The directory that the launch is called in, below $HOME say, is where every program starts.
        (("/shared:/shared", "/tmp:/tmp"), "/shared/run", (), ["the working directory is CWD, and no mount"]),
        (("/shared:/shared", "/tmp:/tmp", "CWD:CWD"), "/home/me/run", (), ["--run is /home/me/run, and no mount"]),
        (("/shared:/shared", "CWD:CWD"), "/shared/run", (), ["health.scratch_dir is /tmp"]),
        (("/shared:/shared", "/tmp:/tmp", "CWD:CWD"), "/shared/run", ("model.path=/models/sft",), ["model.path is /models/sft"]),
        (
            ("/shared:/shared", "/tmp:/tmp", "CWD:CWD"),
            "/shared/run",
            ("ingest.paths=[/shared/a, /data/b]", "ingest.tools=/data/tools.json"),
            ["ingest.paths.1 is /data/b", "ingest.tools is /data/tools.json"],
        ),
        # Under another name, hidden by an inner mount, and read-only where the run is written.
        (("/lustre/x:/shared", "/tmp:/tmp", "CWD:CWD"), "/shared/run", (), ["the container shows /lustre/x/run there"] * 3),
        (("/shared:/shared", "/empty:/shared/data", "/tmp:/tmp", "CWD:CWD"), "/shared/run", (), ["the container shows /empty there"]),
        (("/shared:/shared:ro", "/tmp:/tmp", "CWD:CWD"), "/shared/run", (), ["--run is /shared/run, and its mount is read-only"]),
        # A longer name is no path below a shorter one.
        (("/shared:/shared", "/tmp:/tmp", "CWD:CWD"), "/shared2/run", (), ["--run is /shared2/run"]),
    ],
)
def test_each_path_that_the_container_does_not_show_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mounts: tuple[str, ...], run: str, words: tuple[str, ...], named: list[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    # tmp_path is below /tmp, so the working directory has its own mount or none: it is moved out by name.
    cwd = Path("/home/me/checkout")
    monkeypatch.setattr(Path, "cwd", classmethod(lambda _: cwd))
    found = _missing(_cluster(tmp_path, *(mount.replace("CWD", str(cwd)) for mount in mounts)), run, *words)
    assert len(found) == len(named), found
    for problem, says in zip(found, named, strict=True):
        assert says.replace("CWD", str(cwd)).replace("/run there", "") in problem


def test_what_a_link_points_to_must_be_mounted_too(tmp_path: Path) -> None:
    (tmp_path / "inside").mkdir()
    (tmp_path / "outside").mkdir()
    (tmp_path / "inside" / "data").symlink_to(tmp_path / "outside")
    file = _cluster(tmp_path, "/shared:/shared", f"{tmp_path}/inside:{tmp_path}/inside")
    found = _missing(file, "/shared/run", f"ingest.paths=[{tmp_path}/inside/data]")
    assert [problem for problem in found if problem.startswith("ingest.paths")] == [
        f"ingest.paths.0 is {tmp_path}/outside, and no mount of container.mounts shows it"
    ]


def test_without_a_container_every_path_is_there(tmp_path: Path) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text("name: c\nvenv: /v\n")
    assert _missing(path, "/anywhere/run") == []


@pytest.mark.parametrize("environment", ["{}", "{PIVOTRL_JUDGE_ENDPOINT: ''}"])
def test_a_variable_of_the_shell_alone_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, environment: str) -> None:
    monkeypatch.setenv("PIVOTRL_JUDGE_ENDPOINT", "http://127.0.0.1:1/v1")
    cluster = load_section(ClusterFile, file=_cluster(tmp_path, environment=environment))
    (error,) = missing_variables(load_recipe(RECIPE, GIVEN), cluster.environment)
    assert "verifier.stages.1.verifier.endpoint names the environment variable PIVOTRL_JUDGE_ENDPOINT" in error.problem
    assert missing_variables(load_recipe(RECIPE, GIVEN), {"PIVOTRL_JUDGE_ENDPOINT": "http://j"}) == []
    assert missing_variables(load_recipe(ROOT / "recipes" / "qwen3_30b_a3b" / "tau2", GIVEN), {}) == []


def test_a_launch_is_refused_and_a_dry_run_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cli: Callable[..., tuple[int, str, str]]) -> None:
    monkeypatch.chdir(ROOT)
    words = ("launch", RECIPE, "--cluster", _cluster(tmp_path, "/shared:/shared"), "--run", tmp_path / "run")
    for more in ((), ("--export-nemo-run", tmp_path / "out.py")):
        code, _, error = cli(*words, *more, *GIVEN)
        assert (code, "--run is" in error) == (2, True)
        assert not (tmp_path / "run").exists()
    code, printed, error = cli(*words, "--dry-run", *GIVEN)
    assert code == 0, error
    assert "a launch would be refused: the working directory is" in printed
    assert "a launch would be refused: verifier.stages.1.verifier.endpoint names" in printed


def test_the_doctor_names_both_and_asks_the_judge_of_the_cluster_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.delenv("PIVOTRL_JUDGE_ENDPOINT", raising=False)

    def found(*, static: bool, environment: str = "{}") -> dict[str, str]:
        file = _cluster(tmp_path, "/:/", environment=environment)
        findings = examine(
            Request(RECIPE, [*GIVEN, "model.path=/nowhere", "ingest.paths=[/nowhere]"], tmp_path / "run", file, MODEL, is_static=static)
        )
        return {one.check: one.what + one.where for one in findings.found}

    assert "PIVOTRL_JUDGE_ENDPOINT" in found(static=True)["environment"]
    # In the cluster file alone, where its jobs get it from; a server that is not there has the address all the same.
    seen = found(static=False, environment="{PIVOTRL_JUDGE_ENDPOINT: 'http://127.0.0.1:9/v1'}")
    assert "environment" not in seen
    assert "http://127.0.0.1:9/v1/models" in seen["judge"]
    # In the shell alone, where no job gets it from.
    monkeypatch.setenv("PIVOTRL_JUDGE_ENDPOINT", "http://127.0.0.1:9/v1")
    seen = found(static=False)
    assert "judge" not in seen
    assert "PIVOTRL_JUDGE_ENDPOINT" in seen["environment"]


def test_the_doctor_names_unmounted_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(Path, "cwd", classmethod(lambda _: Path("/home/me/checkout")))
    findings = examine(Request(RECIPE, list(GIVEN), Path("/shared/run"), EXAMPLE, MODEL, is_static=True))
    (finding,) = [one for one in findings.found if one.check == "mounts"]
    assert finding.what.startswith("the working directory is")


def test_the_doctor_knows_where_a_conversion_has_the_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Super in float32 is 450 GiB: 120.7e9 parameters of four bytes."""
    monkeypatch.chdir(ROOT)
    model = ROOT / "configs" / "models" / "nemotron3_super_120b.yaml"

    def findings_of(*lines: str) -> tuple[list[str], dict[str, str]]:
        file = tmp_path / "cluster.yaml"
        file.write_text("\n".join(["name: c", "venv: /v", *lines]) + "\n")
        recipe = ROOT / "recipes" / "nemotron3_super_120b" / "tau2"
        findings = examine(Request(recipe, list(GIVEN), tmp_path / "run", file, model, is_static=True))
        return [one.what for one in findings.found if one.check == "convert-memory"], findings.not_checked

    hardware = "hardware: configs/clusters/h100_80gb.yaml"
    assert findings_of(hardware) == ([], findings_of(hardware)[1])
    assert "memory of convert" not in findings_of(hardware)[1]
    (what,) = findings_of(hardware, "convert_on: cpu_node", "cpu_memory_gib: 256")[0]
    assert "450 GiB" in what
    assert findings_of(hardware, "convert_on: cpu_node", "cpu_memory_gib: 512")[0] == []
    assert findings_of(hardware, "convert_on: cpu_node")[1]["memory of convert"] == "the cluster file has no `cpu_memory_gib`"
