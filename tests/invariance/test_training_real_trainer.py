"""The loop with the megatron-core trainer and a real engine: log-probs agree at every step, so weights arrive; a resume is bit for bit."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from pathlib import Path

import pytest
from fakes.bandit import Killed
from fakes.tiny_run import run_tiny, save_tiny, stop_tokens, tiny_config

from pivotrl.config.engines import ProcessesPlacement, TransformersEngineConfig
from pivotrl.megatron.trainer import Trainer
from pivotrl.rollouts.engine import Engine, GenerationRequest
from pivotrl.rollouts.launchers import LocalLauncher
from pivotrl.rollouts.pool import EnginePool
from pivotrl.rollouts.render import Renderer
from pivotrl.rundir import read_jsonl
from pivotrl.weights.shared_memory import SharedMemoryStore

pytestmark = pytest.mark.usefixtures("one_thread")

# float32 sums in another order: kernels of the engine against those of the trainer.
PARITY = 1e-4


@pytest.fixture(scope="module")
def hf_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("hf"), "qwen3", tie_word_embeddings=True)


@pytest.mark.slow
def test_engine_and_trainer_agree_at_every_step_of_a_run_with_every_option(tmp_path: Path, hf_dir: Path) -> None:
    """KL, two updates per batch, masked truncations, validation: and the engine samples from what the trainer holds, step after step."""
    options = tiny_config(updates_per_rollout=2, kl={"beta": 0.05}, validation={"every_steps": 2, "num_pivots": 2, "num_samples": 2})
    run_tiny(tmp_path / "train", hf_dir, options)
    rows = [row for row in read_jsonl(tmp_path / "train" / "metrics.jsonl") if "objective/loss/mean" in row]
    assert [row["step"] for row in rows] == [0, 2]
    assert all(0 < row["objective/logprob_mismatch/max"] < PARITY for row in rows)
    assert all(row["optim/grad_norm/mean"] > 0 for row in rows)
    assert rows[1]["objective/kl_reference/mean"] > 10 * PARITY
    assert (tmp_path / "train" / "hf" / "model.safetensors").exists()


@pytest.mark.slow
def test_killed_and_resumed_equals_undisturbed(tmp_path: Path, hf_dir: Path) -> None:
    class Dies(Trainer):
        """Killed in its fourth step, after the checkpoint of the second."""

        def step(self, *args: object, **settings: object):  # type: ignore[override]
            if self.steps_done == 3:
                raise Killed
            return super().step(*args, **settings)  # type: ignore[arg-type]

    run_tiny(tmp_path / "undisturbed", hf_dir, tiny_config())
    assert all(row["optim/grad_norm/mean"] > 0 for row in read_jsonl(tmp_path / "undisturbed" / "metrics.jsonl"))
    with pytest.raises(Killed):
        run_tiny(tmp_path / "killed", hf_dir, tiny_config(), trainer_class=Dies)
    run_tiny(tmp_path / "killed", hf_dir, tiny_config())
    for name in ("metrics.jsonl", "rollouts.jsonl", "ledger.jsonl", "hf/model.safetensors", "manifest.json"):
        assert (tmp_path / "killed" / name).read_bytes() == (tmp_path / "undisturbed" / name).read_bytes(), name


@pytest.mark.slow
def test_a_run_whose_engine_is_killed_ends_as_undisturbed_and_says_so(tmp_path: Path, hf_dir: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """SIGKILL before the first weights were handed over, and after: rebuilt from the checkpoint, and from shared memory."""

    class Mortal(EnginePool):
        """Its engine is killed before the first and the fourth batch of requests: rollouts of a step, then the probe after it, and so on."""

        num_calls = 0

        def generate(self, requests: Sequence[GenerationRequest]):
            self.num_calls += 1
            if self.num_calls in (1, 4):
                os.kill(self._launcher.process_id(0), signal.SIGKILL)  # type: ignore[attr-defined]
            return super().generate(requests)

    def processes(hf_dir: Path, renderer: Renderer, engine: TransformersEngineConfig) -> Engine:
        placement = ProcessesPlacement(type="processes", bucket_bytes=4096)
        start = {
            "engine": engine.model_dump(mode="json"),
            "checkpoint": str(hf_dir),
            "stop_token_ids": stop_tokens(renderer),
            "pad_token_id": renderer.pad_token_id,
            "num_threads": 1,
        }
        return Mortal(LocalLauncher(placement, tmp_path / "engines", num_threads=1), SharedMemoryStore(), placement, start)

    run_tiny(tmp_path / "undisturbed", hf_dir, tiny_config())
    run_tiny(tmp_path / "killed", hf_dir, tiny_config(), start=processes)
    for name in ("metrics.jsonl", "rollouts.jsonl", "ledger.jsonl", "hf/model.safetensors", "manifest.json"):
        assert (tmp_path / "killed" / name).read_bytes() == (tmp_path / "undisturbed" / name).read_bytes(), name
    assert capfd.readouterr().err.count("was lost: connection lost") == 2
    losses = [row.get("rollout/engine_losses/sum", 0) for row in read_jsonl(tmp_path / "killed" / "timing.jsonl")]
    assert sum(losses) == 2
