"""Floating point operations of a model, from its Hugging Face config.json: the numerator of model FLOP utilisation.

Counts what the model requires, not what an implementation does: causal attention attends to earlier positions only, recomputed
activations count once, the output head runs on scored positions only. A multiply and an add are two operations; norms,
activations, rotary embeddings and the softmax, together well under a percent, are left out. Imports neither torch nor megatron.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

# Forward, and twice that for the gradients with respect to activations and weights.
_TRAINING_PASSES = 3
# Of one state element per token: decay, input (two factors and a sum), readout (product and sum).
_SCAN_FLOPS = 6

_ATTENTION, _MAMBA, _MLP, _MOE = "full_attention", "linear_attention", "mlp", "moe"


@dataclass(frozen=True, slots=True)
class Work:
    """What a step put through the model; adds up over micro-batches and data parallel ranks.

    >>> Work(num_tokens=3, num_pairs=6, num_scored=1) + Work(2, 3, 1)
    Work(num_tokens=5, num_pairs=9, num_scored=2)
    """

    num_tokens: int
    """Positions forwarded, padding left out; with shared prefixes the prefix counts once."""
    num_pairs: int
    """(query, key) pairs of causal attention: T (T + 1) / 2 for one sequence of T tokens."""
    num_scored: int
    """Positions projected to the vocabulary."""

    def __add__(self, other: Work) -> Work:
        return Work(self.num_tokens + other.num_tokens, self.num_pairs + other.num_pairs, self.num_scored + other.num_scored)


@dataclass(frozen=True, slots=True)
class ForwardCost:
    """Operations of one forward pass, linear in the work.

    >>> ForwardCost(per_token=10, per_pair=2, per_scored=5).training_flops(Work(num_tokens=3, num_pairs=6, num_scored=1))
    141
    """

    per_token: int
    per_pair: int
    per_scored: int

    def forward_flops(self, work: Work) -> int:
        """Operations of forwarding `work` once."""
        return self.per_token * work.num_tokens + self.per_pair * work.num_pairs + self.per_scored * work.num_scored

    def training_flops(self, work: Work) -> int:
        """Operations of forward and backward, 3 times the forward's; recomputed activations are not counted again."""
        return _TRAINING_PASSES * self.forward_flops(work)


def forward_cost(config: Any) -> ForwardCost:
    """Cost of a model.

    Args:
        config: the transformers configuration object of a supported family (Llama, Qwen2, Qwen3, Qwen3-MoE, Nemotron-H).
    """
    kinds = _layer_kinds(config)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    per_layer = {
        _ATTENTION: lambda: _matmul(config.hidden_size * head_dim * (2 * config.num_attention_heads + 2 * config.num_key_value_heads)),
        _MAMBA: lambda: _mamba(config),
        _MLP: lambda: _matmul(_num_projections(config) * config.hidden_size * config.intermediate_size),
        _MOE: lambda: _moe(config),
    }
    return ForwardCost(
        per_token=sum(count * per_layer[kind]() for kind, count in kinds.items() if count),
        # Scores and the weighted sum of values: a dot product of head_dim each, per query head.
        per_pair=kinds[_ATTENTION] * 2 * _matmul(config.num_attention_heads * head_dim),
        per_scored=_matmul(config.hidden_size * config.vocab_size),
    )


def _layer_kinds(config: Any) -> dict[str, int]:
    if config.model_type == "nemotron_h":
        return {kind: sum(one == kind for one in config.layers_block_type) for kind in (_ATTENTION, _MAMBA, _MLP, _MOE)}
    num_moe = 0
    if config.model_type == "qwen3_moe":
        step = config.decoder_sparse_step
        num_moe = sum(layer not in config.mlp_only_layers and (layer + 1) % step == 0 for layer in range(config.num_hidden_layers))
    return {_ATTENTION: config.num_hidden_layers, _MAMBA: 0, _MLP: config.num_hidden_layers - num_moe, _MOE: num_moe}


def _moe(config: Any) -> int:
    """Router over all experts, then the chosen ones; Nemotron-3 routes in full width, computes in the latent width, and adds a shared expert."""
    hidden = config.hidden_size
    if config.model_type == "qwen3_moe":
        experts = config.num_experts_per_tok * _num_projections(config) * hidden * config.moe_intermediate_size
        return _matmul(hidden * config.num_experts + experts)
    width = config.moe_latent_size or hidden
    latent = 2 * hidden * width if config.moe_latent_size else 0
    experts = config.num_experts_per_tok * _num_projections(config) * width * config.moe_intermediate_size
    shared = config.n_shared_experts * _num_projections(config) * hidden * config.moe_shared_expert_intermediate_size
    return _matmul(hidden * config.n_routed_experts + latent + experts + shared)


def _mamba(config: Any) -> int:
    inner = config.mamba_num_heads * config.mamba_head_dim
    channels = inner + 2 * config.n_groups * config.ssm_state_size
    projections = _matmul(config.hidden_size * (inner + channels + config.mamba_num_heads) + inner * config.hidden_size)
    return projections + _matmul(config.conv_kernel * channels) + _SCAN_FLOPS * inner * config.ssm_state_size


def _num_projections(config: Any) -> int:
    """Gated feed-forwards have three matrices; Nemotron's squared ReLU has two."""
    return 2 if config.model_type == "nemotron_h" else 3


def _matmul(num_weights: int) -> int:
    return 2 * num_weights
