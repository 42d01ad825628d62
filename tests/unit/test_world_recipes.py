"""What each world writes for its recipe: read by the product's adapters, short enough for a tiny policy, states as the episodes have them."""

from __future__ import annotations

import random
from functools import cache
from pathlib import Path

import pytest
from fakes.world_verifiers import FOLDERS, RECIPES

from pivotrl.actions.registry import action_format
from pivotrl.config.load import load_recipe
from pivotrl.config.schema import HuggingFaceModel, Recipe, ScratchModel, WorldConfig
from pivotrl.errors import UserError
from pivotrl.pipeline import run_stage
from pivotrl.pivots.candidates import action_of, eligible_turns
from pivotrl.rollouts.render import Renderer
from pivotrl.rundir import Stage, read_jsonl
from pivotrl.trajectories.ingest import run_ingest
from pivotrl.trajectories.registry import adapter
from pivotrl.trajectories.source import RawRow
from pivotrl.trajectories.store import CandidateStore, TrajectoryStore
from pivotrl.types import Outcome, Role, State, Trajectory
from pivotrl.worlds.generate import EXPERT_FILE, PRETRAINING_FILE, TOKENIZER_DIR, play, pretraining_mixture, write_world
from pivotrl.worlds.protocol import TaskSplit
from pivotrl.worlds.registry import WORLDS

NEW = [name for name in WORLDS if name != "order_desk"]
CONTEXT = 256


def recipe_of(name: str) -> Recipe:
    return load_recipe(RECIPES / FOLDERS[name]).recipe


@pytest.fixture(scope="module")
def worlds(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run directory per world, its `world` stage finished with fewer pretraining episodes."""
    root = tmp_path_factory.mktemp("worlds")
    for name in NEW:
        recipe = recipe_of(name)
        assert recipe.world is not None
        assert isinstance(recipe.model, ScratchModel)
        small = recipe.world.model_copy(update={"num_pretraining_episodes": 300, "num_skill_examples": 800})
        template = (RECIPES / "quickstart" / "chat_template.jinja").read_text()
        stage = Stage.open(root / name, "world", config={}, inputs={}, seed=17)
        form = action_format(recipe.render.action_format)
        write_world(stage, config=small, model=recipe.model, run_seed=17, action_format=form, chat_template=template)
    return root


@cache
def renderer(world: Path, name: str) -> Renderer:
    return Renderer.load(world / TOKENIZER_DIR, recipe_of(name).render, None)


def chat_rows(world: Path) -> list[Trajectory]:
    """Pretraining rows as the `sft` stage reads them."""
    rows = read_jsonl(world / PRETRAINING_FILE)
    return [adapter("openai_chat").convert(RawRow("p", index, index + 1, row), None).trajectory for index, row in enumerate(rows)]


@pytest.mark.parametrize("name", NEW)
def test_expert_files_are_ingested_as_their_domains_successes(worlds: Path, tmp_path: Path, name: str) -> None:
    """Detected, not declared; every row kept, and every command or call a candidate."""
    recipe = recipe_of(name)
    paths = [worlds / name / "world" / EXPERT_FILE]
    run_ingest(Stage.open(tmp_path, "ingest", config={}, inputs={}, seed=17), recipe.ingest, paths=paths, run_seed=17)
    found = list(TrajectoryStore.open(tmp_path / "ingest").iterate())
    assert recipe.world is not None
    assert len(found) == recipe.world.num_train_tasks
    assert {one.domain for one in found} == {WORLDS[name].world.domain}
    assert {one.outcome for one in found} == {Outcome.SUCCESS}
    assert {one.source_format for one in found} == {"terminus2" if name == "terminal" else "openai_chat"}
    num_turns = sum(len(eligible_turns(one)[0]) for one in found)
    # The same action in the same state is one candidate, and first turns may repeat.
    assert 0.9 * num_turns < sum(1 for _ in CandidateStore.open(tmp_path / "ingest").iterate()) <= num_turns
    num_completions = len(found) if name == "terminal" else 0
    assert num_turns == sum(message.role is Role.ASSISTANT for one in found for message in one.messages) - num_completions


@pytest.mark.parametrize("name", NEW)
def test_a_candidates_prompt_is_the_episodes_prompt(worlds: Path, name: str) -> None:
    """The tokens that profiling and training see are those of an evaluation episode in the same place."""
    render = renderer(worlds / name / "world", name)
    scripted = WORLDS[name]
    task = scripted.world.tasks(TaskSplit.TRAIN, num_tasks=1, seed=17)[0]
    rows = {row["task_id"]: row for row in read_jsonl(worlds / name / "world" / EXPERT_FILE)}
    form = "terminus2" if name == "terminal" else "openai_chat"
    ingested = adapter(form).convert(RawRow("e", 0, 1, rows[task.id]), None).trajectory
    episode = scripted.world.reset(task)
    for index, message in enumerate(ingested.messages):
        if message.role is Role.ASSISTANT:
            before = State(ingested.messages[:index], ingested.tools, ingested.tool_origin)
            assert render.render_prompt(before) == render.render_prompt(episode.state())
            episode.act(action_of(message))
    assert episode.success


@pytest.mark.parametrize("name", NEW)
def test_contexts_stay_below_256_tokens(worlds: Path, name: str) -> None:
    """Whole expert episodes, and all but the longest of the noisy ones, which go round in circles."""
    render, scripted = renderer(worlds / name / "world", name), WORLDS[name]
    lengths: list[int] = []
    for task in scripted.world.tasks(TaskSplit.TEST, num_tasks=72, seed=17):
        episode = play(scripted.world.reset(task), scripted.expert(random.Random(task.id)))
        state = episode.state()
        found = render.render_demonstration(state.messages, state.tools, state.tool_origin, max_tokens=4096)
        assert found.num_dropped_turns == 0
        lengths.append(len(found.sequences[0].token_ids))
    assert max(lengths) < CONTEXT, sorted(lengths)
    recipe = recipe_of(name)
    longest = max(
        len(render.render_action(action_of(message), one.tools))
        for one in chat_rows(worlds / name / "world")
        for message in one.messages
        if message.role is Role.ASSISTANT
    )
    assert longest <= recipe.sampling.max_new_tokens


@pytest.mark.parametrize("name", NEW)
def test_pretraining_rows_are_written_in_the_recipes_format(worlds: Path, name: str) -> None:
    render = renderer(worlds / name / "world", name)
    for one in chat_rows(worlds / name / "world")[:120]:
        found = render.render_demonstration(one.messages, one.tools, one.tool_origin, max_tokens=4096)
        assert found.num_dropped_turns == 0


def test_a_mixture_of_all_worlds_is_one_file_in_one_format(worlds: Path) -> None:
    """Under hermes a terminal episode is text, and its tokens are those of the terminal's own recipe."""
    config = WorldConfig(
        type="order_desk",
        pretraining_worlds=("order_desk", "terminal", "swe", "search"),
        num_train_tasks=1,
        num_test_tasks=1,
        num_pretraining_episodes=41,
        num_skill_examples=24,
        noise=0.2,
    )
    rows = pretraining_mixture(config, 17, action_format("hermes"))
    episodes = [row for row in rows if not row["task_id"].startswith("skills-")]
    assert len(episodes) == 41
    spoken = next(row for row in episodes if not row["tools"])
    conversation = adapter("openai_chat").convert(RawRow("p", 0, 1, spoken), None).trajectory
    render = renderer(worlds / "terminal" / "world", "terminal")
    task = next(task for task in WORLDS["terminal"].world.tasks(TaskSplit.PRETRAINING, num_tasks=10, seed=17) if task.id == spoken["task_id"])
    episode = WORLDS["terminal"].world.reset(task)
    for message in conversation.messages:
        if message.role is Role.ASSISTANT:
            episode.act(action_format("terminus2").parse(message.content))
    as_text = render.template.text(conversation.messages, (), add_generation_prompt=False)
    assert as_text == render.template.text(episode.state().messages, (), add_generation_prompt=False)


def test_json_tools_under_the_terminus_format_are_the_users_error() -> None:
    recipe = recipe_of("terminal")
    assert recipe.world is not None
    config = recipe.world.model_copy(update={"pretraining_worlds": ("terminal", "swe"), "num_pretraining_episodes": 4})
    with pytest.raises(UserError, match="leave the world out of"):
        pretraining_mixture(config, 17, action_format("terminus2"))


def test_a_world_beside_a_checkpoint_writes_the_experts_alone(tmp_path: Path) -> None:
    loaded = load_recipe(RECIPES / "world_swe", ["model.type=huggingface", "model.path=nowhere", "sft=null"])
    assert isinstance(loaded.recipe.model, HuggingFaceModel)
    run_stage("ingest", loaded, tmp_path)
    assert [path.name for path in (tmp_path / "world").glob("*.jsonl")] == [EXPERT_FILE]
    assert (tmp_path / "ingest" / "candidates.parquet").exists()
