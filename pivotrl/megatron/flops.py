"""Floating point operations of a model: the numerator of model FLOP utilisation.

Counts what the model requires, not what an implementation does: causal attention attends to earlier positions only, recomputed
activations count once, the output head runs on scored positions only. A multiply and an add are two operations; norms,
activations, rotary embeddings and the softmax, together well under a percent, are left out. Imports neither torch nor megatron.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

from pivotrl.megatron.architecture import LayerKind, Split, Tensor, block_tensors, head_dim, layers, mamba_inner, num_experts

# Forward, and twice that for the gradients with respect to activations and weights.
_TRAINING_PASSES = 3
# Of one state element per token: decay, input (two factors and a sum), readout (product and sum).
_SCAN_FLOPS = 6
# Tensors that scale, shift or decay elementwise; every other one is multiplied with a vector per token.
_ELEMENTWISE = ("norm", "bias", "A_log", "mamba.D")


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


def causal_pairs(num_tokens: int) -> int:
    """(query, key) pairs of one sequence in causal attention.

    >>> causal_pairs(3)
    6
    """
    return num_tokens * (num_tokens + 1) // 2


def forward_cost(config: Any) -> ForwardCost:
    """Cost of a model.

    Args:
        config: the transformers configuration object of a supported family (Llama, Qwen2, Qwen3, Qwen3-MoE, Nemotron-H).
    """
    kinds = Counter(kind for layer in layers(config) for kind in layer)
    return ForwardCost(
        per_token=sum(count * _block_flops(config, kind) for kind, count in kinds.items()),
        # Scores and the weighted sum of values: a dot product of head_dim each, per query head.
        per_pair=kinds[LayerKind.ATTENTION] * 4 * config.num_attention_heads * head_dim(config),
        per_scored=2 * config.hidden_size * config.vocab_size,
    )


def _block_flops(config: Any, kind: LayerKind) -> int:
    multiplied = sum(_num_used(config, tensor) for tensor in block_tensors(config, kind) if not tensor.name.endswith(_ELEMENTWISE))
    scan = _SCAN_FLOPS * mamba_inner(config) * config.ssm_state_size if kind is LayerKind.MAMBA else 0
    return 2 * multiplied + scan


def _num_used(config: Any, tensor: Tensor) -> int:
    """Elements one token meets: of the experts, only those it is routed to."""
    if tensor.split is Split.EXPERT:
        return tensor.total * config.num_experts_per_tok // num_experts(config)
    return tensor.total
