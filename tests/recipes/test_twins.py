"""The production recipes at a size for a CPU: the same method on a tiny model of the same shape, from made-up episodes to a scored checkpoint.

A twin is the recipe's own file with layers of hardware, data and sizes above it (twins/*.yaml). What the layer may change is listed here; all
else, K, G, lambda_diff, objective, optimizer, age of the policy, the engine's bfloat16, verifier and formats, is the recipe's. All are examined as
`pivotrl doctor` does. One per model family runs whole here, as production does: SFT makes pi_0, PivotRL starts from it; test_twins_whole.py runs
the others.

Those run in one process. A parallel twin keeps the recipe's axes too (fakes/twins.py says how they are scaled): eight processes of `pivotrl train`
over gloo, two `pivotrl engine` beside them that get the weights by broadcast, in every layout of configs/parallelism. Its oracle is the twin
in one process.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from fakes.forked_commands import Command, run_commands
from fakes.judge_server import Reply, judge_server
from fakes.twin_runs import Finished, run_stages, run_whole, scored_turns, steps_of, verified_tensors
from fakes.twins import DATA, RECIPES, ROOT, ParallelTwin, data_file, save_tiny_checkpoint, write_parallel_twin, write_twin
from safetensors.torch import load_file

from pivotrl.config.load import load_recipe
from pivotrl.doctor.examine import Request, examine
from pivotrl.rundir import read_json

FAMILIES = ("qwen3_30b_a3b", "nemotron3_super_120b")
ALL = [(family, domain) for family in FAMILIES for domain in DATA]
GIVEN = ("model.path=/checkpoint", "ingest.paths=[/trajectories]")
# The steps that parallel twins and one process are compared in, at a rate whose steps are long beside the rounding of float32. In bfloat16 two
# engines, with half of the prompts each, would sample some other tokens than one engine does with all of them.
FIRST_STEPS = ("train.num_steps=2", "train.optimizer.lr=1e-4", "engine.dtype=float32")
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
# In a parallel twin every size above 1 stays above 1, and engines, their placement and how weights travel are where production has them.
PARALLEL_HARDWARE = {
    "num_threads",
    # vLLM's GPU settings and tensor parallelism: the engines are transformers on a CPU.
    "engine",
    "placement.num_replicas",
    "launch.train_nodes",
    "launch.generation_nodes",
    "launch.processes_per_node",
    "parallel.tensor_model_parallel_size",
    "parallel.pipeline_model_parallel_size",
    "parallel.context_parallel_size",
    "parallel.expert_model_parallel_size",
}
CONTEXTS = {"tau2": "32k", "terminal": "32k", "swe": "128k", "browsecomp": "128k"}
PARALLELISM = {"qwen3_30b_a3b": "qwen3_30b_a3b", "nemotron3_super_120b": "nemotron3_super"}
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


def test_a_parallel_twin_differs_in_the_stated_keys_and_keeps_every_axis(tmp_path: Path) -> None:
    stated, used = PARALLEL_HARDWARE | DATA_KEYS | SIZES, set[str]()
    for family, domain in ALL:
        folder = write_parallel_twin(tmp_path / family / domain, family, domain, f"{PARALLELISM[family]}_{CONTEXTS[domain]}").folder
        for key in _differences(folder, RECIPES / family / domain):
            covering = _stated(key, stated)
            assert covering is not None, f"{family}/{domain}: {key}"
            used.add(covering)
        twin, production = (dict(_values(load_recipe(one, GIVEN).recipe.model_dump(mode="json"))) for one in (folder, RECIPES / family / domain))
        sizes = [key for key in production if re.fullmatch(r"parallel\..*_size", key) or key in ("launch.train_nodes", "launch.generation_nodes")]
        assert {key: (twin[key] or 1) > 1 for key in sizes} == {key: (production[key] or 1) > 1 for key in sizes}
    assert used == stated, "what is stated is changed somewhere"


@pytest.mark.parametrize("context", ["32k", "128k"])
@pytest.mark.parametrize("family", FAMILIES)
def test_launch_starts_as_many_processes_as_the_axes_need(
    family: str, context: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cli: Callable[..., tuple[int, str, str]]
) -> None:
    monkeypatch.chdir(ROOT)
    twin = write_parallel_twin(tmp_path / "recipe", family, "tau2", f"{PARALLELISM[family]}_{context}")
    cluster = tmp_path / "cluster.yaml"
    cluster.write_text(f"extends: {ROOT / 'launch' / 'clusters' / 'local.yaml'}\nvenv: /shared/venv\n")
    code, _, errors = cli("launch", twin.folder, "--cluster", cluster, "--run", tmp_path / "run", "--dry-run", *GIVEN)
    assert code == 0, errors
    script = (tmp_path / "run" / "launch" / "train.sbatch").read_text()
    nodes, per_node = map(int, re.search(r"^run_step train 0 (\d+) (\d+) ", script, re.MULTILINE).groups())  # pyright: ignore[reportOptionalMemberAccess]
    assert nodes * per_node == twin.layout["processes"] == 8
    assert re.search(r"^start engine 2 2 1 ", script, re.MULTILINE), "an engine on each of two nodes after the trainer's two"
    assert "#SBATCH --nodes=4\n" in script


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


@pytest.fixture(scope="module", params=[("qwen3_30b_a3b", "tau2"), ("nemotron3_super_120b", "swe")], ids=lambda one: "/".join(one))
def finished(request: pytest.FixtureRequest, random_weights: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Finished:
    """As production runs: the SFT recipe, then PivotRL from its checkpoint."""
    family, domain = request.param
    return run_whole(tmp_path_factory.mktemp("twin"), family, domain, random_weights[family])


@pytest.mark.slow
def test_pivots_are_those_that_the_published_rule_keeps(finished: Finished) -> None:
    summary = read_json(finished.run / "select" / "manifest.json")["summary"]
    assert summary["by_reason"]["kept"] >= 4, "a step takes four different pivots"
    assert set(summary["by_reason"]) <= {"kept", "always succeeds", "always fails", "too easy"}
    assert summary["provenance"]["num_samples"] == 16


@pytest.mark.slow
def test_training_is_one_policy_behind_and_its_metrics_are_whole(finished: Finished) -> None:
    steps = steps_of(finished.run)
    assert len(steps) == 11
    assert [row["sync/policy_age_steps/max"] for row in steps] == [0] + [1] * 10
    assert min(row["optim/grad_norm/mean"] for row in steps) > 0
    assert all(row["data/non_finite/count"] == 0 for row in steps)
    # bfloat16 sends a token near a tie to another expert now and then; on the mean of a step it hardly shows.
    assert max(row["objective/logprob_mismatch/mean"] for row in steps) < 0.05


@pytest.mark.slow
def test_in_float32_engine_and_trainer_agree_on_every_token(finished: Finished, tmp_path: Path) -> None:
    """What megatron-core scores is what the engine sampled: states of Mamba layers, latent experts, attention."""
    run = _from_pivots(finished, tmp_path / "run")
    run_stages(finished.recipe, run, [*finished.words, "engine.dtype=float32", "train.num_steps=1"], "train")
    assert steps_of(run)[0]["objective/logprob_mismatch/max"] < 1e-4


@pytest.mark.slow
def test_what_the_recipe_trains_moves_and_what_it_freezes_stays(finished: Finished, tmp_path: Path) -> None:
    """The last state, as `pivotrl convert` reads it; train/hf is the best by validation, which may be the first."""
    state = finished.run / "train" / "checkpoints" / "step_00000011" / "state"
    verified_tensors(state, tmp_path / "last", "hf", config_dir=finished.reference)
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
    # The baseline is scored on the same turns.
    assert scored_turns(finished.reference.parents[1]) == scored_turns(finished.run)
    converted = verified_tensors(finished.run / "train" / "hf", tmp_path / "megatron", "megatron", config_dir=None)
    assert converted == len(load_file(finished.run / "train" / "hf" / "model.safetensors"))


@pytest.fixture(scope="module")
def alone(finished: Finished, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The twin's first steps in one process."""
    run = _from_pivots(finished, tmp_path_factory.mktemp("alone") / "run")
    run_stages(finished.recipe, run, [*finished.words, *FIRST_STEPS], "train")
    return run


@pytest.fixture(scope="module", params=["32k", "128k"])
def parallel(finished: Finished, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[ParallelTwin, Path]:
    """The same steps on the axes of each of the family's files of configs/parallelism, through the command line."""
    root = tmp_path_factory.mktemp("parallel")
    run = _from_pivots(finished, root / "run")
    twin = write_parallel_twin(root / "recipe", finished.family, finished.domain, f"{PARALLELISM[finished.family]}_{request.param}")
    # A budget that gives each data parallel process several micro-batches, and a free port.
    words = [*finished.words, *FIRST_STEPS, "train.micro_batch_tokens=512", "placement.listen=127.0.0.1:0"]
    trainers = Command(
        ["train", str(twin.folder), "--run", str(run), *words], int(twin.layout["processes"]), serves=False, log=str(root / "train.log")
    )
    engines = Command(["engine", str(twin.folder), "--run", str(run)], 2, serves=True, log=str(root / "engine.log"))
    run_commands([trainers, engines], root)
    return twin, run


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_trainer_ran_on_the_axes_of_the_recipe(parallel: tuple[ParallelTwin, Path]) -> None:
    twin, run = parallel
    record = read_json(run / "train" / "checkpoints" / "step_00000002" / "record.json")
    assert record["layout"] == twin.layout
    assert (run / "engines" / "authkey").exists(), "engines of other processes sampled"


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_on_the_axes_of_the_recipe_training_is_that_of_one_process(parallel: tuple[ParallelTwin, Path], alone: Path) -> None:
    """Rollouts of both steps are those of pi_0, one policy behind, so they are the same ones; bars are those of tests/invariance/test_layouts.py."""
    _, run = parallel
    for name in ("rollouts.jsonl", "ledger.jsonl"):
        assert (run / "train" / name).read_bytes() == (alone / "train" / name).read_bytes(), name
    ours, theirs = steps_of(run), steps_of(alone)
    assert ours[0]["objective/logprob_mismatch/max"] < 1e-4, "what the engines sampled is what eight processes score"
    assert max(ours[0]["sync/parity_difference/max"], theirs[0]["sync/parity_difference/max"]) < 1e-4
    assert len(ours) == len(theirs) == 2
    for step, expected in zip(ours, theirs, strict=True):
        assert expected["optim/grad_norm/mean"] > 0
        assert step["objective/loss/mean"] == pytest.approx(expected["objective/loss/mean"], abs=2e-5)
        assert step["optim/grad_norm/mean"] == pytest.approx(expected["optim/grad_norm/mean"], rel=5e-4)
        # What the parity gate measured is the rounding of either layout; the gate itself limits it.
        exact = [name for name in expected if name.startswith(("rollout/", "sync/", "optim/lr/")) and not name.startswith("sync/parity_")]
        assert {name: step[name] for name in exact} == {name: expected[name] for name in exact}
        close = ("objective/entropy/mean", "optim/expert_load/max")
        assert {name: step[name] for name in close} == pytest.approx({name: expected[name] for name in close}, rel=1e-3)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_on_the_axes_of_the_recipe_weights_move_as_in_one_process(
    parallel: tuple[ParallelTwin, Path], alone: Path, finished: Finished, tmp_path: Path
) -> None:
    """The last checkpoint of eight processes, as `pivotrl convert` reads it: the difference of the two ways from pi_0, over the way's length."""
    start = load_file(finished.reference / "model.safetensors")
    ends = []
    for label, run in (("parallel", parallel[1]), ("alone", alone)):
        verified_tensors(run / "train" / "checkpoints" / "step_00000002" / "state", tmp_path / label, "hf", config_dir=finished.reference)
        ends.append(load_file(tmp_path / label / "model.safetensors"))
    apart = sum((ends[0][name].double() - ends[1][name].double()).square().sum().item() for name in start)
    moved = sum((ends[1][name].double() - start[name].double()).square().sum().item() for name in start)
    assert moved > 0
    assert (apart / moved) ** 0.5 < 0.01


def _from_pivots(finished: Finished, run: Path) -> Path:
    for stage in ("ingest", "profile", "select"):
        shutil.copytree(finished.run / stage, run / stage)
    return run
