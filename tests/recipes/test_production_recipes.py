"""The production recipes: each loads, passes the doctor's static part and a plan on every GPU its family lists, and gives sbatch scripts."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from pivotrl.config.load import DEFAULT, load_recipe
from pivotrl.config.schema import Recipe
from pivotrl.doctor.examine import Request, examine

ROOT = Path(__file__).resolve().parents[2]
FAMILIES = {"qwen3_30b_a3b": "qwen3_30b_a3b", "nemotron3_super_120b": "nemotron3_super_120b"}
DOMAINS = ("tau2", "swe", "terminal", "browsecomp")
CLUSTERS = ("h100_80gb", "h200", "b200")
EXAMPLE = ROOT / "launch" / "clusters" / "example.yaml"
# What the recipes leave to the user.
GIVEN = ("model.path=/checkpoint", "ingest.paths=[/trajectories]")
ROWS = ("model.path=/checkpoint", "environment.train_rows=[/train.jsonl]", "environment.test_rows=[/test.jsonl]")
RECIPES = [(family, domain) for family in FAMILIES for domain in DOMAINS]


def _words(family: str, cluster: str, domain: str) -> list[str]:
    return yaml.safe_load((ROOT / "recipes" / family / "clusters.yaml").read_text())[cluster][domain]


def _folder(family: str, domain: str) -> Path:
    return ROOT / "recipes" / family / domain


@pytest.mark.parametrize("cluster", CLUSTERS)
@pytest.mark.parametrize(("family", "domain"), RECIPES)
def test_the_doctor_finds_nothing_and_the_plan_fits(family: str, domain: str, cluster: str) -> None:
    model, hardware = ROOT / "configs" / "models" / f"{FAMILIES[family]}.yaml", ROOT / "configs" / "clusters" / f"{cluster}.yaml"
    findings = examine(Request(_folder(family, domain), [*GIVEN, *_words(family, cluster, domain)], None, hardware, model, is_static=True))
    assert findings.found == []
    row = re.search(rf"^\| {domain} \| {cluster} \|(.*)\|$", (ROOT / "recipes" / family / "README.md").read_text(), flags=re.MULTILINE)
    assert row, "the README has a row for every recipe and GPU"
    figures = findings.figures
    nodes, layout, step, hours = (cell.strip() for cell in row[1].split("|"))
    assert eval_sum(nodes) == figures["nodes"]
    assert layout == figures["layout"]
    assert (int(step), int(hours.replace(",", ""))) == (round(figures["step_s"]), figures["train_gpu_hours"])


def eval_sum(text: str) -> int:
    """`4 + 2` to 6."""
    return sum(map(int, text.split("+")))


@pytest.mark.parametrize(("family", "domain"), RECIPES)
def test_the_sft_baseline_is_the_same_but_for_its_stage(family: str, domain: str) -> None:
    pivotrl, sft = (load_recipe(folder, GIVEN).recipe for folder in (_folder(family, domain), _folder(family, domain) / "sft"))
    assert sft.sft is not None
    assert sft.sft.use_ingested
    assert pivotrl.sft is None
    assert sft.stages == ("ingest", "sft", "eval", "report"), "no RL in a baseline"
    same = {"name": pivotrl.name, "sft": None, "eval": sft.eval.model_copy(update={"of": "train"})}
    assert sft.model_copy(update=same) == pivotrl
    model = ROOT / "configs" / "models" / f"{FAMILIES[family]}.yaml"
    assert examine(Request(_folder(family, domain) / "sft", list(GIVEN), None, None, model, is_static=True)).found == []


@pytest.mark.parametrize("cluster", CLUSTERS)
@pytest.mark.parametrize(("family", "domain"), RECIPES)
def test_a_dry_run_writes_the_scripts_of_every_gpu(
    family: str, domain: str, cluster: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cli: Callable[..., tuple[int, str, str]]
) -> None:
    monkeypatch.chdir(ROOT)
    file, words, model = tmp_path / "cluster.yaml", _words(family, cluster, domain), ROOT / "configs" / "models" / f"{FAMILIES[family]}.yaml"
    file.write_text(f"extends: {EXAMPLE}\nhardware: configs/clusters/{cluster}.yaml\n")
    run = tmp_path / "run"
    code, printed, error = cli("launch", _folder(family, domain), "--cluster", file, "--run", run, "--dry-run", "--model", model, *GIVEN, *words)
    assert code == 0, error
    assert "train by the planner:" in printed
    assert "does NOT fit" not in printed
    recipe = load_recipe(_folder(family, domain), [*GIVEN, *words]).recipe
    train = (run / "launch" / "train.sbatch").read_text()
    assert f"#SBATCH --nodes={recipe.launch.train_nodes + recipe.launch.generation_nodes}\n" in train
    # What differs between GPUs is numbers.
    assert {path.stem for path in _checked_scripts(run, with_shellcheck=cluster == CLUSTERS[0])} == {
        "ingest",
        "profile",
        "select",
        "train",
        "convert",
        "eval",
        "report",
    }


@pytest.mark.parametrize(("family", "domain"), RECIPES)
def test_the_scripts_of_a_baseline_run_sft_alone(
    family: str, domain: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cli: Callable[..., tuple[int, str, str]]
) -> None:
    monkeypatch.chdir(ROOT)
    code, printed, error = cli("launch", _folder(family, domain) / "sft", "--cluster", EXAMPLE, "--run", tmp_path / "run", "--dry-run", *GIVEN)
    assert code == 0, error
    assert "train by the planner" not in printed
    assert {path.stem for path in _checked_scripts(tmp_path / "run", with_shellcheck=domain == DOMAINS[0])} == {
        "ingest",
        "sft",
        "convert",
        "eval",
        "report",
    }
    assert f" convert {tmp_path}/run/sft/hf {tmp_path}/run/convert " in (tmp_path / "run" / "launch" / "convert.sbatch").read_text()


@pytest.mark.parametrize(("family", "domain"), RECIPES)
def test_the_end_to_end_baseline_is_the_same_but_for_its_episodes(family: str, domain: str) -> None:
    """Model, sampling, objective, optimizer, engines and layout are PivotRL's; 16 x 32 episodes a step are the paper's (Figure 1)."""
    pivotrl, e2e = load_recipe(_folder(family, domain), GIVEN).recipe, load_recipe(_folder(family, domain) / "e2e", ROWS).recipe
    assert e2e.stages == ("train", "eval", "report")
    assert e2e.train.episodes is not None
    assert (e2e.train.episodes.tasks_per_step, e2e.train.group_size) == (16, 32)
    taken = {key: getattr(pivotrl.train, key) for key in ("episodes", "group_size", "batching", "max_policy_age", "validation", "parity")}
    sections = {key: getattr(pivotrl, key) for key in ("name", "environment", "verifier", "eval")}
    paths = {"ingest": e2e.ingest.model_copy(update={"paths": pivotrl.ingest.paths})}
    assert e2e.model_copy(update={**sections, **paths, "train": e2e.train.model_copy(update=taken)}) == pivotrl
    model, hardware = ROOT / "configs" / "models" / f"{FAMILIES[family]}.yaml", ROOT / "configs" / "clusters" / "h100_80gb.yaml"
    findings = examine(Request(_folder(family, domain) / "e2e", list(ROWS), None, hardware, model, is_static=True))
    assert findings.found == []
    assert findings.figures["train_episodes"] == 200 * 16 * 32
    assert f"{findings.figures['train_gpu_hours']:,}" in (ROOT / "recipes" / family / "README.md").read_text()


@pytest.mark.parametrize(("family", "domain"), RECIPES)
def test_the_scripts_of_end_to_end_rl_read_no_trajectories(
    family: str, domain: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cli: Callable[..., tuple[int, str, str]]
) -> None:
    monkeypatch.chdir(ROOT)
    model = ROOT / "configs" / "models" / f"{FAMILIES[family]}.yaml"
    words = ("--cluster", EXAMPLE, "--run", tmp_path / "run", "--dry-run", "--model", model)
    code, printed, error = cli("launch", _folder(family, domain) / "e2e", *words, *ROWS)
    assert code == 0, error
    assert "train by the planner:" in printed
    assert "environment.train_rows.0 is /train.jsonl, and no mount of container.mounts shows it" in " ".join(printed.split())
    scripts = _checked_scripts(tmp_path / "run", with_shellcheck=domain == DOMAINS[0])
    assert {path.stem for path in scripts} == {"train", "convert", "eval", "report"}


def _checked_scripts(run: Path, *, with_shellcheck: bool) -> list[Path]:
    """The batch scripts of a run, after bash and shellcheck have read them and what they source."""
    scripts = sorted((run / "launch").glob("*.sbatch"))
    files = [*scripts, *sorted((run / "launch").glob("*.sh"))]
    for path in files:
        assert subprocess.run(["bash", "-n", str(path)], check=False).returncode == 0
        assert path.read_text().count("\n") <= 150
    if with_shellcheck and shutil.which("shellcheck") is not None:
        checked = subprocess.run(["shellcheck", "--external-sources", *map(str, files)], capture_output=True, text=True, check=False)
        assert checked.returncode == 0, checked.stdout
    return scripts


# Lines that set nothing of their own: names, forms, files, a cascade's frame, and a layout, which its file's head explains as a whole.
UNSOURCED = re.compile(
    r"^\s*(- )?(extends|name|type|domain|stages|verifier|decides|undecided|prompt|transfer|num_replicas|\w+_parallel(_size)?):"
    r"|^\s*- \.\./|^\s*- \{type"
)


def test_every_value_of_a_fragment_names_its_source() -> None:
    """On its own line: published where, or not stated and why ours is what it is."""
    files = [file for folder in ("method", "domains", "parallelism", "baselines") for file in sorted((ROOT / "configs" / folder).glob("*.yaml"))]
    files += [ROOT / "recipes" / family / "family.yaml" for family in FAMILIES]
    assert len(files) == 13
    for file in files:
        for line in file.read_text().splitlines():
            sets_something = re.match(r"^\s*(- )?\w+: *[^ #]", line)
            assert not sets_something or "#" in line or UNSOURCED.match(line), f"{file.name}: {line}"


def test_what_the_paper_leaves_open_is_stated_everywhere() -> None:
    for family, domain in RECIPES:
        loaded = load_recipe(_folder(family, domain), GIVEN)
        for key in ("profile.num_samples", "select.lambda_diff", "train.group_size", "train.kl.beta", "sampling.truncated", "train.clip.high"):
            assert loaded.origins[key] != DEFAULT, key


def test_published_settings_are_the_recipes_settings() -> None:
    """Spot checks against the published figures, by hand."""

    def of(family: str, domain: str) -> Recipe:
        return load_recipe(_folder(family, domain), GIVEN).recipe

    tau2, swe = of("qwen3_30b_a3b", "tau2"), of("qwen3_30b_a3b", "swe")
    assert (tau2.train.pivots_per_step * tau2.train.group_size, swe.train.pivots_per_step * swe.train.group_size) == (1024, 512)
    assert (tau2.train.clip.high, swe.train.clip.high) == (0.2, 0.28)
    assert tau2.render.max_prompt_tokens + tau2.sampling.max_new_tokens == 32_768
    assert swe.render.max_prompt_tokens + swe.sampling.max_new_tokens == 131_072
    full, small = of("nemotron3_super_120b", "swe"), of("nemotron3_super_120b", "tau2")
    assert (full.train.pivots_per_step, full.train.group_size, small.train.pivots_per_step, small.train.group_size) == (64, 16, 32, 16)
    assert full.launch.train_nodes + full.launch.generation_nodes == 64
    assert full.moe.expert_bias_update_rate == 1e-3
    shared: dict[str, Any] = {"lr": 1e-6, "beta1": 0.9, "beta2": 0.999, "max_grad_norm": 1.0, "weight_decay": 0.0}
    for recipe in (tau2, swe, full, small):
        assert {key: getattr(recipe.train.optimizer, key) for key in shared} == shared
        assert (recipe.train.kl.beta, recipe.sampling.temperature, recipe.moe.router) == (0, 1.0, "frozen")
