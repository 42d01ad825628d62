"""The parity gate's search for the axis at fault, with a fault that follows one axis into every layout: the worker of test_parity_axes."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist

from pivotrl.config.schema import MoeConfig, ParallelConfig
from pivotrl.megatron import trainer as trainer_module
from pivotrl.megatron.model import LanguageModel, build_model
from pivotrl.megatron.trainer import Trainer
from pivotrl.megatron.upstream import parallel_state
from pivotrl.training import parity_layers
from pivotrl.training.parity_layers import layers_finding
from pivotrl.types import TrainSample

_PROMPT, _COMPLETION = (5, 60, 7, 33, 9), (80, 12, 41, 2)
# What upstream calls an axis, and a module of the first chunk whose output is disturbed in its last place.
_AXES = {
    "tensor": ("tensor_model", "decoder.layers.0.mlp.linear_fc1"),
    "pipeline": ("pipeline_model", "decoder.layers.0"),
    "context": ("context", "decoder.layers.0.self_attention.linear_proj"),
    "expert": ("expert_model", "decoder.layers.0.mlp.experts"),
}


def measure(job: Mapping[str, Any]) -> Mapping[str, Any]:
    """The finding of process 0.

    Args:
        job: a `folder` with hf/, keys of `parallel`, and `fault`, the axes whose processes all must be several for the fault to be there;
            the module of the first is disturbed.
    """
    folder, parallel = Path(job["folder"]), ParallelConfig(**job["parallel"])

    def disturbed(*arguments: Any, **keywords: Any) -> list[LanguageModel]:
        chunks = build_model(*arguments, **keywords)
        sizes = [getattr(parallel_state, f"get_{_AXES[axis][0]}_parallel_world_size")() for axis in job["fault"]]
        name, module = _AXES[job["fault"][0]]
        if min(sizes) > 1 and getattr(parallel_state, f"get_{name}_parallel_rank")() == sizes[0] - 1:
            chunks[0].get_submodule(module).register_forward_hook(
                lambda _module, _inputs, out: (out[0].roll(1, -1), *out[1:]) if isinstance(out, tuple) else out.roll(1, -1)
            )
        return chunks

    trainer_module.build_model = disturbed
    # Each process runs the whole search here; in the product only the first one does, and a child of it is the trainer of one process.
    parity_layers.place_in_one_process = lambda *_arguments: None
    trainer = Trainer.from_hf(folder / "hf", optimizer=None, parallel=parallel, moe=MoeConfig(), num_steps=1, seed=0, with_reference=False)
    sample = TrainSample("one", _PROMPT, _COMPLETION, 1.0, tuple(-1.0 for _ in _COMPLETION))
    finding = layers_finding(trainer, [sample], folder, temperature=1.0, threshold=1e-3, parallel=parallel)
    answer: list[Any] = [{"place": finding.place, "what": finding.what}]
    dist.broadcast_object_list(answer)
    return answer[0]
