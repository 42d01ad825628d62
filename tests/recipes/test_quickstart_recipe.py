"""The quickstart recipe loads, states what the method needs, and its expected numbers are ranges that a run can be held to."""

from __future__ import annotations

from pathlib import Path

from pivotrl.config.load import load_recipe
from pivotrl.config.schema import Eq5Rule, HeldOutSuite, ScratchModel, SkillsSuite, ToolCallVerifierConfig, WorldSuite
from pivotrl.rundir import read_json

RECIPE = Path(__file__).resolve().parents[2] / "recipes" / "quickstart"


def test_it_is_a_small_model_from_scratch_on_the_papers_rule() -> None:
    recipe = load_recipe(RECIPE).recipe
    model = recipe.model
    assert isinstance(model, ScratchModel)
    assert model.max_position_embeddings <= 256
    assert recipe.render.max_prompt_tokens + recipe.sampling.max_new_tokens <= model.max_position_embeddings
    assert isinstance(recipe.select, Eq5Rule)
    assert isinstance(recipe.verifier, ToolCallVerifierConfig)
    assert recipe.verifier.message == "similarity", "any message passing would be an exploit"
    assert {type(suite) for suite in recipe.eval.suites} == {WorldSuite, HeldOutSuite, SkillsSuite}


def test_the_turn_budget_is_what_the_readme_says() -> None:
    train = load_recipe(RECIPE).recipe.train
    turns = train.num_steps * train.pivots_per_step * train.group_size
    assert f"{turns:,}" in (RECIPE / "README.md").read_text()


def test_every_file_is_named_in_the_readme() -> None:
    text = (RECIPE / "README.md").read_text()
    for path in RECIPE.iterdir():
        assert path.name == "README.md" or path.name in text


def test_the_template_exists_where_the_recipe_says() -> None:
    loaded = load_recipe(RECIPE)
    template = loaded.recipe.render.chat_template
    assert template is not None
    assert loaded.expand(template, Path("run")).is_file()


def test_expected_ranges_are_ranges() -> None:
    scores = read_json(RECIPE / "expected.json")["scores"]
    assert all(limits["low"] < limits["high"] for limits in scores.values())
    assert scores["world/change"]["low"] > 0, "success must rise"
    assert scores["skills/change"]["low"] >= -0.1, "skills must be kept"
