"""Memory of a trainer process and of an engine process, term by term, against what a GPU has.

A plan's verdict is a sum of stated terms, never one opaque figure: a layout that does not fit names its largest terms and the knobs
that shrink them. Bytes throughout; the busiest pipeline stage counts.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

from pivotrl.config.parallel import ParallelConfig
from pivotrl.config.planning import ClusterConfig, PlanConfig
from pivotrl.megatron.architecture import LayerKind, block_tensors, head_dim, layers, mamba_channels, mamba_inner
from pivotrl.planning.activations import activation_parts
from pivotrl.planning.weights import BFLOAT16_BYTES, FLOAT32_BYTES, Buffer, count_parameters, stage_buffers

GIB = 2**30
# megatron/logprobs.py projects this many logits at a time; a chunk exists in the model's format, in float32 and as its gradient.
_LOGIT_CHUNK_VALUES = 2**26
_LOGIT_COPIES_BYTES = BFLOAT16_BYTES + 2 * FLOAT32_BYTES
# placement.bucket_bytes by default.
_BUCKET_BYTES = 256 << 20
# A float32 state of the generation's Mamba layers, and its convolution window in the model's format.
_SSM_STATE_BYTES = 4
# megatron-core's default size of a bucket, in elements.
_BUCKET_ELEMENTS, _BUCKET_ELEMENTS_PER_SHARER = 40_000_000, 1_000_000
_ACTIVATIONS, _MOE, _MAMBA = "activations", "MoE buffers", "Mamba states"
_GONE_WHILE_SAVING = (_ACTIVATIONS, _MOE, _MAMBA, "logits")
# For the terms alone, where nothing is judged.
NO_CLUSTER = ClusterConfig(
    name="none",
    gpus_per_node=8,
    gpu_memory_gib=1,
    peak_tflops=1,
    memory_tb_per_s=1,
    link_gb_per_s=1,
    network_gb_per_s=1,
    host_memory_gib=1,
    source="nothing is judged by it",
)
# What vLLM may fill of a GPU of its own where nobody says otherwise: the rest is for the hand-over of weights.
_ENGINE_FRAC = 0.85


@dataclass(frozen=True, slots=True)
class Term:
    """One line of a memory table."""

    name: str
    num_bytes: int
    note: str


@dataclass(frozen=True, slots=True)
class Memory:
    """What one GPU must hold at once.

    >>> Memory((Term("weights", 2 * GIB, ""),), capacity=8 * GIB, margin=GIB).fits
    True
    """

    terms: tuple[Term, ...]
    capacity: int
    margin: int
    """Left free for fragmentation."""

    @property
    def total(self) -> int:
        return sum(term.num_bytes for term in self.terms)

    @property
    def fits(self) -> bool:
        return self.total + self.margin <= self.capacity


def trainer_memory(config: Any, parallel: ParallelConfig, plan: PlanConfig, cluster: ClusterConfig, *, world_size: int) -> Memory:
    """Memory of the busiest trainer process."""
    busiest = busiest_buffers(config, parallel, world_size=world_size)
    weights = sum(part.num_padded * _weight_bytes(part) for part in busiest)
    gradient_bytes = FLOAT32_BYTES if plan.gradient_dtype == "float32" else BFLOAT16_BYTES
    on_host = plan.optimizer_offload_frac
    optimizer = optimizer_bytes(busiest, plan)
    num_tokens = math.ceil(max(plan.workload.micro_batch_tokens, plan.workload.max_sequence_tokens) / parallel.context_parallel_size)
    terms = [
        Term("weights", weights, "bfloat16, Mamba's decays in float32"),
        Term("gradients", sum(part.num_padded * (FLOAT32_BYTES if part.is_fp32 else gradient_bytes) for part in busiest), plan.gradient_dtype),
        Term("optimizer", round(optimizer * (1 - on_host)), f"main weights float32, moments {plan.moment_dtype}, {on_host:.0%} on the host"),
        *_activation_terms(config, parallel, plan, num_tokens),
        Term("logits", _LOGIT_CHUNK_VALUES * _LOGIT_COPIES_BYTES, "one chunk"),
        Term("weight sync", *_sender_staging(config, plan)),
        Term("fixed", round(plan.fixed_gib * GIB), "CUDA context, communication buffers"),
    ]
    if plan.checkpoint_gathers:
        # Activations are gone by then, so only what is beyond them counts.
        beyond = gathered_bytes(busiest, parallel) - sum(term.num_bytes for term in terms if term.name in _GONE_WHILE_SAVING)
        terms.append(Term("checkpoint", max(beyond, 0), "part of the optimizer state gathered, beyond activations"))
    if plan.gradient_dtype == "bfloat16":
        shares = FLOAT32_BYTES * sum(math.ceil(part.num_elements / part.num_sharers) for part in busiest if not part.is_fp32)
        terms.insert(2, Term("gradient shares", shares, "float32, for the optimizer's step"))
    if plan.has_reference:
        terms.insert(1, Term("reference", weights, "frozen copy of the initial policy"))
    return _memory(terms, plan, cluster)


def _sender_staging(config: Any, plan: PlanConfig) -> tuple[int, str]:
    """What process 0 holds of a hand-over: the largest tensor twice, its parts and the whole, or the whole and its copy in a bucket.

    Where engines have GPUs of their own, a bucket is on its way meanwhile. A tensor larger than a bucket is one of its own; the two that are
    (embedding, head) do not follow each other.
    """
    largest = config.vocab_size * config.hidden_size * BFLOAT16_BYTES
    if not plan.generation_nodes:
        return 2 * largest, "largest tensor, its parts and the whole"
    return largest + max(largest, _BUCKET_BYTES) + _BUCKET_BYTES, "largest tensor, gathered and in a bucket, and a bucket on its way"


def receiver_staging(config: Any, plan: PlanConfig) -> int:
    """Bytes of a GPU of an engine that takes part in a hand-over: vLLM holds a layer's tensors whole until the last has come, then makes its part.

    The last bucket of the layer may hold tensors of the next one, and the first one some of the layer before.
    """
    layer = max(sum(tensor.total for tensor in block_tensors(config, kind)) for layer in layers(config) for kind in layer) * BFLOAT16_BYTES
    largest = config.vocab_size * config.hidden_size * BFLOAT16_BYTES
    return max(layer, largest) * (1 + plan.generation_tensor_parallel_size) // plan.generation_tensor_parallel_size + 2 * _BUCKET_BYTES


def _activation_terms(config: Any, parallel: ParallelConfig, plan: PlanConfig, num_tokens: int) -> list[Term]:
    """Activations by kind of block; kinds that the model lacks are left out."""
    parts = activation_parts(config, parallel, expert_imbalance=plan.efficiency.expert_imbalance)
    names = {LayerKind.MOE: _MOE, LayerKind.MAMBA: _MAMBA}
    notes = {
        _ACTIVATIONS: f"{num_tokens:,} tokens, recompute {parallel.recompute}",
        _MOE: f"tokens dealt out to experts, the busiest {plan.efficiency.expert_imbalance:g} times the mean",
        _MAMBA: "projections and scans of Mamba blocks",
    }
    sizes = dict.fromkeys((_ACTIVATIONS, *(name for kind, name in names.items() if kind in parts)), 0)
    for kind, part in parts.items():
        name = _ACTIVATIONS if kind is None else names.get(kind, _ACTIVATIONS)
        sizes[name] += part.of(num_tokens=num_tokens, num_in_flight=parallel.pipeline_model_parallel_size)
    return [Term(name, size, notes[name]) for name, size in sizes.items()]


def busiest_buffers(config: Any, parallel: ParallelConfig, *, world_size: int) -> list[Buffer]:
    """The buffers of a process of the pipeline stage that holds most."""
    held = [stage_buffers(config, parallel, stage, world_size=world_size, is_bf16=True) for stage in range(parallel.pipeline_model_parallel_size)]
    return max(held, key=lambda parts: sum(part.num_padded for part in parts))


def gathered_bytes(parts: list[Buffer], parallel: ParallelConfig) -> int:
    """What a process gathers at once when a checkpoint is written: of a bucket the main weights or one of the moments, float32.

    megatron-core's fully reshardable form (`get_parameter_state_dp_zero`), in which every data parallel process gets all of them. A buffer is one
    bucket, except where gradients are reduced piece by piece; then a bucket closes with the tensor that fills it, counted here as one more bucket.
    """
    is_bucketed = parallel.overlap_grad_reduce and parallel.virtual_pipeline_model_parallel_size is None
    return FLOAT32_BYTES * max(min(part.num_padded, 2 * _bucket_elements(part)) if is_bucketed else part.num_padded for part in parts)


def _bucket_elements(part: Buffer) -> int:
    return max(_BUCKET_ELEMENTS, _BUCKET_ELEMENTS_PER_SHARER * part.num_sharers)


def engine_memory(config: Any, plan: PlanConfig, cluster: ClusterConfig) -> Memory:
    """Memory of one GPU of an engine replica with its sequences at full length."""
    ranks = plan.generation_tensor_parallel_size
    tokens = plan.max_num_seqs * plan.workload.max_sequence_tokens
    terms = (
        Term("weights", count_parameters(config).total * BFLOAT16_BYTES // ranks, "bfloat16"),
        Term("key/value cache", tokens * key_value_bytes(config, ranks), f"{plan.max_num_seqs} sequences at full length"),
        Term("SSM cache", plan.max_num_seqs * ssm_bytes(config, ranks), f"{plan.max_num_seqs} sequences"),
        Term("fixed", round(plan.fixed_gib * GIB), "CUDA context, graphs, workspaces"),
    )
    capacity = round(cluster.gpu_memory_gib * GIB)
    share = _ENGINE_FRAC if plan.engine_memory_frac is None else plan.engine_memory_frac
    # Beside what vLLM takes at its start: with nodes of their own engines receive new weights on the GPU.
    staging = receiver_staging(config, plan) if plan.generation_nodes else 0
    return Memory(terms, capacity=capacity, margin=max(round(capacity * (1 - share)), staging))


def shared_memory(trainer: Memory, engine: Memory, plan: PlanConfig) -> Memory:
    """A GPU that holds a trainer process and a part of an engine at once: nothing of either leaves it while the other computes.

    vLLM takes its share when it starts (`gpu_memory_utilization`), whatever its sequences need.
    """
    share = plan.engine_memory_frac
    taken = engine.total if share is None else round(engine.capacity * share)
    note = f"what it needs: engine.gpu_memory_utilization {engine.total / engine.capacity:.2f}" if share is None else f"its share of {share:.2f}"
    return replace(trainer, terms=(*trainer.terms, Term("engine", taken, note)))


def optimizer_bytes(parts: list[Buffer], plan: PlanConfig) -> int:
    """Bytes of one process's share: float32 main weights (where the weights are bfloat16) and two moments."""
    moments = 2 * (FLOAT32_BYTES if plan.moment_dtype == "float32" else BFLOAT16_BYTES)
    return sum(math.ceil(part.num_elements / part.num_sharers) * (moments + (0 if part.is_fp32 else FLOAT32_BYTES)) for part in parts)


def checkpoint_bytes(config: Any) -> int:
    """Size on disk of one resumable checkpoint: bfloat16 weights, float32 main weights and moments."""
    return count_parameters(config).total * (BFLOAT16_BYTES + 3 * FLOAT32_BYTES)


def key_value_bytes(config: Any, ranks: int) -> int:
    """Bytes of cache per token on one GPU; fewer heads than GPUs are kept more than once."""
    num_layers = _count(config, LayerKind.ATTENTION)
    return 2 * num_layers * max(config.num_key_value_heads // ranks, 1) * head_dim(config) * BFLOAT16_BYTES


def ssm_bytes(config: Any, ranks: int) -> int:
    """Bytes of recurrent state per sequence on one GPU."""
    num_layers = _count(config, LayerKind.MAMBA)
    if not num_layers:
        return 0
    state = mamba_inner(config) * config.ssm_state_size * _SSM_STATE_BYTES
    window = (config.conv_kernel - 1) * mamba_channels(config) * BFLOAT16_BYTES
    return num_layers * (state + window) // ranks


def _memory(terms: list[Term], plan: PlanConfig, cluster: ClusterConfig) -> Memory:
    capacity = round(cluster.gpu_memory_gib * GIB)
    return Memory(tuple(terms), capacity=capacity, margin=round(capacity * plan.margin_frac))


def _weight_bytes(part: Buffer) -> int:
    return FLOAT32_BYTES if part.is_fp32 else BFLOAT16_BYTES


def _count(config: Any, kind: LayerKind) -> int:
    return sum(one is kind for layer in layers(config) for one in layer)
