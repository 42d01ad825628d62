"""A format of gradients that megatron-core would silently replace is refused by name. tests/invariance/test_layouts.py trains in both formats."""

from __future__ import annotations

from pathlib import Path

import pytest
from fakes.trainer_batches import save_model

from pivotrl.config.schema import MoeConfig, OptimizerConfig, ParallelConfig
from pivotrl.errors import UserError
from pivotrl.megatron.trainer import Trainer


def test_bfloat16_gradients_of_float32_weights_are_refused(tmp_path: Path) -> None:
    optimizer, checkpoint = OptimizerConfig(lr=1e-3, gradient_dtype="bfloat16"), save_model(tmp_path, "qwen3")
    with pytest.raises(UserError, match=r"optimizer.gradient_dtype is bfloat16 and the weights are float32"):
        Trainer.from_hf(checkpoint, optimizer=optimizer, parallel=ParallelConfig(), moe=MoeConfig(), num_steps=1, seed=0, with_reference=False)
