"""What a step cost and did, besides its loss: work and operations, memory, how evenly experts were used, how far the weights have moved.

Everything but the memory peak is a function of the data and the weights, equal on every process and after a resume. Called by the trainer.
Suffixes: L = layers of the whole model, E = routed experts of a layer.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import safe_open

from pivotrl.megatron.architecture import num_experts
from pivotrl.megatron.flops import Work, causal_pairs, forward_cost
from pivotrl.megatron.hf_checkpoint import weight_files
from pivotrl.megatron.prefix_layers import rows_per_expert
from pivotrl.megatron.streams import nested_rows
from pivotrl.megatron.upstream import PLATFORM, TopKRouter
from pivotrl.objective.microbatch import MicroBatch

WORK_TOKENS, WORK_FLOPS, PEAK, MEMORY = "work_tokens", "work_flops", "peak_flops", "memory_peak_bytes/max"
LOAD_MAX, LOAD_MIN, UNUSED = "expert_load/max", "expert_load/min", "expert_unused"


class StepMeasures:
    """Measures of one model's steps; counts the experts' tokens through hooks on its routers."""

    def __init__(self, chunks: Sequence[torch.nn.Module], hf_config: Any, *, peak_tflops: float | None) -> None:
        """`peak_tflops` is the stated peak of one process's device, TFLOP/s."""
        self._peak = {} if peak_tflops is None else {PEAK: peak_tflops * 1e12 * dist.get_world_size()}
        self._cost = forward_cost(hf_config)
        self._num_tokens_L_E = torch.zeros(hf_config.num_hidden_layers, num_experts(hf_config), device=PLATFORM.device)
        for chunk in chunks:
            for module in chunk.modules():
                if isinstance(module, TopKRouter):
                    module.register_forward_hook(self._count)

    def start(self) -> None:
        """Before a step's first forward pass."""
        self._num_tokens_L_E.zero_()

    def finish(self, micro_batches: Iterable[MicroBatch]) -> dict[str, float]:
        """The step's measures by name; collective where the model has experts."""
        work = sum(map(work_of, micro_batches), Work(0, 0, 0))
        measures = {WORK_TOKENS: work.num_tokens, WORK_FLOPS: self._cost.training_flops(work), MEMORY: PLATFORM.memory_peak_bytes()}
        return measures | self._peak | self._expert_load()

    def _count(self, router: Any, _arguments: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
        self._num_tokens_L_E[router.layer_number - 1] += rows_per_expert(router, output[1].detach())

    def _expert_load(self) -> dict[str, float]:
        """Tokens of an expert over the mean of its layer. Tensor parallel copies and recomputed passes count each layer's tokens alike often."""
        if not self._num_tokens_L_E.numel():
            return {}
        dist.all_reduce(self._num_tokens_L_E)
        used_L_E = self._num_tokens_L_E[self._num_tokens_L_E.sum(dim=1) > 0]
        if not len(used_L_E):
            return {}
        load_L_E = used_L_E / used_L_E.mean(dim=1, keepdim=True)
        return {LOAD_MAX: load_L_E.max().item(), LOAD_MIN: load_L_E.min().item(), UNUSED: (used_L_E == 0).float().mean().item()}


def work_of(batch: MicroBatch) -> Work:
    """What a micro-batch puts through the model; a prefix that is shared counts once, a row that is read from another one not at all."""
    lengths = batch.lengths_B.tolist()
    num_scored = int((batch.action_mask_B_T != 0).sum())
    if batch.batching != "shared_prefix" or batch.prefix_lengths_B is None or batch.group_ids_B is None:
        nested = nested_rows(batch)
        laid_out = [length for row, length in enumerate(lengths) if row not in nested]
        return Work(sum(laid_out), sum(map(causal_pairs, laid_out)), num_scored)
    prefixes = dict(zip(batch.group_ids_B.tolist(), batch.prefix_lengths_B.tolist(), strict=True))
    own = [(length, prefixes[group]) for length, group in zip(lengths, batch.group_ids_B.tolist(), strict=True)]
    return Work(
        num_tokens=sum(prefixes.values()) + sum(length - prefix for length, prefix in own),
        num_pairs=sum(map(causal_pairs, prefixes.values())) + sum(causal_pairs(length) - causal_pairs(prefix) for length, prefix in own),
        num_scored=num_scored,
    )


def parameter_drift(named_tensors: Iterable[tuple[str, torch.Tensor]], checkpoint_dir: Path) -> float:
    """Distance of the weights from a Hugging Face checkpoint over that checkpoint's norm, both in the 2-norm; reads one tensor at a time."""
    files = weight_files(checkpoint_dir)
    moved = norm = 0.0
    with ExitStack() as stack:
        opened: Mapping[Path, Any] = {file: stack.enter_context(safe_open(file, framework="pt")) for file in sorted(set(files.values()))}
        for name, tensor in named_tensors:
            initial = opened[files[name]].get_tensor(name).double()
            moved += (tensor.detach().cpu().double() - initial).square().sum().item()
            norm += initial.square().sum().item()
    return math.sqrt(moved / norm)
