"""The aux-loss-free balancing bias after a step, against counts taken sequence by sequence: one sequence alone has no padding and shares nothing.

The rule (arXiv 2408.15664): bias += rate * sign(mean tokens of the layer's experts - tokens of this expert), with a token counted once for
every sequence it belongs to, so that a shared prefix weighs as many as its group has actions.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from fakes.train_samples import draw_samples
from fakes.trainer_batches import policy_loss, save_model

from pivotrl.config.schema import MoeConfig, OptimizerConfig, ParallelConfig
from pivotrl.config.training import Batching
from pivotrl.megatron.trainer import Trainer
from pivotrl.megatron.upstream import TopKRouter
from pivotrl.objective.microbatch import MicroBatch
from pivotrl.training.batching import train_batch, train_micro_batches

_RATE = 0.03
_SAMPLES = draw_samples({"a": (19, [5, 3, 11]), "b": (6, [2, 4])})


def _batches(batching: Batching, budget: int) -> list[MicroBatch]:
    return train_micro_batches(train_batch(_SAMPLES), batching=batching, micro_batch_tokens=budget, skip_zero_variance=True)


def _trainer(directory: Path, recompute: str = "none") -> Trainer:
    return Trainer.from_hf(
        directory,
        optimizer=OptimizerConfig(lr=1e-3),
        parallel=ParallelConfig.model_validate({"recompute": recompute}),
        moe=MoeConfig(expert_bias_update_rate=_RATE),
        num_steps=2,
        seed=0,
        with_reference=False,
    )


def _biases(trainer: Trainer) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in trainer.named_tensors() if name.endswith("e_score_correction_bias")}


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("hf"), "nemotron_3")


@pytest.fixture(scope="module")
def counted(directory: Path) -> list[torch.Tensor]:
    """Tokens of every expert, layer by layer, over sequences that go through the model one at a time."""
    trainer = _trainer(directory)
    routers = [module for chunk in trainer._policy for module in chunk.modules() if isinstance(module, TopKRouter)]
    counts = [torch.zeros(4) for _ in routers]

    def count(router: TopKRouter, _inputs: tuple[torch.Tensor, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
        counts[routers.index(router)] += output[1].sum(dim=0)

    for router in routers:
        router.register_forward_hook(count)
    batches = _batches("padded", 1)
    assert len(batches) == len(_SAMPLES)
    trainer.token_logprobs(batches, temperature=1.0)
    num_tokens = sum(len(sample.prompt_token_ids) + len(sample.completion_token_ids) for sample in _SAMPLES)
    assert [tokens.sum().item() for tokens in counts] == [2 * num_tokens] * 2, "two experts per token, two layers"
    return counts


@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("batching", ["padded", "packed", "shared_prefix"])
def test_the_bias_moves_by_the_rule(directory: Path, counted: list[torch.Tensor], batching: Batching, recompute: str) -> None:
    trainer = _trainer(directory, recompute)
    before = _biases(trainer)
    batches = _batches(batching, 60 if batching == "padded" else 45)
    assert len(batches) < len(_SAMPLES)
    measures = trainer.step(batches, policy_loss, temperature=1.0).measures
    for (name, bias), count in zip(_biases(trainer).items(), counted, strict=True):
        assert torch.equal(bias, before[name] + _RATE * torch.sign(count.mean() - count))
    loads = torch.stack([count / count.mean() for count in counted])
    assert measures["expert_load/max"] == pytest.approx(loads.max().item())
    assert measures["expert_load/min"] == pytest.approx(loads.min().item())
