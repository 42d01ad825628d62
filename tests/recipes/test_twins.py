"""The production recipes at a size for a CPU: the same method on a tiny model of the same shape, from made-up episodes to a scored checkpoint.

A twin is the recipe's own file with a layer of hardware, data and sizes above it (twins/cpu.yaml). What the layer may change is listed here; all
else, K, G, lambda_diff, objective, optimizer, age of the policy, the engine's bfloat16, verifier and formats, is the recipe's. One twin per model
family runs whole, as production does: SFT makes pi_0, PivotRL starts from it. The others are examined as `pivotrl doctor` does.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from fakes.judge_server import Reply, judge_server
from fakes.twins import DATA, RECIPES, data_file, save_tiny_checkpoint, write_twin
from safetensors.torch import load_file

from pivotrl import pipeline
from pivotrl.config.load import load_recipe
from pivotrl.doctor.examine import Request, examine
from pivotrl.megatron.conversion import Form, convert
from pivotrl.megatron.conversion import Request as Conversion
from pivotrl.rundir import read_json, read_jsonl

FAMILIES = ("qwen3_30b_a3b", "nemotron3_super_120b")
ALL = [(family, domain) for family in FAMILIES for domain in DATA]
GIVEN = ("model.path=/checkpoint", "ingest.paths=[/trajectories]")
# A section covers its keys.
HARDWARE = {
    "num_threads",
    "engine",
    "placement",
    "launch.train_nodes",
    "launch.generation_nodes",
    "parallel.tensor_model_parallel_size",
    "parallel.sequence_parallel",
    "parallel.pipeline_model_parallel_size",
    "parallel.context_parallel_size",
    "parallel.expert_model_parallel_size",
}
DATA_KEYS = {"ingest.near_duplicate_threshold", "ingest.held_out_frac"}
SIZES = {
    "render.max_prompt_tokens",
    "sampling.max_new_tokens",
    "profile.max_candidates",
    "profile.unit_candidates",
    "train.num_steps",
    "train.pivots_per_step",
    "train.micro_batch_tokens",
    "train.validation.num_pivots",
    "eval.suites",
}
SFT_SIZES = {"sft.num_steps", "sft.batch_sequences", "sft.max_sequence_tokens", "sft.micro_batch_tokens", "sft.optimizer.lr"}


def _values(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        if isinstance(value, Mapping) and value:
            yield from _values(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _differences(twin: Path, production: Path) -> set[str]:
    ours, theirs = (dict(_values(load_recipe(folder, GIVEN).recipe.model_dump(mode="json"))) for folder in (twin, production))
    absent = object()
    return {key for key in ours.keys() | theirs.keys() if ours.get(key, absent) != theirs.get(key, absent)}


def _stated(key: str, stated: set[str]) -> str | None:
    return next((one for one in stated if key == one or key.startswith(f"{one}.")), None)


@pytest.mark.parametrize("is_sft", [False, True])
def test_a_twin_differs_from_its_recipe_in_the_stated_keys_and_no_other(tmp_path: Path, *, is_sft: bool) -> None:
    stated = HARDWARE | DATA_KEYS | SIZES | (SFT_SIZES if is_sft else set())
    used: set[str] = set()
    for family, domain in ALL:
        production = RECIPES / family / domain / "sft" if is_sft else RECIPES / family / domain
        for key in _differences(write_twin(tmp_path / family / domain, family, domain, is_sft=is_sft), production):
            covering = _stated(key, stated)
            assert covering is not None, f"{family}/{domain}: {key}"
            used.add(covering)
    assert used == stated, "what is stated is changed somewhere"


@pytest.mark.parametrize(("family", "domain"), ALL)
def test_a_twin_keeps_the_engines_number_format(family: str, domain: str, tmp_path: Path) -> None:
    """`engine` differs as a section, so its one key that belongs to the method is compared by itself."""
    twin = load_recipe(write_twin(tmp_path / "twin", family, domain, is_sft=False), GIVEN).recipe
    assert twin.engine.model_dump()["dtype"] == load_recipe(RECIPES / family / domain, GIVEN).recipe.engine.model_dump()["dtype"]


@pytest.fixture(scope="module")
def random_weights(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {family: save_tiny_checkpoint(tmp_path_factory.mktemp(family) / "hf", family) for family in FAMILIES}


@pytest.mark.parametrize("is_sft", [False, True])
@pytest.mark.parametrize(("family", "domain"), ALL)
def test_the_doctor_finds_nothing(
    family: str, domain: str, random_weights: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, is_sft: bool
) -> None:
    """Settings, layout, context, every row of the data, and template to verdict on 64 expert turns, the judge of `terminal` at hand."""
    recipe = write_twin(tmp_path / "recipe", family, domain, is_sft=is_sft)
    with judge_server(lambda _: Reply(status=500)) as judge:
        monkeypatch.setenv("PIVOTRL_JUDGE_ENDPOINT", judge.url)
        words = [f"ingest.paths=[{data_file(domain)}]", f"model.path={random_weights[family]}"]
        findings = examine(Request(recipe, words, tmp_path / "run", None, None, is_static=False))
    assert findings.found == []
    assert findings.not_checked == {"memory and cost": "no --cluster was given"}
    assert (findings.figures["trajectories"], findings.figures["sampled_turns"]) == (48, 64)


@dataclass(frozen=True, slots=True)
class Finished:
    """A twin that ran whole."""

    family: str
    recipe: Path
    words: list[str]
    """What production leaves to the command line: data and checkpoint."""
    reference: Path
    """SFT's checkpoint, pi_0."""
    run: Path


def _run(recipe: Path, run: Path, words: list[str], *stages: str) -> None:
    loaded = pipeline.load(recipe, words)
    for stage in stages:
        pipeline.run_stage(stage, loaded, run)


@pytest.fixture(scope="module", params=[("qwen3_30b_a3b", "tau2"), ("nemotron3_super_120b", "swe")], ids=lambda one: "/".join(one))
def finished(request: pytest.FixtureRequest, random_weights: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Finished:
    """As production runs: the SFT recipe, then PivotRL from its checkpoint."""
    family, domain = request.param
    root, paths = tmp_path_factory.mktemp("twin"), f"ingest.paths=[{data_file(domain)}]"
    sft = write_twin(root / "recipe_sft", family, domain, is_sft=True)
    _run(sft, root / "sft", [paths, f"model.path={random_weights[family]}"], "ingest", "sft")
    reference = root / "sft" / "sft" / "hf"
    recipe, words = write_twin(root / "recipe", family, domain, is_sft=False), [paths, f"model.path={reference}"]
    _run(recipe, root / "run", words, "ingest", "profile", "select", "train", "eval", "report")
    return Finished(family, recipe, words, reference, root / "run")


@pytest.mark.slow
def test_pivots_are_those_that_the_published_rule_keeps(finished: Finished) -> None:
    summary = read_json(finished.run / "select" / "manifest.json")["summary"]
    assert summary["by_reason"]["kept"] >= 4, "a step takes four different pivots"
    assert set(summary["by_reason"]) <= {"kept", "always succeeds", "always fails", "too easy"}
    assert summary["provenance"]["num_samples"] == 16


@pytest.mark.slow
def test_training_is_one_policy_behind_and_its_metrics_are_whole(finished: Finished) -> None:
    steps = _steps(finished.run)
    assert len(steps) == 11
    assert [row["sync/policy_age_steps/max"] for row in steps] == [0] + [1] * 10
    assert min(row["optim/grad_norm/mean"] for row in steps) > 0
    assert all(row["data/non_finite/count"] == 0 for row in steps)
    # bfloat16 sends a token near a tie to another expert now and then; on the mean of a step it hardly shows.
    assert max(row["objective/logprob_mismatch/mean"] for row in steps) < 0.05


@pytest.mark.slow
def test_in_float32_engine_and_trainer_agree_on_every_token(finished: Finished, tmp_path: Path) -> None:
    """What megatron-core scores is what the engine sampled: states of Mamba layers, latent experts, attention."""
    for stage in ("ingest", "profile", "select"):
        shutil.copytree(finished.run / stage, tmp_path / stage)
    _run(finished.recipe, tmp_path, [*finished.words, "engine.dtype=float32", "train.num_steps=1"], "train")
    assert _steps(tmp_path)[0]["objective/logprob_mismatch/max"] < 1e-4


@pytest.mark.slow
def test_what_the_recipe_trains_moves_and_what_it_freezes_stays(finished: Finished, tmp_path: Path) -> None:
    """The last state, as `pivotrl convert` reads it; train/hf is the best by validation, which may be the first."""
    state = finished.run / "train" / "checkpoints" / "step_00000011" / "state"
    _convert(state, tmp_path / "last", "hf", config_dir=finished.reference)
    before, after = (load_file(directory / "model.safetensors") for directory in (finished.reference, tmp_path / "last"))
    assert before.keys() == after.keys()
    moved = {name for name in before if not before[name].equal(after[name])}
    routers = {name for name in before if name.endswith("gate.weight")}
    biases = {name for name in before if name.endswith("e_score_correction_bias")}
    assert routers
    assert before.keys() - moved == routers, "moe.router is frozen, all else learns"
    assert bool(biases) is (finished.family == "nemotron3_super_120b"), "moe.expert_bias_update_rate balances these"


@pytest.mark.slow
def test_both_checkpoints_are_scored_and_the_result_converts(finished: Finished, tmp_path: Path) -> None:
    suites = read_json(finished.run / "eval" / "scores.json")["suites"]
    assert {(row["name"], row["checkpoint"], row["n"]) for row in suites} == {("held_out", "reference", 32), ("held_out", "trained", 32)}
    assert (finished.run / "report" / "index.html").is_file()
    converted = _convert(finished.run / "train" / "hf", tmp_path / "megatron", "megatron", config_dir=None)
    assert converted == len(load_file(finished.run / "train" / "hf" / "model.safetensors"))


def _steps(run: Path) -> list[dict[str, Any]]:
    return [row for row in read_jsonl(run / "train" / "metrics.jsonl") if "rollout/reward/mean" in row]


def _convert(source: Path, out: Path, to: Form, *, config_dir: Path | None) -> int | None:
    """Number of tensors found equal bit for bit after a round trip, logits compared with transformers'."""
    return convert(Conversion(source, out, to, verify=True, config_dir=config_dir, max_shard_bytes=2**30)).num_verified
