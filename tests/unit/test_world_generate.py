"""What the world stage writes: the same bytes twice, episodes that fit the context, rows the chat adapter reads without repair."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

import pytest

from pivotrl.actions.registry import action_format
from pivotrl.config.schema import RenderConfig, ScratchModel, WorldConfig
from pivotrl.rollouts.render import Renderer
from pivotrl.rundir import SUCCESS, Stage, read_json, read_jsonl
from pivotrl.trajectories.adapters.openai_chat import ADAPTER
from pivotrl.trajectories.source import RawRow
from pivotrl.types import Outcome, ParseOutcome, Role
from pivotrl.worlds.generate import EXPERT_FILE, PRETRAINING_FILE, TOKENIZER_DIR, write_world
from pivotrl.worlds.skills import SKILLS

TEMPLATE = (Path(__file__).resolve().parents[2] / "recipes" / "quickstart" / "chat_template.jinja").read_text()
WORLD = WorldConfig(type="order_desk", num_train_tasks=24, num_test_tasks=12, num_pretraining_episodes=120, num_skill_examples=400, noise=0.4)
MODEL = ScratchModel(
    type="scratch",
    hidden_size=32,
    num_layers=1,
    num_attention_heads=2,
    num_key_value_heads=2,
    ffn_hidden_size=64,
    max_position_embeddings=256,
    vocab_size=512,
)
RENDER = RenderConfig(action_format="hermes", history_reasoning="drop", max_prompt_tokens=216)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("first"))


@lru_cache
def renderer(world: Path) -> Renderer:
    return Renderer.load(world / TOKENIZER_DIR, RENDER, None)


def write(run: Path, seed: int = 17) -> Path:
    stage = Stage.open(run, "world", config={}, inputs={}, seed=seed)
    write_world(stage, config=WORLD, model=MODEL, run_seed=seed, action_format=action_format("hermes"), chat_template=TEMPLATE)
    return stage.path


def files(world: Path) -> dict[str, bytes]:
    return {str(path.relative_to(world)): path.read_bytes() for path in world.rglob("*") if path.is_file() and path.name != "timing.json"}


def trajectories(world: Path, name: str) -> list:
    return [ADAPTER.convert(RawRow(name, index, index + 1, row), None) for index, row in enumerate(read_jsonl(world / name))]


def test_the_same_seed_gives_the_same_bytes_and_another_one_others(world: Path, tmp_path: Path) -> None:
    again, other = write(tmp_path / "again"), write(tmp_path / "other", seed=18)
    assert files(again) == files(world)
    assert files(other)[EXPERT_FILE] != files(world)[EXPERT_FILE]
    assert (world / SUCCESS).exists()


def test_expert_rows_are_read_without_repair_as_successes(world: Path) -> None:
    converted = trajectories(world, EXPERT_FILE)
    assert len(converted) == WORLD.num_train_tasks
    for one in converted:
        assert one.repairs == ()
        assert one.trajectory.outcome is Outcome.SUCCESS
        spoken = [message for message in one.trajectory.messages if message.role is Role.ASSISTANT]
        assert 4 <= len(spoken) <= 6
        assert {message.parse for message in spoken} <= {ParseOutcome.PARSED, ParseOutcome.ABSENT}


def test_noisy_episodes_fail_about_half_of_the_time(world: Path) -> None:
    converted = trajectories(world, PRETRAINING_FILE)
    episodes = [one.trajectory for one in converted if one.trajectory.tools]
    failed = sum(episode.outcome is Outcome.FAILURE for episode in episodes)
    assert len(episodes) == WORLD.num_pretraining_episodes
    assert 0.3 < failed / len(episodes) < 0.7
    assert read_json(world / "manifest.json")["summary"]["noisy_success_frac"] == pytest.approx(1 - failed / len(episodes))


def test_pretraining_and_demonstrated_tasks_are_disjoint(world: Path) -> None:
    tasks = [{row["task_id"] for row in read_jsonl(world / name)} for name in (EXPERT_FILE, PRETRAINING_FILE)]
    assert not tasks[0] & tasks[1]


def test_whole_conversations_fit_the_context(world: Path) -> None:
    render = renderer(world)
    for name in (EXPERT_FILE, PRETRAINING_FILE):
        for one in trajectories(world, name):
            found = render.render_demonstration(one.trajectory.messages, one.trajectory.tools, one.trajectory.tool_origin, max_tokens=256)
            assert len(found.sequences) == 1
            assert found.num_dropped_turns == 0


def test_the_template_is_prefix_stable_and_writes_calls_as_the_format_does(world: Path) -> None:
    render = renderer(world)
    assert render.prefix_stable
    assert render.template.calls_are_native
    call = next(message for message in trajectories(world, EXPERT_FILE)[0].trajectory.messages if message.tool_calls)
    text = render.template.text([call], (), add_generation_prompt=False)
    assert text == f'<|im_start|>assistant\n<tool_call>\n{{"name": "find", "arguments": {call.tool_calls[0].arguments}}}\n</tool_call><|im_end|>'


def test_the_tokenizer_is_the_models_size_and_keeps_digits_apart(world: Path) -> None:
    tokenizer = renderer(world).template.tokenizer
    assert len(tokenizer) == MODEL.vocab_size
    assert tokenizer.convert_tokens_to_ids("<tool_call>") not in tokenizer.all_special_ids
    texts = ("order 4207?", "x=3; x+=2", "\u0393\u03b1\u03bb\u03bb\u03af\u03b1;")
    assert [tokenizer.decode(tokenizer(text)["input_ids"]) for text in texts] == list(texts)
    pieces = [tokenizer.decode([token]) for token in tokenizer("order 4207")["input_ids"]]
    assert pieces[-4:] == [" 4", "2", "0", "7"]


def test_the_pretraining_mixture_asks_for_every_skill(world: Path) -> None:
    rows = [row for row in read_jsonl(world / PRETRAINING_FILE) if not row["tools"]]
    assert sum(len(row["messages"]) // 2 for row in rows) == WORLD.num_skill_examples
    assert len(SKILLS) == 8
