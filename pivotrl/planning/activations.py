"""Bytes of activations one process keeps for the backward pass, by block, per token of a micro-batch.

Without recomputation every block keeps its input, its normalised input and the inner tensors its matrices and attention need; with
full recomputation only each layer's input outlives the forward, and one layer at a time is computed again. Kernels are taken as fused, as
they are on a GPU: norms, activations and Mamba's scan keep their input, rotations nothing, attention no score matrix. A plan multiplies by the
micro-batches in flight: a pipeline's first stage holds one per stage. tests/unit/test_planned_activations.py counts what a model keeps.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pivotrl.config.parallel import ParallelConfig
from pivotrl.megatron.architecture import LayerKind, expert_width, head_dim, is_gated, layers, mamba_channels, mamba_inner, num_experts
from pivotrl.megatron.layout import expert_tensor_size
from pivotrl.planning.weights import BFLOAT16_BYTES, FLOAT32_BYTES

# Indices and probabilities of a token's chosen expert, on the way there and back.
_ROUTE_BYTES = 24


@dataclass(frozen=True, slots=True)
class ActivationBytes:
    """Per token that a process holds of a micro-batch (its share of the sequence under context parallelism).

    >>> ActivationBytes(kept=10.0, working=25.0).of(num_tokens=4, num_in_flight=3)
    220
    """

    kept: float
    """Of one micro-batch in flight, all layers of the stage."""
    working: float
    """Once more while a layer is computed again, or 0 where nothing is recomputed."""

    def of(self, *, num_tokens: int, num_in_flight: int) -> int:
        """Bytes for micro-batches of `num_tokens` tokens."""
        return round(num_tokens * (num_in_flight * self.kept + self.working))


def activation_bytes(config: Any, parallel: ParallelConfig, *, expert_imbalance: float, is_bf16: bool = True) -> ActivationBytes:
    """Activation memory of the busiest stage.

    Args:
        expert_imbalance: tokens of the busiest expert parallel process over the mean.
    """
    parts = activation_parts(config, parallel, expert_imbalance=expert_imbalance, is_bf16=is_bf16).values()
    return ActivationBytes(kept=sum(part.kept for part in parts), working=sum(part.working for part in parts))


def activation_parts(
    config: Any, parallel: ParallelConfig, *, expert_imbalance: float, is_bf16: bool = True
) -> dict[LayerKind | None, ActivationBytes]:
    """`activation_bytes` by kind of block; None: the inputs of layers that are computed again."""
    blocks = {kind: block_bytes(config, kind, parallel, expert_imbalance=expert_imbalance, is_bf16=is_bf16) for kind in _kinds(config)}
    all_layers, stages = layers(config), parallel.pipeline_model_parallel_size
    size = len(all_layers) // stages
    if parallel.recompute == "none":
        by_stage = [[kind for layer in all_layers[stage * size : (stage + 1) * size] for kind in layer] for stage in range(stages)]
        busiest = max(by_stage, key=lambda kinds: sum(blocks[kind] for kind in kinds))
        return {kind: ActivationBytes(kept=busiest.count(kind) * blocks[kind], working=0.0) for kind in blocks}
    layer_input = config.hidden_size * _sequence_share(parallel) * (BFLOAT16_BYTES if is_bf16 else FLOAT32_BYTES)
    largest = list(max(all_layers, key=lambda layer: sum(blocks[kind] for kind in layer)))
    again = {kind: ActivationBytes(kept=0.0, working=largest.count(kind) * blocks[kind]) for kind in blocks}
    return {None: ActivationBytes(kept=size * layer_input, working=0.0), **again}


def block_bytes(config: Any, kind: LayerKind, parallel: ParallelConfig, *, expert_imbalance: float, is_bf16: bool) -> float:
    """Bytes one block keeps per token without recomputation."""
    width = BFLOAT16_BYTES if is_bf16 else FLOAT32_BYTES
    tensor = parallel.tensor_model_parallel_size
    # Input of the norm, output of the norm.
    stream = 2 * config.hidden_size * _sequence_share(parallel) * width
    match kind:
        case LayerKind.ATTENTION:
            channels = head_dim(config)
            queries, keys = config.num_attention_heads * channels, config.num_key_value_heads * channels
            # The fused projection, of which keys and values are views; queries and keys as attention sees them; its output and, per head, the
            # log-sum-exp in float32. A norm of queries and keys keeps the queries before it; without rotation attention sees the views.
            has_norm, is_rotated = config.model_type in ("qwen3", "qwen3_moe"), config.model_type != "nemotron_h"
            inner = ((4 if has_norm else 3) * queries + (3 if is_rotated else 2) * keys) * width + FLOAT32_BYTES * config.num_attention_heads
            return stream + inner / tensor
        case LayerKind.MLP:
            return stream + _feed_forward(config.intermediate_size, width, is_gated=is_gated(config)) / tensor
        case LayerKind.MOE:
            return stream + _moe(config, parallel, width, expert_imbalance)
        case LayerKind.MAMBA:
            inner, channels = mamba_inner(config), mamba_channels(config)
            # Projection (gate, convolution's input, step sizes), the scan's output before and after its gate, the norm's output. The fused kernel
            # of mamba-ssm (mamba_split_conv1d_scan_combined) computes convolution and states again.
            return stream + (inner + channels + config.mamba_num_heads + 3 * inner) * width / tensor


def _moe(config: Any, parallel: ParallelConfig, width: int, expert_imbalance: float) -> float:
    """Router scores in float32, a copy of the token per chosen expert and its way, what experts keep, the latent sum, a shared expert."""
    share = _sequence_share(parallel)
    tokens = expert_width(config)
    copies = config.num_experts_per_tok * expert_imbalance
    inner = _feed_forward(config.moe_intermediate_size, width, is_gated=is_gated(config)) / expert_tensor_size(parallel)
    routed = copies * (tokens * width + inner + _ROUTE_BYTES) * share
    latent = tokens * width * share if tokens != config.hidden_size else 0.0
    router = FLOAT32_BYTES * num_experts(config) * share
    shared = 0.0
    if config.model_type == "nemotron_h" and config.n_shared_experts:
        inner_shared = config.n_shared_experts * config.moe_shared_expert_intermediate_size
        shared = _feed_forward(inner_shared, width, is_gated=False) / parallel.tensor_model_parallel_size
    return router + latent + routed + shared


def _feed_forward(inner: int, width: int, *, is_gated: bool) -> float:
    """Output of the first matrix and, after the activation, input of the second."""
    return inner * width * (3 if is_gated else 2)


def _sequence_share(parallel: ParallelConfig) -> float:
    return 1 / parallel.tensor_model_parallel_size if parallel.sequence_parallel else 1.0


def _kinds(config: Any) -> set[LayerKind]:
    return {kind for layer in layers(config) for kind in layer}
