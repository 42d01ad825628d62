"""A model whose Mamba layers keep float32 tensors among bfloat16 ones, as on a GPU: a checkpoint holds every state under its own name."""

from __future__ import annotations

from pathlib import Path

import torch
from fakes.trainer_batches import micro_batches, policy_loss, save_model
from layout_worker import OPTIMIZER, weights_in

from pivotrl.config.schema import MoeConfig, ParallelConfig
from pivotrl.megatron.trainer import StepResult, Trainer


def _trainer(checkpoint: Path) -> Trainer:
    return Trainer.from_hf(checkpoint, optimizer=OPTIMIZER, parallel=ParallelConfig(), moe=MoeConfig(), num_steps=4, seed=0, with_reference=False)


def _step(trainer: Trainer) -> StepResult:
    return trainer.step(micro_batches(rows=3, tokens=16, action_tokens=4, seed=trainer.steps_done), policy_loss, temperature=1.0)


def test_a_hybrid_of_two_formats_resumes_bit_for_bit(tmp_path: Path) -> None:
    checkpoint = save_model(tmp_path / "hf", "nemotron_3")
    with weights_in("bfloat16"):
        undisturbed = _trainer(checkpoint)
        _step(undisturbed)
        undisturbed.save_checkpoint(tmp_path / "saved", {})
        expected = [_step(undisturbed), _step(undisturbed)]
        weights = {name: tensor.clone() for name, tensor in undisturbed.named_tensors()}
        assert {tensor.dtype for tensor in weights.values()} == {torch.bfloat16, torch.float32}
        resumed = _trainer(checkpoint)
        resumed.load_checkpoint(tmp_path / "saved")
        found = [_step(resumed), _step(resumed)]
        assert [(step.loss, step.grad_norm) for step in found] == [(step.loss, step.grad_norm) for step in expected]
        for name, tensor in resumed.named_tensors():
            assert torch.equal(tensor, weights[name]), name
