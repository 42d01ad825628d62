"""The shape of a model, read from its transformers configuration: its layers in order, and every tensor with how it is split.

One description for counting operations (`flops`), planning memory (planning/) and checking layouts. Imports neither torch nor
megatron, so that a login node can plan. Tensor sizes are megatron-core's: queries, keys and values fused, gate and up fused.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any


class LayerKind(StrEnum):
    """Blocks that read from and add to the residual stream."""

    ATTENTION = "full_attention"
    MAMBA = "linear_attention"
    MLP = "mlp"
    MOE = "moe"


_KINDS = {kind.value: kind for kind in LayerKind}


class Split(StrEnum):
    """Over which processes a tensor is divided."""

    REPLICATED = "replicated"
    TENSOR = "tensor"
    """Over the tensor parallel processes."""
    EXPERT = "expert"
    """One expert's: experts over the expert parallel processes, its matrices over the expert tensor parallel ones."""


@dataclass(frozen=True, slots=True)
class Tensor:
    """One tensor, or `count` tensors of the same size and split.

    >>> Tensor("router", 512 * 64, Split.REPLICATED).total
    32768
    """

    name: str
    size: int
    """Elements of one tensor, whole."""
    split: Split
    count: int = 1
    is_fp32: bool = False
    """Kept in float32 whatever the parameters' format."""

    @property
    def total(self) -> int:
        """Elements of all of them."""
        return self.size * self.count


def layers(config: Any) -> tuple[tuple[LayerKind, ...], ...]:
    """The blocks of each layer as megatron-core counts layers: attention and feed-forward are one, a hybrid's layer is one block."""
    if config.model_type == "nemotron_h":
        return tuple((_KINDS[kind],) for kind in config.layers_block_type)
    attention = LayerKind.ATTENTION
    if config.model_type != "qwen3_moe":
        return ((attention, LayerKind.MLP),) * config.num_hidden_layers
    sparse = [layer not in config.mlp_only_layers and (layer + 1) % config.decoder_sparse_step == 0 for layer in range(config.num_hidden_layers)]
    return tuple((attention, LayerKind.MOE if is_sparse else LayerKind.MLP) for is_sparse in sparse)


def head_dim(config: Any) -> int:
    """Channels of one attention head."""
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def num_experts(config: Any) -> int:
    """Routed experts of a layer; 0 for a model without any."""
    if config.model_type == "qwen3_moe":
        return config.num_experts
    return config.n_routed_experts if LayerKind.MOE in getattr(config, "layers_block_type", ()) else 0


def block_tensors(config: Any, kind: LayerKind) -> tuple[Tensor, ...]:
    """Every tensor of one block, its norm included."""
    match kind:
        case LayerKind.ATTENTION:
            return _attention(config)
        case LayerKind.MAMBA:
            return _mamba(config)
        case LayerKind.MLP:
            projections = feed_forward("mlp", config.hidden_size, config.intermediate_size, Split.TENSOR, is_gated=is_gated(config))
            return (Tensor("mlp.norm", config.hidden_size, Split.REPLICATED), *projections)
        case LayerKind.MOE:
            return _moe(config)


def first_tensors(config: Any) -> tuple[Tensor, ...]:
    """Tensors before the first layer."""
    return (Tensor("embedding", config.vocab_size * config.hidden_size, Split.TENSOR),)


def last_tensors(config: Any, *, is_first_stage: bool) -> tuple[Tensor, ...]:
    """Tensors after the last layer; a tied head is the embedding, or a second copy of it on another pipeline stage."""
    norm = Tensor("final_norm", config.hidden_size, Split.REPLICATED)
    if config.tie_word_embeddings and is_first_stage:
        return (norm,)
    return (norm, Tensor("head", config.vocab_size * config.hidden_size, Split.TENSOR))


def is_gated(config: Any) -> bool:
    """Whether feed-forwards have a gate beside the up projection; Nemotron's squared ReLU has none."""
    return config.model_type != "nemotron_h"


def expert_width(config: Any) -> int:
    """Width of the tokens that experts see: the hidden size, or the latent size of LatentMoE."""
    return getattr(config, "moe_latent_size", None) or config.hidden_size


def feed_forward(name: str, hidden: int, inner: int, split: Split, *, is_gated: bool, count: int = 1) -> tuple[Tensor, Tensor]:
    """The two tensors of a feed-forward, gate and up fused in the first."""
    first = Tensor(f"{name}.fc1", hidden * inner * (2 if is_gated else 1), split, count)
    return first, Tensor(f"{name}.fc2", inner * hidden, split, count)


def _attention(config: Any) -> tuple[Tensor, ...]:
    hidden, channels = config.hidden_size, head_dim(config)
    rows = channels * (config.num_attention_heads + 2 * config.num_key_value_heads)
    tensors = [
        Tensor("attention.norm", hidden, Split.REPLICATED),
        Tensor("attention.qkv", rows * hidden, Split.TENSOR),
        Tensor("attention.proj", config.num_attention_heads * channels * hidden, Split.TENSOR),
    ]
    if config.model_type == "qwen2":
        tensors.append(Tensor("attention.qkv_bias", rows, Split.TENSOR))
    if config.model_type in ("qwen3", "qwen3_moe"):
        tensors.append(Tensor("attention.qk_norm", channels, Split.REPLICATED, count=2))
    return tuple(tensors)


def _moe(config: Any) -> tuple[Tensor, ...]:
    hidden, width, experts = config.hidden_size, expert_width(config), num_experts(config)
    tensors = [Tensor("moe.norm", hidden, Split.REPLICATED), Tensor("moe.router", experts * hidden, Split.REPLICATED)]
    if width != hidden:
        tensors.append(Tensor("moe.latent", hidden * width, Split.REPLICATED, count=2))
    tensors += feed_forward("moe.expert", width, config.moe_intermediate_size, Split.EXPERT, is_gated=is_gated(config), count=experts)
    if config.model_type == "nemotron_h" and config.n_shared_experts:
        shared = config.n_shared_experts * config.moe_shared_expert_intermediate_size
        tensors += feed_forward("moe.shared", hidden, shared, Split.TENSOR, is_gated=False)
    return tuple(tensors)


def _mamba(config: Any) -> tuple[Tensor, ...]:
    hidden, heads, inner, channels = config.hidden_size, config.mamba_num_heads, mamba_inner(config), mamba_channels(config)
    return (
        Tensor("mamba.norm", hidden, Split.REPLICATED),
        Tensor("mamba.in_proj", hidden * (inner + channels + heads), Split.TENSOR),
        Tensor("mamba.conv", config.conv_kernel * channels, Split.TENSOR),
        Tensor("mamba.conv_bias", channels, Split.TENSOR),
        Tensor("mamba.dt_bias", heads, Split.TENSOR),
        Tensor("mamba.A_log", heads, Split.TENSOR, is_fp32=True),
        Tensor("mamba.D", heads, Split.TENSOR, is_fp32=True),
        Tensor("mamba.gated_norm", inner, Split.TENSOR),
        Tensor("mamba.out_proj", inner * hidden, Split.TENSOR),
    )


def mamba_inner(config: Any) -> int:
    """Inner width of a Mamba block."""
    return config.mamba_num_heads * config.mamba_head_dim


def mamba_channels(config: Any) -> int:
    """Channels of a Mamba block's convolution: the inner width and, per group, the input and output vectors of the state."""
    return mamba_inner(config) + 2 * config.n_groups * config.ssm_state_size
