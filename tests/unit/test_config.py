"""Recipe loading: layering, provenance, exact decimals, and one-line errors that name key, value, rule and fix."""

from __future__ import annotations

from decimal import Decimal
from pathlib import Path

import pytest

from pivotrl.config.docs import DOCS, cluster_page, config_page, metrics_page
from pivotrl.config.load import COMMAND_LINE, DEFAULT, load_recipe, load_verifier
from pivotrl.config.verifiers import ToolCallVerifierConfig
from pivotrl.errors import UserError

RECIPE = """
name: sample
seed: 1
model: {type: huggingface, path: checkpoint}
ingest: {paths: [data], held_out_frac: 0.1}
render: {action_format: hermes, history_reasoning: template, max_prompt_tokens: 100}
engine: {type: transformers, batch_size: 4}
sampling: {max_new_tokens: 5, truncated: zero}
verifier: {type: tool_call, message: similarity}
profile: {num_samples: 4}
select: {rule: eq5, lambda_diff: 0.6}
train:
  num_steps: 1
  pivots_per_step: 1
  group_size: 2
  advantage: mean_std
  aggregation: action
  clip: {low: 0.2, high: 0.28}
  kl: {beta: 0}
  optimizer: {lr: 1.0e-6}
  micro_batch_tokens: 100
  checkpoint_every: 1
eval: {suites: []}
"""


@pytest.fixture
def recipe_dir(tmp_path: Path) -> Path:
    directory = tmp_path / "sample"
    directory.mkdir()
    (directory / "recipe.yaml").write_text(RECIPE)
    return directory


def test_lambda_is_a_decimal_fraction_not_a_binary_one(recipe_dir: Path) -> None:
    assert load_recipe(recipe_dir).recipe.select.lambda_diff == Decimal("0.6")  # pyright: ignore[reportAttributeAccessIssue]


def test_provenance_names_the_file_the_command_line_and_the_default(recipe_dir: Path) -> None:
    (recipe_dir / "base.yaml").write_text("train: {num_steps: 7, pivots_per_step: 3}\n")
    (recipe_dir / "recipe.yaml").write_text("extends: base.yaml\n" + RECIPE.replace("  num_steps: 1\n", ""))
    loaded = load_recipe(recipe_dir, ["train.group_size=9", "ingest.paths=[a,b]"])
    assert (loaded.recipe.train.num_steps, loaded.recipe.train.pivots_per_step, loaded.recipe.train.group_size) == (7, 1, 9)
    assert loaded.recipe.ingest.paths == ("a", "b")
    assert loaded.origins["train.num_steps"] == "base.yaml"
    assert loaded.origins["train.pivots_per_step"] == "recipe.yaml"
    assert loaded.origins["train.group_size"] == COMMAND_LINE
    assert loaded.origins["train.optimizer.beta2"] == DEFAULT


def test_another_form_of_a_section_replaces_it_whole(recipe_dir: Path) -> None:
    drawn = {"rule": "random", "num_turns": 5, "as_many_as": None}
    assert load_recipe(recipe_dir, ["select={rule: random, num_turns: 5}"]).section("select") == {"select": drawn}
    assert load_recipe(recipe_dir, ["select.rule=all"]).section("select") == {"select": {"rule": "all"}}
    corrected = ["train.correction={type: truncated, cap: 5.0}", "train.correction={type: masked, low: 0.5, high: 2.0}"]
    assert load_recipe(recipe_dir, corrected).section("train")["train"]["correction"] == {"type": "masked", "level": "token", "low": 0.5, "high": 2.0}
    assert load_recipe(recipe_dir, [corrected[0], "train.correction.level=sequence"]).section("train")["train"]["correction"]["cap"] == 5.0
    assert load_recipe(recipe_dir, [corrected[0], "train.correction=null"]).section("train")["train"]["correction"] is None
    assert load_recipe(recipe_dir, ["verifier.message=any"]).section("verifier")["verifier"]["message_similarity"] == 0.8


def test_interpolation_reads_another_key(recipe_dir: Path) -> None:
    (recipe_dir / "recipe.yaml").write_text(RECIPE.replace("group_size: 2", "group_size: ${profile.num_samples}"))
    assert load_recipe(recipe_dir, ["profile.num_samples=6"]).recipe.train.group_size == 6


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["profile.num_samples=1"], ["profile.num_samples is 1", "greater than or equal to 2"]),
        (["select.lambda_diff=0"], ["select.lambda_diff is 0", "greater than 0"]),
        (["select.lambda_diff=1.01"], ["select.lambda_diff is 1.01", "less than or equal to 1"]),
        (["select.lambda_dif=0.5"], ["unknown key select.lambda_dif", "did you mean 'lambda_diff'"]),
        (["trian.num_steps=3"], ["unknown key trian", "did you mean 'train'"]),
        (["eval.suites=[{type: held_out, num_candidate: 3}]"], ["eval.suites.0.num_candidate", "did you mean 'num_candidates'"]),
        (["model.type=foo"], ["model is", "'scratch'"]),
        (["train.kl=3"], ["train.kl is 3"]),
        (["seed=99999999999999999999"], ["seed is 99999999999999999999", "less than or equal to"]),
        (["train.num_steps=99999999999999999999"], ["train.num_steps is", "less than or equal to"]),
        (["train.optimizer.lr=.inf"], ["train.optimizer.lr is inf", "finite"]),
        (["name=../elsewhere"], ["name is '../elsewhere'", "pattern"]),
        (["name='a b'"], ["name is 'a b'", "pattern"]),
        (["nonsense"], ["'nonsense' is not an override", "key=value"]),
        (["=3"], ["is not an override"]),
        (["train.num_steps=[1"], ["train.num_steps=[1", "YAML"]),
        (["train.num_steps=${nowhere}"], ["must name an existing key"]),
        (["model={type: scratch, hidden_size: 10}"], ["model.num_layers is missing"]),
        (["moe.router_replay=rollout"], ["router_replay is rollout but the engine transformers is not told to return them", "enable_return_routed"]),
        (["moe.router_replay=rollout", "engine={type: scripted, path: x}"], ["the engine scripted cannot return any"]),
        (["moe.router_replay=true"], ["moe.router_replay is", "'rollout'"]),
        (["select={rule: window, low: 0.7, high: 0.3}"], ["low (0.7) must not exceed high (0.3)"]),
    ],
)
def test_errors_are_one_line_and_name_the_key(recipe_dir: Path, overrides: list[str], expected: list[str]) -> None:
    with pytest.raises(UserError) as caught:
        load_recipe(recipe_dir, overrides)
    message = str(caught.value)
    assert "\n" not in message
    for part in expected:
        assert part in message


OPEN_KEYS = [
    "num_samples: 4",
    "lambda_diff: 0.6",
    "group_size: 2",
    "beta: 0",
    "low: 0.2",
    "high: 0.28",
    "truncated: zero",
    "history_reasoning: template",
]


@pytest.mark.parametrize("key", OPEN_KEYS)
def test_what_the_paper_leaves_open_has_no_silent_default(recipe_dir: Path, key: str) -> None:
    (recipe_dir / "recipe.yaml").write_text(
        RECIPE.replace(f", {key}", "").replace(f"{key}, ", "").replace(f"{{{key}}}", "{}").replace(f"  {key}\n", "")
    )
    with pytest.raises(UserError, match=rf"{key.split(':')[0]} is missing"):
        load_recipe(recipe_dir)


@pytest.mark.parametrize("text", ["- a\n- b\n", "name: [", "a: 1\na: 2\n", "\x00", "just words"])
def test_a_file_that_is_no_mapping_is_refused(recipe_dir: Path, text: str) -> None:
    (recipe_dir / "recipe.yaml").write_text(text)
    with pytest.raises(UserError):
        load_recipe(recipe_dir)


def test_extends_in_a_circle_or_to_nowhere_is_refused(recipe_dir: Path) -> None:
    (recipe_dir / "other.yaml").write_text("extends: recipe.yaml\n")
    (recipe_dir / "recipe.yaml").write_text("extends: other.yaml\n" + RECIPE)
    with pytest.raises(UserError, match="circle"):
        load_recipe(recipe_dir)
    (recipe_dir / "recipe.yaml").write_text("extends: absent.yaml\n" + RECIPE)
    with pytest.raises(UserError, match="does not exist"):
        load_recipe(recipe_dir)


def test_a_key_the_recipe_leaves_to_the_user_is_asked_for(recipe_dir: Path) -> None:
    (recipe_dir / "recipe.yaml").write_text(RECIPE.replace("{paths: [data], held_out_frac: 0.1}", "\n  paths: ???\n  held_out_frac: 0.1"))
    with pytest.raises(UserError, match=r"ingest\.paths is not set.*ingest\.paths=VALUE"):
        load_recipe(recipe_dir)
    assert load_recipe(recipe_dir, ["ingest.paths=[data]"]).recipe.ingest.paths == ("data",)


def test_a_folder_without_recipe_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"holds no recipe\.yaml"):
        load_recipe(tmp_path)


def test_generated_pages_are_current() -> None:
    assert (DOCS / "config.md").read_text() == config_page(), "run `make docs`"
    assert (DOCS / "cluster_files.md").read_text() == cluster_page(), "run `make docs`"
    assert (DOCS / "metrics.md").read_text() == metrics_page(), "run `make docs`"


def test_a_verifier_is_read_from_words() -> None:
    config = load_verifier("tool_call", ["message=exact", "text_similarity=0.5"])
    assert config == ToolCallVerifierConfig(type="tool_call", message="exact", text_similarity=0.5)


@pytest.mark.parametrize(
    ("name", "words", "expected"),
    [
        ("tool_cal", [], ["--verifier is 'tool_cal'", "exact", "did you mean 'tool_call'?"]),
        ("tool_call", [], ["--verifier tool_call: message is missing", "give it after the verifier: message=VALUE"]),
        ("tool_call", ["mesage=exact"], ["unknown key mesage", "did you mean 'message'?"]),
        ("tool_call", ["message=any", "text_similarity=3"], ["text_similarity is 3", "less than or equal to 1", "prose"]),
        ("tool_call", ["message"], ["'message' is not an override"]),
    ],
)
def test_errors_of_a_verifier_s_words_name_the_key(name: str, words: list[str], expected: list[str]) -> None:
    with pytest.raises(UserError) as caught:
        load_verifier(name, words)
    for part in expected:
        assert part in str(caught.value)


def test_a_section_of_its_own_form_replaces_an_interpolation(recipe_dir: Path) -> None:
    """An arm under another verifier replaces `verifier: ${eval.verifier}`; nothing of what it stands for is left or changed."""
    judged = ["eval.verifier={type: tool_call, message: exact}", "verifier=${eval.verifier}"]
    shared = load_recipe(recipe_dir, judged).recipe
    assert shared.verifier == shared.eval.verifier
    replaced = load_recipe(recipe_dir, [*judged, "verifier={type: exact}"]).recipe
    assert replaced.verifier.model_dump() == {"type": "exact"}
    assert replaced.eval.verifier == shared.eval.verifier


def test_random_turns_need_one_number(recipe_dir: Path) -> None:
    for both in ("{rule: random}", "{rule: random, num_turns: 5, as_many_as: runs/a}"):
        with pytest.raises(UserError, match="needs one of num_turns and as_many_as"):
            load_recipe(recipe_dir, [f"select={both}"])


REMOTE = "placement={type: remote}"
NCCL = "placement={type: processes, num_replicas: 2, transfer: nccl"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["profile.num_workers=2", REMOTE], "profile.num_workers is 2 and placement.type is remote"),
        (["profile.num_workers=2", "placement={type: processes, num_replicas: 2, devices: ['0', '1']}"], "placement.type is processes"),
        ([NCCL + "}"], "transfer is nccl and devices is empty"),
    ],
)
def test_engines_that_would_share_what_only_one_can_have_are_refused(recipe_dir: Path, words: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        load_recipe(recipe_dir, words)


@pytest.mark.parametrize("words", [["profile.num_workers=2"], [REMOTE], [NCCL + ", devices: ['0', '1']}"]])
def test_engines_of_their_own_are_not(recipe_dir: Path, words: list[str]) -> None:
    load_recipe(recipe_dir, words)
