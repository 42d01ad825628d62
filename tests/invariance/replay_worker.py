"""Takes a step that replays an engine's routes, in a batching mode and a layout: the worker of test_rollout_replay (fakes/ranks.py runs it)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from fakes.routes import routed, without_first_tokens
from fakes.train_samples import draw_samples
from fakes.trainer_batches import logprobs_by_row, policy_loss

from pivotrl.config.schema import MoeConfig, OptimizerConfig, ParallelConfig
from pivotrl.config.training import Batching
from pivotrl.megatron.trainer import Trainer
from pivotrl.training.batching import train_batch, train_micro_batches
from pivotrl.types import TrainSample

TEMPERATURE = 0.8
OPTIMIZER = OptimizerConfig(lr=1e-3, eps=1e-4, max_grad_norm=0.5)
LAYERS, EXPERTS, CHOSEN = 4, 4, 2
# Five rows in three micro-batches: a data parallel deal of two is uneven, and the long group is split.
_GROUPS, _BUDGET = {"a": (20, [5, 3, 7]), "b": (9, [4, 2])}, 33
_UNROUTED_TOKENS = 3


def step_samples(layers: int = LAYERS) -> list[TrainSample]:
    """Five rows of two groups: the first group without routes for its prompt's first tokens."""
    samples = routed(draw_samples(_GROUPS), layers=layers, experts=EXPERTS, chosen=CHOSEN)
    for i in range(3):
        routes = samples[i].routed_experts
        assert routes is not None
        samples[i] = replace(samples[i], routed_experts=without_first_tokens(routes, _UNROUTED_TOKENS))
    return samples


def measure(job: dict[str, Any]) -> dict[str, Any]:
    """Log-probs of every action by its row's tokens; loss, gradient norm and coverage of two steps.

    Args:
        job: model directory, keys of `parallel`, batching, layers with experts.
    """
    samples = step_samples(job["layers"])
    trainer = replaying_trainer(job["model"], ParallelConfig(**job["parallel"]))
    batches = micro_batches(samples, job["batching"])
    logprobs = logprobs_by_row(batches, trainer.token_logprobs(batches, temperature=TEMPERATURE))
    steps = [trainer.step(batches, policy_loss, temperature=TEMPERATURE) for _ in range(2)]
    return {"logprobs": logprobs, "steps": [[one.loss, one.grad_norm, one.measures["routes_replayed"]] for one in steps]}


def replaying_trainer(model: str, parallel: ParallelConfig, *, replay: str = "rollout", with_reference: bool = False) -> Trainer:
    """A trainer of the model in a layout."""
    moe = MoeConfig.model_validate({"router_replay": replay})
    return Trainer.from_hf(Path(model), optimizer=OPTIMIZER, parallel=parallel, moe=moe, num_steps=10, seed=0, with_reference=with_reference)


def micro_batches(samples: Sequence[TrainSample], batching: Batching) -> list[Any]:
    """Three micro-batches."""
    return train_micro_batches(train_batch(samples), batching=batching, micro_batch_tokens=_BUDGET, skip_zero_variance=True)
