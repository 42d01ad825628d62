"""Takes a step in a batching mode and a layout: the worker of test_batching_layouts (fakes/ranks.py runs it)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fakes.train_samples import draw_samples
from fakes.trainer_batches import logprobs_by_row, policy_loss

from pivotrl.config.schema import MoeConfig, OptimizerConfig, ParallelConfig
from pivotrl.config.training import Batching
from pivotrl.megatron.hf_checkpoint import read_config
from pivotrl.megatron.trainer import Trainer
from pivotrl.training.batching import train_batch, train_micro_batches

TEMPERATURE = 0.8
OPTIMIZER = OptimizerConfig(lr=1e-3, eps=1e-4, max_grad_norm=0.5)
_MOE = MoeConfig(expert_bias_update_rate=0.01)
# Five rows in three micro-batches: a data parallel deal of two is uneven, and the long group is split.
_GROUPS, _BUDGET = {"a": (20, [5, 3, 7]), "b": (9, [4, 2])}, 33


def measure(job: tuple[str, dict[str, Any], Batching]) -> dict[str, Any]:
    """Log-probs of every action by its row's tokens; loss and gradient norm of a step, and of the next, which shows the weights moved alike.

    Experts' balancing biases, where a model has them, are reported as they are after both steps.

    Args:
        job: model directory, keys of `parallel`, batching.
    """
    model, parallel, batching = job
    trainer = Trainer.from_hf(
        Path(model), optimizer=OPTIMIZER, parallel=ParallelConfig(**parallel), moe=_MOE, num_steps=10, seed=0, with_reference=False
    )
    step = train_batch(draw_samples(_GROUPS))
    batches = train_micro_batches(step, batching=batching, micro_batch_tokens=_BUDGET, skip_zero_variance=True)
    logprobs = logprobs_by_row(batches, trainer.token_logprobs(batches, temperature=TEMPERATURE))
    steps = [trainer.step(batches, policy_loss, temperature=TEMPERATURE) for _ in range(2)]
    biases = (
        {name: tensor.tolist() for name, tensor in trainer.named_tensors() if name.endswith("e_score_correction_bias")} if _has_bias(model) else {}
    )
    return {"num_micro_batches": len(batches), "logprobs": logprobs, "steps": [[one.loss, one.grad_norm] for one in steps], "biases": biases}


def _has_bias(model: str) -> bool:
    return "n_routed_experts" in read_config(Path(model))
