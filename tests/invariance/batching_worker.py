"""Takes a step in every batching mode and many layouts in one group of processes: the worker of test_batching_layouts.

    torchrun --nproc-per-node N batching_worker.py JOBS.json RESULTS.json

JOBS.json is a list of (model directory, keys of `parallel`, batching). The first process writes what every job measured.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from fakes.train_samples import draw_samples
from fakes.trainer_batches import policy_loss

from pivotrl.config.schema import MoeConfig, OptimizerConfig, ParallelConfig
from pivotrl.config.training import Batching
from pivotrl.megatron.trainer import Trainer
from pivotrl.training.batching import train_batch, train_micro_batches

TEMPERATURE = 0.8
OPTIMIZER = OptimizerConfig(lr=1e-3, eps=1e-4, max_grad_norm=0.5)
# Five rows in three micro-batches: a data parallel deal of two is uneven, and the long group is split.
_GROUPS, _BUDGET = {"a": (20, [5, 3, 7]), "b": (9, [4, 2])}, 33


def measure(model: str, parallel: dict[str, Any], batching: Batching) -> dict[str, Any]:
    """Log-probs of every action by its row's tokens; loss and gradient norm of a step, and of the next, which shows the weights moved alike."""
    trainer = Trainer.from_hf(
        Path(model), optimizer=OPTIMIZER, parallel=ParallelConfig(**parallel), moe=MoeConfig(), num_steps=10, seed=0, with_reference=False
    )
    step = train_batch(draw_samples(_GROUPS))
    batches = train_micro_batches(step, batching=batching, micro_batch_tokens=_BUDGET, skip_zero_variance=True)
    logprobs = {}
    for batch, values_B_T in zip(batches, trainer.token_logprobs(batches, temperature=TEMPERATURE), strict=True):
        for row, length in enumerate(batch.lengths_B.tolist()):
            key = " ".join(map(str, batch.token_ids_B_T[row, :length].tolist()))
            logprobs[key] = values_B_T[row, batch.action_mask_B_T[row] != 0].tolist()
    steps = [trainer.step(batches, policy_loss, temperature=TEMPERATURE) for _ in range(2)]
    return {"num_micro_batches": len(batches), "logprobs": logprobs, "steps": [[one.loss, one.grad_norm] for one in steps]}


def main() -> None:
    """Runs the jobs in order."""
    jobs, results = (Path(name) for name in sys.argv[1:])
    torch.set_num_threads(1)
    measured = [measure(*job) for job in json.loads(jobs.read_text())]
    if dist.get_rank() == 0:
        results.write_text(json.dumps(measured))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
