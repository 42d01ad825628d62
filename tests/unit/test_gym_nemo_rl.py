"""A recipe as a NeMo-RL configuration: values equal the recipe's, every key was seen in a named file of theirs, the rows keep their contract."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from fakes.profile_run import run_stage, sometimes_right
from fakes.runs import trajectory, write_ingest

from pivotrl.config.docs import config_page
from pivotrl.config.load import load_recipe
from pivotrl.gym.contract import problem_of
from pivotrl.gym.nemo_rl import KEYS, as_config, known_keys, lines_of, without_equivalent
from pivotrl.rollouts.scripted import ScriptedEngine

ROOT = Path(__file__).resolve().parents[2]
RECIPES = [
    ROOT / "recipes" / family / domain for family in ("qwen3_30b_a3b", "nemotron3_super_120b") for domain in ("tau2", "swe", "terminal", "browsecomp")
]
GIVEN = ("model.path=/checkpoint", "ingest.paths=[/trajectories]")


def _config(recipe: Path, *overrides: str) -> dict[str, Any]:
    return as_config(lines_of(load_recipe(recipe, [*GIVEN, *overrides]).recipe, model="/checkpoint", rows=Path("/rows.jsonl")))


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: "/".join(recipe.parts[-2:]))
def test_every_key_was_seen_in_a_file_that_is_named(recipe: Path) -> None:
    lines = lines_of(load_recipe(recipe, GIVEN).recipe, model="/checkpoint", rows=Path("/rows.jsonl"))
    assert {line.theirs for line in lines} <= known_keys().keys()
    assert len({line.theirs for line in lines}) == len(lines), "each key once"
    files = json.loads(KEYS.read_text())["files"]
    assert all(keys == sorted(set(keys)) for keys in files.values())


def test_super_swe_says_what_the_public_recipes_say() -> None:
    """By hand from the published settings of the stage on Super, and from what this recipe changes and says so (EP64)."""
    config = _config(ROOT / "recipes" / "nemotron3_super_120b" / "swe")
    grpo, loss, policy = config["grpo"], config["loss_fn"], config["policy"]
    assert (grpo["num_prompts_per_step"], grpo["num_generations_per_prompt"], policy["train_global_batch_size"]) == (64, 16, 1024)
    assert (loss["ratio_clip_min"], loss["ratio_clip_max"], loss["reference_policy_kl_penalty"]) == (0.2, 0.28, 0)
    assert (loss["truncated_importance_sampling_ratio"], loss["truncated_importance_sampling_type"]) == (5.0, "tis")
    assert (grpo["async_grpo"], grpo["overlong_filtering"]) == ({"enabled": True, "max_trajectory_age_steps": 1}, True)
    assert (grpo["normalize_rewards"], grpo["use_leave_one_out_baseline"]) == (True, False)
    assert policy["max_total_sequence_length"] == 131_072
    megatron = policy["megatron_cfg"]
    assert (megatron["tensor_model_parallel_size"], megatron["context_parallel_size"], megatron["expert_model_parallel_size"]) == (8, 16, 64)
    assert (megatron["freeze_moe_router"], megatron["moe_router_bias_update_rate"], megatron["sequence_parallel"]) == (True, 1e-3, True)
    assert (megatron["optimizer"]["lr"], megatron["optimizer"]["min_lr"], megatron["scheduler"]["lr_warmup_iters"]) == (1e-6, 1e-6, 10)
    assert megatron["scheduler"]["lr_warmup_init"] == pytest.approx(1e-7)
    assert policy["generation"]["colocated"] == {"enabled": False, "resources": {"num_nodes": 32, "gpus_per_node": 8}}
    assert config["cluster"] == {"num_nodes": 64, "gpus_per_node": 8}
    assert config["env"]["nemo_gym"]["config_paths"][1].endswith("swe_pivot_single_step_tool_use_with_argument_comparison.yaml")


@pytest.mark.parametrize(
    ("advantage", "normalises", "leaves_one_out"),
    [("mean_std", True, False), ("leave_one_out_std", True, True), ("leave_one_out", False, True), ("no_std", False, False)],
)
def test_the_advantage_is_two_switches_there(advantage: str, normalises: bool, leaves_one_out: bool) -> None:
    grpo = _config(RECIPES[0], f"train.advantage={advantage}")["grpo"]
    assert (grpo["normalize_rewards"], grpo["use_leave_one_out_baseline"]) == (normalises, leaves_one_out)


def test_what_a_recipe_changes_changes_there() -> None:
    changes = (
        "train.updates_per_rollout=2",
        "sampling.truncated=zero",
        "train.aggregation=token",
        "train.optimizer.decay=cosine",
        "parallel.recompute=none",
    )
    config = _config(RECIPES[0], *changes)
    assert (config["policy"]["train_global_batch_size"], config["grpo"]["max_num_steps"]) == (512, 100)
    assert (config["grpo"]["overlong_filtering"], config["loss_fn"]["token_level_loss"]) == (False, True)
    assert config["policy"]["megatron_cfg"]["optimizer"]["min_lr"] == pytest.approx(1e-7)
    assert config["policy"]["megatron_cfg"]["activation_checkpointing"] is False


def test_what_has_no_equivalent_is_listed_where_the_recipe_uses_it() -> None:
    def listed(*overrides: str) -> set[str]:
        return set(without_equivalent(load_recipe(RECIPES[0], [*GIVEN, *overrides]).recipe))

    assert {"verifier", "train.batching", "profile, select"} <= listed()
    public = "verifier={type: gym_single_step, word_count_similarity_threshold: 0.1}"
    assert not {"verifier", "train.batching"} & listed(public, "train.batching=packed")
    assert "train.kl.estimator" in listed("train.kl.beta=0.1") - listed()
    assert "train.correction" in listed("train.correction={type: masked, low: 0.5, high: 2}") - listed()
    keys = {part.strip() for entry in listed() for part in entry.split(",")}
    page = config_page()
    assert all(f"`{key.rsplit('.', maxsplit=1)[-1]}`" in page for key in keys), "they are keys of ours"


def test_the_verb_writes_rows_configuration_and_differences(tmp_path: Path, cli: Callable[..., tuple[int, str, str]]) -> None:
    run, out = tmp_path / "run", tmp_path / "out"
    run.mkdir()
    write_ingest(run / "ingest", [trajectory(number) for number in range(4)])
    (run / "ingest" / "_SUCCESS").touch()
    engine = ScriptedEngine.from_function(sometimes_right)
    run_stage(run, "profile", engine)
    run_stage(run, "select", engine)
    (run / "ingest" / "manifest.json").write_text('{"outputs": {}}')
    code, printed, errors = cli("export-nemo-rl", RECIPES[0], "--run", run, "--out", out, *GIVEN)
    assert code == 0, errors
    config = yaml.safe_load((out / "grpo.yaml").read_text())
    rows = [json.loads(line) for line in Path(config["data"]["train"]["data_path"]).read_text().splitlines()]
    assert rows
    assert all(problem_of(row) is None for row in rows)
    assert (config["policy"]["model_name"], config["defaults"]) == ("/checkpoint", "grpo_math_1B.yaml")
    page = (out / "differences.md").read_text()
    assert all(f"`{key}`" in page for key in without_equivalent(load_recipe(RECIPES[0], GIVEN).recipe))
    assert "without equivalent" in printed.splitlines()[-1]
    code, _, errors = cli("export-nemo-rl", ROOT / "recipes" / "quickstart", "--run", run, "--out", tmp_path / "none")
    assert (code, "model.type is scratch" in errors) == (2, True)
    code, _, errors = cli("export-nemo-rl", RECIPES[0], "--run", tmp_path / "nowhere", "--out", tmp_path / "none", *GIVEN)
    assert (code, "no _SUCCESS" in errors) == (2, True)
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize("baseline", ["sft", "e2e"])
def test_a_baseline_has_no_pivots_to_export(baseline: str, tmp_path: Path, cli: Callable[..., tuple[int, str, str]]) -> None:
    words = (*GIVEN, "environment.train_rows=[/rows]", "environment.test_rows=[/rows]") if baseline == "e2e" else GIVEN
    code, _, error = cli("export-nemo-rl", RECIPES[1] / baseline, "--run", tmp_path / "run", "--out", tmp_path / "out", *words)
    assert code == 2
    assert "what is exported is a recipe of pivots" in " ".join(error.split())
    assert not (tmp_path / "out").exists()
