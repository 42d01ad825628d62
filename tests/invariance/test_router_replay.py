"""With router replay, updates choose the experts of the old log-probs' pass, whatever has become of the router; without it they do not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from fakes.trainer_batches import joined, micro_batches, policy_loss, save_model

from pivotrl.config.schema import MoeConfig, OptimizerConfig, ParallelConfig
from pivotrl.megatron.replay import RecordedRoutes
from pivotrl.megatron.trainer import Trainer


class _Maps:
    """Which experts every router chose, [tokens, experts], pass by pass, read off the routers' outputs."""

    def __init__(self, trainer: Trainer) -> None:
        self.routers: list[Any] = [module for chunk in trainer._policy for name, module in chunk.named_modules() if name.endswith("mlp.router")]
        self._seen: list[torch.Tensor] = []
        for router in self.routers:
            router.register_forward_hook(lambda _module, _inputs, output: self._seen.append(output[1].clone()))

    def take(self) -> list[torch.Tensor]:
        seen, self._seen = self._seen, []
        return seen


@pytest.fixture(scope="module")
def hf_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("hf"), "qwen3_moe")


@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("is_replayed", [True, False])
def test_updates_choose_as_the_pass_for_old_logprobs_did(hf_dir: Path, is_replayed: bool, recompute: str) -> None:
    trainer = Trainer.from_hf(
        hf_dir,
        optimizer=OptimizerConfig(lr=1e-3),
        parallel=ParallelConfig.model_validate({"recompute": recompute}),
        moe=MoeConfig(router_replay="updates" if is_replayed else "none"),
        num_steps=4,
        seed=0,
        with_reference=True,
    )
    rows = micro_batches(rows=4, tokens=20, action_tokens=5)
    batches, maps = [joined(rows[:2]), joined(rows[2:])], _Maps(trainer)
    trainer.token_logprobs(batches, temperature=1.0)
    recorded = maps.take()
    trainer.token_logprobs(batches, temperature=1.0, reference=True)
    assert len(recorded) == len(batches) * len(maps.routers) > 0
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for router in maps.routers:
            router.weight.copy_(torch.randn(router.weight.shape, generator=generator))
    for _ in range(2):
        trainer.step(batches, policy_loss, temperature=1.0)
        updates = maps.take()
        # Recomputation runs every layer a second time, the last layer first.
        assert len(updates) == len(recorded) * (1 if recompute == "none" else 2)
        if recompute == "none":
            assert all(map(torch.equal, updates, recorded)) == is_replayed
        else:
            chosen = {tuple(one.flatten().tolist()) for one in recorded}
            assert all(tuple(one.flatten().tolist()) in chosen for one in updates) == is_replayed


def _built(hf_dir: Path, *, is_replayed: bool = True) -> Trainer:
    moe, parallel = MoeConfig(router_replay="updates" if is_replayed else "none"), ParallelConfig()
    return Trainer.from_hf(hf_dir, optimizer=OptimizerConfig(lr=1e-3), parallel=parallel, moe=moe, num_steps=4, seed=0, with_reference=False)


def test_one_flipped_route_changes_the_loss(hf_dir: Path) -> None:
    """One token of one layer sent to another expert than the pass before chose: the replay obeys, so the loss moves."""
    rows, losses = micro_batches(rows=2, tokens=20, action_tokens=5), []
    for is_flipped in (False, True):
        trainer = _built(hf_dir)
        trainer.token_logprobs(rows, temperature=1.0)
        assert isinstance(trainer._memory, RecordedRoutes)
        # The last token but one of the first row, which predicts an action's last token.
        chosen = next(iter(trainer._memory._choices.values()))[0][int(rows[0].lengths_B[0]) - 2]
        if is_flipped:
            chosen[0] = next(expert for expert in range(4) if expert not in chosen.tolist())
        result = trainer.step(rows, policy_loss, temperature=1.0)
        assert result.measures["routes_replayed"] == 1.0
        losses.append(result.loss)
    assert abs(losses[0] - losses[1]) > 1e-5


def test_coverage_counts_the_tokens_of_passes_that_were_remembered(hf_dir: Path) -> None:
    trainer, rows = _built(hf_dir), micro_batches(rows=3, tokens=20, action_tokens=5)
    trainer.token_logprobs(rows[:2], temperature=1.0)
    lengths = [int(row.lengths_B[0]) for row in rows]
    assert trainer.step(rows, policy_loss, temperature=1.0).measures["routes_replayed"] == pytest.approx(sum(lengths[:2]) / sum(lengths))
    assert trainer.step(rows[2:], policy_loss, temperature=1.0).measures["routes_replayed"] == 0.0
    assert "routes_replayed" not in _built(hf_dir, is_replayed=False).step(rows, policy_loss, temperature=1.0).measures


def test_a_recording_replaces_the_one_before(hf_dir: Path) -> None:
    moe, parallel = MoeConfig(router_replay="updates"), ParallelConfig()
    trainer = Trainer.from_hf(hf_dir, optimizer=OptimizerConfig(lr=1e-3), parallel=parallel, moe=moe, num_steps=4, seed=0, with_reference=False)
    rows, maps = micro_batches(rows=2, tokens=20, action_tokens=5), _Maps(trainer)
    first = trainer.token_logprobs(rows, temperature=1.0)
    before = maps.take()
    with torch.no_grad():
        for router in maps.routers:
            router.weight.neg_()
    second = trainer.token_logprobs(rows, temperature=1.0)
    assert not torch.equal(first[0], second[0])
    after = maps.take()
    assert not torch.equal(before[0], after[0])
    trainer.step(rows, policy_loss, temperature=1.0)
    assert torch.equal(maps.take()[0], after[0])
