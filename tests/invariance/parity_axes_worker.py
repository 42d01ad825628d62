"""The parity gate's search for the axes at fault, with a fault that follows axes or a process into every layout: the worker of test_parity_axes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import astuple
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from pivotrl.config.schema import MoeConfig, ParallelConfig
from pivotrl.megatron import trainer as trainer_module
from pivotrl.megatron.model import LanguageModel, build_model
from pivotrl.megatron.trainer import Trainer
from pivotrl.megatron.upstream import parallel_state
from pivotrl.training import parity_layers
from pivotrl.training.parity_findings import Limits
from pivotrl.training.parity_layers import layers_finding
from pivotrl.types import TrainSample

_PROMPT, _COMPLETION = (5, 60, 7, 33, 9), (80, 12, 41, 2)
# What upstream calls an axis, and a module of the first chunk whose output is disturbed in its last place.
_AXES = {
    "tensor": ("tensor_model", "decoder.layers.0.mlp.linear_fc1"),
    "sequence": ("tensor_model", "decoder.layers.0.mlp.linear_fc1"),
    "pipeline": ("pipeline_model", "decoder.layers.0"),
    "context": ("context", "decoder.layers.0.self_attention.linear_proj"),
    "expert": ("expert_model", "decoder.layers.0.mlp.experts"),
    "process": ("", "decoder.layers.0"),
}


def measure(job: Mapping[str, Any]) -> Mapping[str, Any]:
    """The finding of process 0, with the copies that are unequal, how many models were built, and how many process groups are left.

    Args:
        job: a `folder` with hf/, keys of `parallel`, and `fault`: the axes whose processes all must be several for the fault to be there (the
            module of the first is disturbed), or "process", the last one in any layout, or "weights", a norm of the last one.
    """
    folder, parallel, (first, *_) = Path(job["folder"]), ParallelConfig(**job["parallel"]), job["fault"]
    num_builds = 0

    def disturbed(*arguments: Any, **keywords: Any) -> list[LanguageModel]:
        nonlocal num_builds
        num_builds += 1
        chunks = build_model(*arguments, **keywords)
        if first != "weights" and _is_here(job["fault"], chunks[0]):
            chunks[0].get_submodule(_AXES[first][1]).register_forward_hook(
                lambda _module, _inputs, out: (out[0].roll(1, -1), *out[1:]) if isinstance(out, tuple) else out.roll(1, -1)
            )
        return chunks

    trainer_module.build_model = disturbed
    # Each process runs the whole search here; in the product only the first one does, and a child of it is the trainer of one process.
    parity_layers.place_in_one_process = lambda *_arguments: None
    trainer = Trainer.from_hf(folder / "hf", optimizer=None, parallel=parallel, moe=MoeConfig(), num_steps=1, seed=0, with_reference=False)
    if first == "weights" and dist.get_rank() == dist.get_world_size() - 1:
        with torch.no_grad():
            trainer._policy[0].get_parameter("decoder.layers.0.mlp.linear_fc1.layer_norm_weight").mul_(1.5)
    unequal = trainer.unequal_copy()
    sample = TrainSample("one", _PROMPT, _COMPLETION, 1.0, tuple(-1.0 for _ in _COMPLETION))
    finding = layers_finding(trainer, [sample], folder, temperature=1.0, limits=Limits(1e-3), parallel=parallel)
    answer: list[Any] = [{"place": finding.place, "what": finding.what, "fix": finding.fix, "num_builds": num_builds}]
    answer[0]["num_groups"] = len(distributed_c10d._world.pg_map)
    dist.broadcast_object_list(answer)
    return {**answer[0], "unequal": list(astuple(unequal)) if unequal else None}


def _is_here(fault: list[str], chunk: LanguageModel) -> bool:
    if fault == ["process"]:
        return dist.get_rank() == dist.get_world_size() - 1
    ask: Callable[[str], Callable[[], int]] = lambda what: getattr(parallel_state, f"get_{what}")  # noqa: E731
    if "sequence" in fault and not chunk.config.sequence_parallel:
        return False
    sizes = [ask(f"{_AXES[axis][0]}_parallel_world_size")() for axis in fault]
    return min(sizes) > 1 and ask(f"{_AXES[fault[0]][0]}_parallel_rank")() == sizes[0] - 1
