"""The loop with the megatron-core trainer and a real engine: log-probs agree at every step, so weights arrive; a resume is bit for bit."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch
from fakes.bandit import Killed
from fakes.objective_steps import train_config
from fakes.tiny_tokenizer import CHATML, save_checkpoint, tiny_tokenizer
from fakes.trainer_batches import hf_model

from pivotrl.config.engines import ProcessesPlacement, TransformersEngineConfig
from pivotrl.config.schema import MoeConfig, ParallelConfig, RenderConfig, SamplingConfig, TrainConfig
from pivotrl.megatron.trainer import Trainer
from pivotrl.rollouts.engine import Engine, GenerationRequest
from pivotrl.rollouts.launchers import LocalLauncher
from pivotrl.rollouts.local import LocalSampler, LocalTask
from pivotrl.rollouts.pool import EnginePool
from pivotrl.rollouts.render import Renderer
from pivotrl.rollouts.transformers_engine import TransformersEngine
from pivotrl.rundir import Stage, read_jsonl
from pivotrl.training.checks import Checks
from pivotrl.training.sources import PivotSource
from pivotrl.training.stages import run_train
from pivotrl.training.validation import Validation
from pivotrl.types import Action, Message, ParseOutcome, Role, State, ToolOrigin, Verdict
from pivotrl.weights.shared_memory import SharedMemoryStore

SEED = 3
# float32 sums in another order: kernels of the engine against those of the trainer.
PARITY = 1e-4
SAMPLING = SamplingConfig(temperature=0.8, max_new_tokens=5, truncated="mask")


class LikesVowels:
    """Reward 1 for a vowel in the text: a random model says one about half of the time."""

    def verify(self, state: State, expert: Action, action: Action) -> Verdict:
        return Verdict.ok(1.0, "vowel") if set("aeiou") & set(action.content) else Verdict.invalid("no vowel")


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Float sums depend on the number of threads."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def hf_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("hf")
    hf_model("qwen3", vocab_size=len(tiny_tokenizer()), tie_word_embeddings=True).save_pretrained(directory)
    return save_checkpoint(directory, chat_template=CHATML)


def config(**changes: object) -> TrainConfig:
    base = {"num_steps": 4, "group_size": 4, "pivots_per_step": 2, "micro_batch_tokens": 96, "optimizer": {"lr": 3e-3}, "checkpoint_every": 2}
    return train_config(**{**base, **changes})


ENGINE = TransformersEngineConfig(type="transformers", batch_size=16)


def stop_tokens(renderer: Renderer) -> tuple[int, ...]:
    """Every third token ends an action: a random model would hardly ever say the one that does, and all its samples would be cut."""
    return (*renderer.stop_token_ids, *range(5, len(tiny_tokenizer()), 3))


def in_process(hf_dir: Path, renderer: Renderer) -> Engine:
    return TransformersEngine.load(hf_dir, ENGINE, stop_token_ids=stop_tokens(renderer), pad_token_id=renderer.pad_token_id)


def run(folder: Path, hf_dir: Path, train: TrainConfig, *, trainer_class: type[Trainer] = Trainer, start=in_process) -> None:
    renderer = Renderer.load(hf_dir, RenderConfig(action_format="hermes", history_reasoning="drop", max_prompt_tokens=64), None)
    engine = start(hf_dir, renderer)
    sampler = LocalSampler(engine, renderer, LikesVowels(), SAMPLING, run_seed=SEED)
    tasks = [_task(renderer, name) for name in ("one", "two", "three", "four", "five")]
    source = PivotSource(sampler, tasks[:3], config=train, sampling=SAMPLING, decode=renderer.decode, seed=SEED)
    validation = train.validation and Validation(
        sampler, tasks[3:], train.validation, truncated="mask", max_infra_frac=train.max_infra_frac, seed=SEED
    )
    trainer = trainer_class.from_hf(
        hf_dir,
        optimizer=train.optimizer,
        parallel=ParallelConfig(),
        moe=MoeConfig(),
        num_steps=train.num_steps,
        seed=SEED,
        with_reference=train.kl.beta > 0,
    )
    stage = Stage("train", folder, {"stage": "train"}, started_s=0.0)
    folder.mkdir(exist_ok=True)
    run_train(stage, trainer, source, config=train, sampling=SAMPLING, checks=Checks(validation))
    engine.close()


def _task(renderer: Renderer, name: str) -> LocalTask:
    state = State((Message(Role.USER, f"Say {name}."),), (), ToolOrigin.NONE)
    return LocalTask(name, renderer.render_prompt(state), state, Action(name, (), None, ParseOutcome.ABSENT))


@pytest.mark.slow
def test_engine_and_trainer_agree_at_every_step_of_a_run_with_every_option(tmp_path: Path, hf_dir: Path) -> None:
    """KL, two updates per batch, masked truncations, validation: and the engine samples from what the trainer holds, step after step."""
    options = config(updates_per_rollout=2, kl={"beta": 0.05}, validation={"every_steps": 2, "num_pivots": 2, "num_samples": 2})
    run(tmp_path / "train", hf_dir, options)
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

    run(tmp_path / "undisturbed", hf_dir, config())
    assert all(row["optim/grad_norm/mean"] > 0 for row in read_jsonl(tmp_path / "undisturbed" / "metrics.jsonl"))
    with pytest.raises(Killed):
        run(tmp_path / "killed", hf_dir, config(), trainer_class=Dies)
    run(tmp_path / "killed", hf_dir, config())
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

    def processes(hf_dir: Path, renderer: Renderer) -> Engine:
        placement = ProcessesPlacement(type="processes", bucket_bytes=4096)
        start = {
            "engine": ENGINE.model_dump(mode="json"),
            "checkpoint": str(hf_dir),
            "stop_token_ids": stop_tokens(renderer),
            "pad_token_id": renderer.pad_token_id,
            "num_threads": 1,
        }
        return Mortal(LocalLauncher(placement, tmp_path / "engines", num_threads=1), SharedMemoryStore(), placement, start)

    run(tmp_path / "undisturbed", hf_dir, config())
    run(tmp_path / "killed", hf_dir, config(), start=processes)
    for name in ("metrics.jsonl", "rollouts.jsonl", "ledger.jsonl", "hf/model.safetensors", "manifest.json"):
        assert (tmp_path / "killed" / name).read_bytes() == (tmp_path / "undisturbed" / name).read_bytes(), name
    assert capfd.readouterr().err.count("was lost: connection lost") == 2
    losses = [row.get("rollout/engine_losses/sum", 0) for row in read_jsonl(tmp_path / "killed" / "timing.jsonl")]
    assert sum(losses) == 2
