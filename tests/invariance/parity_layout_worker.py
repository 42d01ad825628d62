"""Layer outputs of a tiny checkpoint in a layout against transformers: the worker of test_parity_layouts (fakes/ranks.py runs it)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from pivotrl.config.schema import MoeConfig, ParallelConfig
from pivotrl.megatron.trainer import Trainer
from pivotrl.megatron.upstream import parallel_state
from pivotrl.training.parity_layers import first_difference, load_model

_TOKENS = (5, 60, 7, 33, 9, 80, 12, 41, 2)


def measure(job: Mapping[str, Any]) -> Mapping[str, Any]:
    """Places that were seen, the first that differs, and the first part of the weights whose copies do.

    Args:
        job: the checkpoint's `directory`, keys of `parallel`, and `fault`: a module whose output is disturbed on the last tensor
            parallel rank, or a parameter ("... weight") that is doubled on the last process.
    """
    directory, parallel = Path(job["directory"]), ParallelConfig(**job["parallel"])
    trainer = Trainer.from_hf(directory, optimizer=None, parallel=parallel, moe=MoeConfig(), num_steps=1, seed=0, with_reference=False)
    if str(job["fault"]).endswith("weight"):
        if dist.get_rank() == dist.get_world_size() - 1:
            with torch.no_grad():
                trainer._policy[0].get_parameter(job["fault"]).mul_(2)
    elif job["fault"] and parallel_state.get_tensor_model_parallel_rank() == parallel.tensor_model_parallel_size - 1:
        module = trainer._policy[0].get_submodule(job["fault"])
        module.register_forward_hook(lambda _module, _inputs, out: (out[0].roll(1, -1), *out[1:]))
    unequal = trainer.unequal_copy()
    ours = trainer.layer_outputs(_TOKENS)
    assert all(len(output) == len(_TOKENS) for output in ours.outputs.values())
    model, tolerance = load_model(directory)
    difference = first_difference(ours, model, _TOKENS, tolerance)
    return {"places": sorted(ours.outputs), "first": difference.place if difference else None, "unequal": unequal.name if unequal else None}
