"""A whole stage in which the trainer follows a bfloat16 engine's routes: they agree better, and kills, processes and rounds ahead change nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import pytest
from fakes.bandit import Killed
from fakes.tiny_run import run_tiny, save_tiny, stop_tokens, tiny_config

from pivotrl.config.engines import ProcessesPlacement, TransformersEngineConfig
from pivotrl.config.schema import MoeConfig, SamplingConfig
from pivotrl.megatron.trainer import Trainer
from pivotrl.rollouts.engine import Engine
from pivotrl.rollouts.launchers import LocalLauncher
from pivotrl.rollouts.pool import EnginePool
from pivotrl.rollouts.render import Renderer
from pivotrl.rundir import read_jsonl
from pivotrl.weights.shared_memory import SharedMemoryStore

pytestmark = pytest.mark.usefixtures("one_thread")

CORRECTION = {"type": "truncated", "level": "token", "cap": 4.0}
ENGINE = TransformersEngineConfig(type="transformers", batch_size=16, dtype="bfloat16", enable_return_routed_experts=True)
REPLAY = MoeConfig(router_replay="rollout")
FILES = ("metrics.jsonl", "rollouts.jsonl", "ledger.jsonl", "hf/model.safetensors", "manifest.json")


@pytest.fixture(scope="module")
def hf_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("hf"), "qwen3_moe", num_experts=32, num_experts_per_tok=4, num_hidden_layers=4, norm_topk_prob=True)


@pytest.mark.slow
@pytest.mark.parametrize("batching", ["packed", "shared_prefix"])
def test_following_the_engines_routes_lowers_the_mismatch(tmp_path: Path, hf_dir: Path, batching: str) -> None:
    """Both start from the same weights and sample the same first round."""
    mismatch: dict[str, tuple[float, float]] = {}
    modes: tuple[Literal["none", "rollout"], ...] = ("none", "rollout")
    for replay in modes:
        sampling = SamplingConfig(temperature=0.8, max_new_tokens=20, truncated="mask")
        settings = tiny_config(num_steps=2, group_size=16, batching=batching, updates_per_rollout=2, kl={"beta": 0.05})
        run_tiny(tmp_path / replay, hf_dir, settings, engine=ENGINE, moe=MoeConfig(router_replay=replay), sampling=sampling)
        row = next(iter(read_jsonl(tmp_path / replay / "metrics.jsonl")))
        mismatch[replay] = row["objective/logprob_mismatch/mean"], row["objective/logprob_mismatch/max"]
        assert row.get("optim/routes_replayed/frac") == (1.0 if replay == "rollout" else None)
    assert mismatch["rollout"][0] < 0.9 * mismatch["none"][0]
    assert mismatch["rollout"][1] < 0.8 * mismatch["none"][1]


@pytest.mark.slow
@pytest.mark.parametrize("age", [0, 1])
def test_killed_and_resumed_equals_undisturbed(tmp_path: Path, hf_dir: Path, age: int) -> None:
    """At age 1 the round sampled ahead, routes included, stands in the checkpoint: nothing else could give them."""

    class Dies(Trainer):
        """Killed in its fourth step, after the checkpoint of the second."""

        def step(self, *args: object, **settings: object):  # type: ignore[override]
            if self.steps_done == 3:
                raise Killed
            return super().step(*args, **settings)  # type: ignore[arg-type]

    settings = tiny_config(correction=CORRECTION, max_policy_age=age)
    run_tiny(tmp_path / "undisturbed", hf_dir, settings, engine=ENGINE, moe=REPLAY)
    assert [row["optim/routes_replayed/frac"] for row in read_jsonl(tmp_path / "undisturbed" / "metrics.jsonl")] == [1.0] * 4
    with pytest.raises(Killed):
        run_tiny(tmp_path / "killed", hf_dir, settings, engine=ENGINE, moe=REPLAY, trainer_class=Dies)
    run_tiny(tmp_path / "killed", hf_dir, settings, engine=ENGINE, moe=REPLAY)
    for name in FILES:
        assert (tmp_path / "killed" / name).read_bytes() == (tmp_path / "undisturbed" / name).read_bytes(), name


@pytest.mark.slow
def test_an_engine_in_a_process_of_its_own_gives_the_same_run(tmp_path: Path, hf_dir: Path) -> None:
    def processes(hf_dir: Path, renderer: Renderer, engine: TransformersEngineConfig) -> Engine:
        placement = ProcessesPlacement(type="processes", bucket_bytes=4096)
        start = {
            "engine": engine.model_dump(mode="json"),
            "checkpoint": str(hf_dir),
            "stop_token_ids": stop_tokens(renderer),
            "pad_token_id": renderer.pad_token_id,
            "num_threads": 1,
        }
        return EnginePool(LocalLauncher(placement, tmp_path / "engines", num_threads=1), SharedMemoryStore(), placement, start)

    settings = tiny_config(num_steps=2)
    run_tiny(tmp_path / "here", hf_dir, settings, engine=ENGINE, moe=REPLAY)
    run_tiny(tmp_path / "there", hf_dir, settings, engine=ENGINE, moe=REPLAY, start=processes)
    for name in FILES:
        assert (tmp_path / "there" / name).read_bytes() == (tmp_path / "here" / name).read_bytes(), name
