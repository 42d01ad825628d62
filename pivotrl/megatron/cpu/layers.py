"""Layers in plain torch with the interfaces megatron-core expects: a norm that knows sequence parallelism, and SDPA core attention.

Upstream's own fallbacks do not serve: its torch norm refuses sequence parallelism, and its core attention materialises the whole
[heads, sequence, sequence] score matrix. Suffixes: S = sequence, B = batch, H = heads, D = channels of a head.
"""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import nn
from torch.nn import functional

from pivotrl.megatron.slices import global_order, own_positions


def normalize(hidden: torch.Tensor, config: TransformerConfig, *, weight: torch.Tensor, bias: torch.Tensor | None, eps: float) -> torch.Tensor:
    """RMSNorm or LayerNorm over the last dimension, as `config.normalization` says; a zero-centered weight is stored minus 1."""
    scale = weight + 1 if config.layernorm_zero_centered_gamma else weight
    if config.normalization == "RMSNorm":
        return functional.rms_norm(hidden, (hidden.shape[-1],), scale, eps)
    return functional.layer_norm(hidden, (hidden.shape[-1],), scale, bias, eps)


def norm_parameters(config: TransformerConfig, hidden_size: int) -> tuple[nn.Parameter, nn.Parameter | None]:
    """Weight and, for LayerNorm, bias of a norm, at the identity.

    Marked `sequence_parallel` where the configuration is: upstream's `finalize_model_grads` then sums their gradients over the tensor
    parallel ranks, each of which saw its own part of the sequence.
    """
    fill = torch.zeros if config.layernorm_zero_centered_gamma else torch.ones
    weight = nn.Parameter(fill(hidden_size, dtype=config.params_dtype))
    bias = None if config.normalization == "RMSNorm" else nn.Parameter(torch.zeros(hidden_size, dtype=config.params_dtype))
    for parameter in (weight, bias):
        if parameter is not None:
            parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
    return weight, bias


class Norm(nn.Module):
    """RMSNorm or LayerNorm; parameters `weight` and `bias`, as in transformer-engine."""

    bias: nn.Parameter | None

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, has_residual: bool = False) -> None:  # noqa: FBT001 (upstream's signature)
        super().__init__()
        if config.fused_residual_rmsnorm and has_residual:
            raise NotImplementedError("fused_residual_rmsnorm needs transformer-engine")
        self._config = config
        self._eps = eps
        self.weight, bias = norm_parameters(config, hidden_size)
        self.register_parameter("bias", bias)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """The normalised tensor, same shape."""
        return normalize(hidden, self._config, weight=self.weight, bias=self.bias, eps=self._eps)


class CausalAttention(MegatronModule):
    """Causal core attention through torch's scaled_dot_product_attention: grouped queries, no score matrix in memory, packed sequences.

    Right padding needs no mask: a causal query never sees a later position, and padded positions carry no loss. Context parallel ranks
    gather all keys and values and mask by position: right everywhere, and as slow as it is simple.

    Raises:
        NotImplementedError: at construction or call for what only the GPU layers do (other masks, attention bias).
    """

    def __init__(
        self,
        config: TransformerConfig,
        *,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        softmax_scale: float | None = None,
        **_unused: Any,
    ) -> None:
        super().__init__(config=config)
        if attn_mask_type is not AttnMaskType.causal or attention_type != "self":
            raise NotImplementedError(f"the CPU platform has causal self attention only, not {attention_type} attention with mask {attn_mask_type}")
        channels = config.kv_channels
        if channels is None:
            raise ValueError("kv_channels is unset")
        self.softmax_scale = softmax_scale if softmax_scale is not None else 1.0 / math.sqrt(channels)

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        _attention_mask: torch.Tensor | None,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: torch.Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
    ) -> torch.Tensor:
        """Attention output [S, B, H * D] of queries [S, B, H, D]; without B where sequences are packed.

        Keys and values may have fewer heads than queries.
        """
        if attn_mask_type not in (None, AttnMaskType.causal, AttnMaskType.padding_causal) or attention_bias is not None:
            raise NotImplementedError("the CPU platform has causal attention without bias only")
        if packed_seq_params is None:
            starts = [0, query.shape[0] * self.config.context_parallel_size]
            return self._attend_each(query, key, value, starts)
        query, key, value = (tensor.unsqueeze(1) for tensor in (query, key, value))
        return self._attend_each(query, key, value, packed_seq_params.cu_seqlens_q.tolist()).squeeze(1)

    def _attend_each(self, query_S_B_H_D: torch.Tensor, key_S_B_H_D: torch.Tensor, value_S_B_H_D: torch.Tensor, starts: list[int]) -> torch.Tensor:
        """Each sequence of the stream for itself; `starts` are global positions, the tensors this context parallel rank's."""
        size = self.config.context_parallel_size
        own_S = None
        if size > 1:
            group: Any = parallel_state.get_context_parallel_group()
            own_S = own_positions(starts, size=size, rank=group.rank())
            order = global_order(starts, size=size)
            key_S_B_H_D, value_S_B_H_D = (
                gather_from_sequence_parallel_region(tensor.contiguous(), group=group).index_select(0, order)
                for tensor in (key_S_B_H_D, value_S_B_H_D)
            )
        outputs = []
        for start, end in pairwise(starts):
            mine = slice(start // size, end // size)
            mask = None if own_S is None else own_S[mine, None] >= torch.arange(start, end)
            outputs.append(self._attend(query_S_B_H_D[mine], key_S_B_H_D[start:end], value_S_B_H_D[start:end], mask))
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)

    def _attend(self, query_S_B_H_D: torch.Tensor, key_S_B_H_D: torch.Tensor, value_S_B_H_D: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        query, key, value = (tensor.permute(1, 2, 0, 3) for tensor in (query_S_B_H_D, key_S_B_H_D, value_S_B_H_D))
        output_B_H_S_D = functional.scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=mask,
            is_causal=mask is None,
            scale=self.softmax_scale,
            dropout_p=self.config.attention_dropout if self.training else 0.0,
            enable_gqa=query.shape[1] != key.shape[1],
        )
        batch, _, sequence, _ = output_B_H_S_D.shape
        return output_B_H_S_D.permute(2, 0, 1, 3).reshape(sequence, batch, -1)
