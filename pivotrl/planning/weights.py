"""Which tensors one process of a layout holds, and how many bytes its weights, gradients and optimizer state take.

Sizes follow megatron-core's buffers with the distributed optimizer: every model chunk (virtual pipeline stage) has its own, experts under
expert parallelism and float32 tensors of a bfloat16 model have buffers of their own, every tensor starts at a multiple of 64 elements, and a
buffer's end is padded so that its data parallel processes get equal shares. Weights live in such a buffer too, gradients in one of the same
length. tests/invariance/test_layouts.py compares with what megatron-core allocates.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from pivotrl.config.parallel import ParallelConfig
from pivotrl.megatron.architecture import Split, Tensor, block_tensors, first_tensors, last_tensors, layers
from pivotrl.megatron.layout import expert_tensor_size

FLOAT32_BYTES = 4
BFLOAT16_BYTES = 2
_ALIGNED_ELEMENTS = 64
_BUFFER_DIVISOR = 128


@dataclass(frozen=True, slots=True)
class Counts:
    """Parameters of a whole model.

    >>> Counts(total=10, active=4, routed=8, embedding=2, router=1).total
    10
    """

    total: int
    active: int
    """Met by one token: of the experts, those it is routed to; the embedding and the head count whole."""
    routed: int
    """Of all routed experts."""
    embedding: int
    """The input embedding, which is looked up rather than multiplied."""
    router: int
    """Routers, which published counts may leave out."""


@dataclass(frozen=True, slots=True)
class Buffer:
    """Tensors of one process that are reduced together: same format, same data parallel processes."""

    num_elements: int
    """Of the parameters themselves."""
    num_padded: int
    """Of the buffers of weights and of gradients, alignment included."""
    num_sharers: int
    """Data parallel processes that share its optimizer state."""
    is_fp32: bool


def count_parameters(config: Any) -> Counts:
    """Parameters of a model by its configuration."""
    everything = stage_tensors(config, ParallelConfig(), 0)
    total = sum(tensor.total * times for tensor, times in everything.items())
    experts = [(tensor, times) for tensor, times in everything.items() if tensor.split is Split.EXPERT]
    routed = sum(tensor.total * times for tensor, times in experts)
    chosen = sum(tensor.size * config.num_experts_per_tok * times for tensor, times in experts)
    return Counts(
        total=total,
        active=total - routed + chosen,
        routed=routed,
        embedding=sum(tensor.total for tensor in first_tensors(config)),
        router=sum(tensor.total * times for tensor, times in everything.items() if tensor.name == "moe.router"),
    )


def count_tensors(config: Any) -> int:
    """Tensors of a model, each expert's on its own, as a hand-over sends them; gate and up projection are counted as one, as are q, k and v."""
    return sum(tensor.count * times for tensor, times in stage_tensors(config, ParallelConfig(), 0).items())


def stage_tensors(config: Any, parallel: ParallelConfig, stage: int) -> Counter[Tensor]:
    """All tensors of pipeline stage `stage`, whole, with how often each occurs."""
    return sum(_chunks(config, parallel, stage), Counter[Tensor]())


def stage_buffers(config: Any, parallel: ParallelConfig, stage: int, *, world_size: int, is_bf16: bool) -> list[Buffer]:
    """The buffers of one process of pipeline stage `stage`."""
    chunks = _chunks(config, parallel, stage)
    return [buffer for chunk in chunks for buffer in buffers(chunk, parallel, world_size=world_size, is_bf16=is_bf16)]


def _chunks(config: Any, parallel: ParallelConfig, stage: int) -> list[Counter[Tensor]]:
    """The tensors of a stage's model chunks; virtual stages deal layers out in turn."""
    num_stages = parallel.pipeline_model_parallel_size
    num_turns = parallel.virtual_pipeline_model_parallel_size or 1
    all_layers = layers(config)
    size = len(all_layers) // (num_stages * num_turns)
    chunks: list[Counter[Tensor]] = []
    for turn in range(num_turns):
        first = (turn * num_stages + stage) * size
        tensors: Counter[Tensor] = Counter()
        for kind, count in Counter(kind for layer in all_layers[first : first + size] for kind in layer).items():
            for tensor in block_tensors(config, kind):
                tensors[tensor] += count
        chunks.append(tensors)
    if stage == 0:
        chunks[0].update(first_tensors(config))
    if stage == num_stages - 1:
        chunks[-1].update(last_tensors(config, is_first_stage=num_stages == 1))
    return chunks


def buffers(tensors: Mapping[Tensor, int], parallel: ParallelConfig, *, world_size: int, is_bf16: bool) -> list[Buffer]:
    """The buffers of one model chunk of a process that holds its part of `tensors`."""
    pipeline = parallel.pipeline_model_parallel_size
    dense_sharers = world_size // (parallel.tensor_model_parallel_size * pipeline)
    expert_sharers = world_size // (expert_tensor_size(parallel) * parallel.expert_model_parallel_size * pipeline)
    has_expert_buffer = parallel.expert_model_parallel_size > 1
    parts: dict[tuple[bool, bool], list[tuple[int, int]]] = {}
    for tensor, times in tensors.items():
        key = (has_expert_buffer and tensor.split is Split.EXPERT, is_bf16 and tensor.is_fp32)
        size, count = local_part(tensor, parallel)
        parts.setdefault(key, []).append((size, count * times))
    found: list[Buffer] = []
    for (is_expert, is_fp32), sizes in parts.items():
        sharers = expert_sharers if is_expert else dense_sharers
        num_elements = sum(size * count for size, count in sizes)
        found.append(Buffer(num_elements, _padded(sizes, sharers), sharers, is_fp32 or not is_bf16))
    return found


def local_part(tensor: Tensor, parallel: ParallelConfig) -> tuple[int, int]:
    """A process's part: elements of one copy, and how many copies it holds; experts of other processes are left out."""
    match tensor.split:
        case Split.REPLICATED:
            return tensor.size, tensor.count
        case Split.TENSOR:
            return tensor.size // parallel.tensor_model_parallel_size, tensor.count
        case Split.EXPERT:
            return tensor.size // expert_tensor_size(parallel), tensor.count // parallel.expert_model_parallel_size


def _padded(sizes: Iterable[tuple[int, int]], num_sharers: int) -> int:
    aligned = sum(math.ceil(size / _ALIGNED_ELEMENTS) * _ALIGNED_ELEMENTS * count for size, count in sizes)
    divisor = math.lcm(num_sharers, _BUFFER_DIVISOR)
    return math.ceil(aligned / divisor) * divisor
