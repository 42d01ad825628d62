"""A bfloat16 engine under the float32 trainer, as on GPUs: they disagree, the correction weighs it as the oracle says, however it is batched."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from fakes.objective_steps import oracle_settings, train_config
from fakes.trainer_batches import save_model

from pivotrl.config.engines import TransformersEngineConfig
from pivotrl.config.schema import MoeConfig, ParallelConfig
from pivotrl.config.training import Batching
from pivotrl.megatron.trainer import Trainer
from pivotrl.objective import oracle
from pivotrl.objective.grpo import make_grpo_loss
from pivotrl.rollouts.engine import GenerationRequest
from pivotrl.rollouts.transformers_engine import TransformersEngine
from pivotrl.training.batching import train_batch, train_micro_batches
from pivotrl.types import TrainSample

PROMPTS = ((5, 6, 7, 8), (9, 10, 11))
CAP = 1.02


@pytest.fixture(scope="module")
def hf_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("hf"), "qwen3")


def sampled(hf_dir: Path) -> list[TrainSample]:
    config = TransformersEngineConfig(type="transformers", batch_size=16, dtype="bfloat16")
    engine = TransformersEngine.load(hf_dir, config, stop_token_ids=(1,), pad_token_id=0)
    requests = [GenerationRequest(prompt, tuple(range(6)), 1.0, 8) for prompt in PROMPTS]
    groups = zip(PROMPTS, engine.generate(requests), strict=True)
    return [
        TrainSample(str(prompt), prompt, one.token_ids, (-1.0) ** i * (1 + i), one.logprobs)
        for prompt, group in groups
        for i, one in enumerate(group)
    ]


def test_loss_is_the_oracles_and_no_batching_changes_it(hf_dir: Path) -> None:
    samples = sampled(hf_dir)
    batch = train_batch(samples)
    config = train_config(correction={"type": "truncated", "level": "token", "cap": CAP})
    trainer = Trainer.from_hf(
        hf_dir, optimizer=config.optimizer, parallel=ParallelConfig(), moe=MoeConfig(), num_steps=9, seed=0, with_reference=False
    )
    alone = [train_micro_batches(train_batch([sample]), batching="padded", micro_batch_tokens=64, skip_zero_variance=False)[0] for sample in samples]
    scored = [row[0, -len(s.completion_token_ids) :].tolist() for row, s in zip(trainer.token_logprobs(alone, temperature=1.0), samples, strict=True)]
    actions = [
        oracle.OracleAction(tuple(row), tuple(row), None, s.advantage, 1.0, engine_logprobs_T=s.behavior_logprobs_T)
        for row, s in zip(scored, samples, strict=True)
    ]
    ratios = [math.exp(p - q) for action in actions for p, q in zip(action.old_logprobs_T, action.engine_logprobs_T, strict=True)]
    assert max(abs(math.log(ratio)) for ratio in ratios) > 0.01, "the engine rounds: otherwise nothing is tested"
    assert min(ratios) < 1 < CAP < max(ratios)
    settings = oracle_settings(config)
    counts = {"num_actions": batch.num_actions, "num_action_tokens": batch.num_action_tokens}
    plain = oracle.grpo_loss(actions, settings, **counts)
    corrected = oracle.grpo_loss(
        actions, oracle.OracleSettings(0.2, 0.28, 0.0, "k3", "action", oracle.OracleCorrection("token", CAP, None, None)), **counts
    )
    assert abs(corrected - plain) > 1e-4
    norms = []
    ways: list[tuple[Batching, int]] = [("padded", 1000), ("padded", 16), ("packed", 40), ("shared_prefix", 60)]
    for batching, tokens in ways:
        fresh = Trainer.from_hf(
            hf_dir, optimizer=config.optimizer, parallel=ParallelConfig(), moe=MoeConfig(), num_steps=9, seed=0, with_reference=False
        )
        micro_batches = train_micro_batches(batch, batching=batching, micro_batch_tokens=tokens, skip_zero_variance=True)
        result = fresh.step(micro_batches, make_grpo_loss(config), temperature=1.0)
        assert result.loss == pytest.approx(corrected, abs=2e-6)
        assert result.sums["correction_truncated"] == sum(ratio > CAP for ratio in ratios)
        assert result.sums["engine_ratio"] == pytest.approx(sum(ratios), rel=1e-5)
        norms.append(result.grad_norm)
    assert norms == pytest.approx([norms[0]] * len(norms), rel=1e-4)
