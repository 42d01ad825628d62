"""A run in an environment whose agents play elsewhere: its stages, what is learned from, what is scored, and a resumed run as an undisturbed one.

The agent plays the order desk over HTTP; it likes vowels, so that a random policy is rewarded now and then.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from fakes.gym_agents import FakeGym, desk_rows, fake_gym
from fakes.stage_files import contents
from fakes.tiny_run import save_tiny
from fakes.tiny_tokenizer import tiny_tokenizer
from safetensors.torch import load_file, save_file

from pivotrl import build, pipeline
from pivotrl.config.load import LoadedRecipe, load_recipe
from pivotrl.errors import InfraLimitError, UserError
from pivotrl.rundir import Stage, read_json, read_jsonl
from pivotrl.worlds.protocol import TaskSplit

RECIPE = Path(__file__).parent / "environment_recipe"


def likes_vowels(result: dict[str, Any]) -> tuple[int, dict[str, Any]]:
    first = (result["response"]["output"] or [{}])[0].get("content") or ""
    return 200, {**result, "reward": 1.0 if set("aeiou") & set(first) else 0.25}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model that ends a turn at every fifth token or so: one coordinate of every embedding is large, and only the end token looks at it."""
    path = save_tiny(tmp_path_factory.mktemp("model"), "llama", max_position_embeddings=2048)
    weights = load_file(path / "model.safetensors")
    end = tiny_tokenizer().convert_tokens_to_ids("<|im_end|>")
    assert isinstance(end, int)
    weights["model.embed_tokens.weight"][:, 0] = 3.0
    weights["lm_head.weight"][:, 0] = 0.0
    weights["lm_head.weight"][end] = 2.0 * torch.eye(weights["lm_head.weight"].shape[1])[0]
    save_file(weights, path / "model.safetensors", {"format": "pt"})
    return path


@pytest.fixture
def gym(tmp_path: Path) -> Iterator[FakeGym]:
    train, rows = desk_rows(5)
    test, test_rows = desk_rows(3, TaskSplit.TEST)
    for name, lines in (("train", rows), ("test", test_rows)):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in lines))
    with fake_gym([*train, *test]) as gym:
        gym.changes, gym.max_turns = likes_vowels, 3
        yield gym


@pytest.fixture
def loaded(gym: FakeGym, checkpoint: Path, tmp_path: Path) -> LoadedRecipe:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        listen = f"127.0.0.1:{free.getsockname()[1]}"
    gym.policy_base_url = f"http://{listen}/v1"
    words = (f"model.path={checkpoint}", f"environment.head={gym.head}", f"environment.listen={listen}")
    rows = (f"environment.train_rows=[{tmp_path}/train.jsonl]", f"environment.test_rows=[{tmp_path}/test.jsonl]")
    return load_recipe(RECIPE, (*words, *rows))


def test_the_stages_of_a_run_and_what_they_learn_from(loaded: LoadedRecipe, gym: FakeGym, tmp_path: Path) -> None:
    assert loaded.recipe.stages == ("train", "eval", "report")
    run = tmp_path / "run"
    pipeline.run_stage("train", loaded, run)
    played = len(gym.runs)
    assert played == 4 * 2 * 4
    rollouts = list(read_jsonl(run / "train" / "rollouts.jsonl"))
    assert {row["task_id"] for row in rollouts} == {row.id for row in build.environment_rows(loaded, run, "train_rows")[:5]}
    # By what the environment itself said: the policy's first words of an episode decide.
    for row in rollouts:
        if row["verdict"] == "ok":
            first = next(one for one in rollouts if one["turn"] == 0 and all(one[key] == row[key] for key in ("step", "task_id", "sample_index")))
            assert row["reward"] == (1.0 if set("aeiou") & set(first["text"].split("<|im_end|>")[0]) else 0.25)
    assert {row["verdict"] for row in rollouts} == {"ok", "invalid"}
    assert len({row["reward"] for row in rollouts if row["verdict"] == "ok"}) == 2
    assert max(row["turn"] for row in rollouts) >= 2
    assert sum(len(one["usage"]) > 0 for one in gym.replies) == len(rollouts), "every turn that was sampled is learned from"

    before = len(gym.replies)
    pipeline.run_stage("eval", loaded, run)
    scores = read_json(run / "eval" / "scores.json")
    assert [row["name"] for row in scores["suites"]] == ["environment"] * 2
    assert len(gym.runs) - played == 2 * 3 * 2
    assert scores["turns"] == len(gym.replies) - before
    pipeline.run_stage("report", loaded, run)
    assert ">environment<" in (run / "report" / "index.html").read_text()


def test_a_resumed_run_ends_with_the_bytes_of_an_undisturbed_one(loaded: LoadedRecipe, gym: FakeGym, tmp_path: Path) -> None:
    undisturbed, disturbed = tmp_path / "undisturbed", tmp_path / "disturbed"
    pipeline.run_stage("train", loaded, undisturbed)
    num_runs = len(gym.runs)

    def refuses_late(result: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        return likes_vowels(result) if len(gym.runs) < num_runs + 20 else (500, {"detail": "the sandbox is gone"})

    gym.changes = refuses_late
    with pytest.raises(InfraLimitError, match=r"step 2"):
        pipeline.run_stage("train", loaded, disturbed)
    gym.changes = lambda result: (422, {"detail": "field required"})
    with pytest.raises(UserError, match="refuses row"):
        pipeline.run_stage("train", loaded, disturbed)
    gym.changes = likes_vowels
    pipeline.run_stage("train", loaded, disturbed)
    assert Stage.is_done(disturbed, "train")
    expected, actual = contents(undisturbed / "train"), contents(disturbed / "train")
    assert sorted(actual) == sorted(expected)
    assert [name for name in expected if actual[name] != expected[name]] == []
    assert any(name.endswith(".safetensors") for name in expected)


def test_where_episodes_are_played_is_no_part_of_what_a_stage_is(loaded: LoadedRecipe, gym: FakeGym, tmp_path: Path) -> None:
    """Another address, port and patience resume the same directory; other rows do not."""
    run = tmp_path / "run"
    gym.changes = lambda result: (422, {"detail": "field required"})
    with pytest.raises(UserError, match="refuses row"):
        pipeline.run_stage("train", loaded, run)
    rows = (tmp_path / "train.jsonl").read_text()
    (tmp_path / "moved.jsonl").write_text(rows)
    gym.changes = likes_vowels
    here = loaded.recipe.environment
    assert here is not None
    moved = here.model_copy(update={"train_rows": (str(tmp_path / "moved.jsonl"),), "max_concurrent_episodes": 3, "episode_deadline_s": 60})
    changed = LoadedRecipe(loaded.recipe.model_copy(update={"environment": moved}), loaded.directory, loaded.origins)
    (tmp_path / "moved.jsonl").write_text(rows.splitlines()[0] + "\n" + rows.splitlines()[1] + "\n")
    with pytest.raises(UserError, match="holds output of another config or other inputs"):
        pipeline.run_stage("train", changed, run)
    (tmp_path / "moved.jsonl").write_text(rows)
    pipeline.run_stage("train", changed, run)
    assert Stage.is_done(run, "train")
