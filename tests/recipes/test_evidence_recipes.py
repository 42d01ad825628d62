"""The arms of docs/evidence_protocol.md: each differs from PivotRL in the keys that the protocol names, in every domain, and in no other."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, cast

import pytest

from pivotrl.config.load import LoadedRecipe, file_words, load_recipe, load_section
from pivotrl.config.sweep import SweepConfig
from pivotrl.sweeping.runs import SweepRun, runs_of

EVIDENCE = Path(__file__).resolve().parents[2] / "recipes" / "evidence"
MAIN, DOMAINS = ("pivotrl", "sft", "end_to_end"), ("conversational", "terminal", "swe", "search")
# What is measured beside the result: Figure 1 needs the curves of two arms, and the base is measured once for a domain and seed.
MEASURED = {"name", "train.curve", "eval.checkpoints"}
RANDOM = {"rule": "random", "num_turns": None, "as_many_as": "{run}/../pivotrl-1"}
TRUE = {"type": "tool_call", "message": "similarity", "message_similarity": 0.7}
# The protocol's table, by hand.
DIFFERENCES: dict[str, dict[str, Any]] = {
    "pivotrl": {},
    "sft": {"sft": ..., "eval.of": "sft"},
    # How rows are laid out changes no gradient; the turns of a task share no prompt.
    "end_to_end": {"train.episodes": {"tasks_per_step": 8, "max_turns": None}, "train.batching": "packed"},
    "random_functional": {"select": RANDOM},
    "random_strict": {"select": RANDOM, "verifier": {"type": "exact"}},
    "pivots_strict": {"verifier": {"type": "exact"}},
    "window": {"select": {"rule": "window", "low": "0.3", "high": "0.7"}},
    "reprofile": {"train.reprofile": ...},
    "no_kl": {"train.kl.beta": 0},
    "k4": {"profile.num_samples": 4},
    "k16": {"profile.num_samples": 16},
    "lambda_50": {"select.lambda_diff": "0.5"},
    "lambda_75": {"select.lambda_diff": "0.75"},
    "noise_05": {"verifier": {"type": "flipped", "probability": 0.05, "seed": 1}},
    "noise_20": {"verifier": {"type": "flipped", "probability": 0.2, "seed": 1}},
}


def sweep_runs(name: str) -> list[SweepRun]:
    return [run for run in runs_of(load_section(SweepConfig, file=EVIDENCE / name), EVIDENCE) if run.arm]


def arm(name: str, domain: str = "conversational") -> LoadedRecipe:
    return load_recipe(EVIDENCE / name, file_words(EVIDENCE / "domains" / f"{domain}.yaml"))


def differences(values: Any, reference: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted key and value of everything that is not the same; sections of another form count as one difference."""
    for key, value in values.items():
        other = reference.get(key)
        if value == other:
            continue
        both = isinstance(value, dict) and isinstance(other, dict)
        if both and all(cast("Mapping[str, Any]", value).get(tag) == cast("Mapping[str, Any]", other).get(tag) for tag in ("type", "rule")):
            yield from differences(value, other, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


@pytest.mark.parametrize("domain", DOMAINS)
@pytest.mark.parametrize("name", DIFFERENCES)
def test_an_arm_differs_from_pivotrl_in_the_named_keys_alone(name: str, domain: str) -> None:
    found, reference = (arm(one, domain).recipe.model_dump(mode="json") for one in (name, "pivotrl"))
    differing = {key: value for key, value in differences(found, reference) if key not in MEASURED}
    assert set(differing) == set(DIFFERENCES[name])
    for key, expected in DIFFERENCES[name].items():
        if isinstance(expected, dict):
            assert {part: differing[key][part] for part in expected} == expected
        elif expected is not ...:
            assert differing[key] == expected
    assert found["eval"]["verifier"] == reference["verifier"], "what was learnt is measured by the domain's own verifier"


def test_pivotrl_is_the_protocols() -> None:
    recipe = arm("pivotrl").recipe
    assert (recipe.profile.num_samples, recipe.select.model_dump(mode="json")) == (8, {"rule": "eq5", "lambda_diff": "0.9"})
    train = recipe.train
    assert (train.num_steps, train.pivots_per_step, train.group_size, train.kl.beta) == (40, 16, 8, 0.02)
    assert (train.advantage, train.aggregation, train.clip.low, train.clip.high) == ("mean_std", "action", 0.2, 0.2)
    assert recipe.ingest.held_out_frac == 0.15
    assert recipe.verifier.model_dump(mode="json").items() >= TRUE.items()
    assert [arm("pivotrl", domain).recipe.verifier.type for domain in DOMAINS] == ["tool_call", "terminal", "swe", "search"]
    assert [arm("pivotrl", domain).recipe.render.action_format for domain in DOMAINS] == ["hermes", "terminus2", "hermes", "hermes"]
    for domain, world in zip(DOMAINS, ("order_desk", "terminal", "swe", "search"), strict=True):
        found = arm("pivotrl", domain).recipe.world
        assert found is not None
        assert (found.type, found.num_train_tasks, found.num_test_tasks) == (world, 96, 96)


def test_sft_learns_from_the_ingested_trajectories_for_300_steps_of_16() -> None:
    config = arm("sft").recipe.sft
    assert config is not None
    assert (config.use_ingested, config.paths, config.batch_sequences) == (True, (), 16)
    assert config.num_steps in (100, 300)


def test_re_profiling_happens_once_after_half_of_the_steps() -> None:
    train = arm("reprofile").recipe.train
    assert train.reprofile is not None
    assert train.reprofile.model_dump(exclude_none=True, exclude={"window_rounds"}) == {"every_steps": train.num_steps // 2}
    assert train.checkpoint_every == train.num_steps // 2


def test_the_sweep_is_the_protocols_table() -> None:
    runs = {(run.arm, run.domain, run.seed) for run in sweep_runs("sweep.yaml")}
    main = {(name, domain, seed) for name in MAIN for domain in DOMAINS for seed in range(1, 6)}
    others = {(name, "conversational", seed) for name in DIFFERENCES if name not in MAIN for seed in range(1, 4)}
    assert runs == main | others
    assert {run.recipe.name for run in sweep_runs("sweep.yaml")} == set(DIFFERENCES)
    small = {(run.arm, run.domain, run.seed) for run in sweep_runs("sweep_small.yaml")}
    assert small == {(name, "conversational", seed) for name in MAIN for seed in (1, 2)}


def test_random_turns_are_as_many_as_the_pivots_of_the_same_domain_and_seed() -> None:
    for run in sweep_runs("sweep.yaml"):
        if run.arm.startswith("random_"):
            loaded = load_recipe(run.recipe, run.overrides)
            assert loaded.expand(loaded.recipe.select.as_many_as, Path("root") / run.name) == Path("root") / run.name / ".." / f"pivotrl-{run.seed}"  # pyright: ignore
            assert f"{run.domain}/pivotrl-{run.seed}" in run.after


def test_all_runs_start_from_the_base_and_use_one_thread() -> None:
    for run in sweep_runs("sweep.yaml"):
        loaded = load_recipe(run.recipe, run.overrides)
        path = loaded.expand(loaded.recipe.model.path, Path("/root-of-sweep") / run.name)  # pyright: ignore
        assert path.resolve() == Path("/root-of-sweep/base/sft/hf")
        assert (loaded.recipe.seed, loaded.recipe.num_threads) == (run.seed, 1)
