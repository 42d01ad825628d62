"""Fused attention that also gives the log-sum-exp of every query's scores, and its backward pass, on either device.

torch's `scaled_dot_product_attention` hides the log-sum-exp, which is what attention over two sets of keys is merged by. The operators
behind it return it. Heads of keys and values must be as many as those of queries. Dropout is off. The CUDA operators take bfloat16 and
float16, head sizes that are multiples of 8, and were not run where this was written.
"""

from __future__ import annotations

from typing import Any

import torch

_aten = torch.ops.aten


def flash_forward(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, is_causal: bool, scale: float
) -> tuple[torch.Tensor, torch.Tensor, tuple[Any, ...]]:
    """(output [B, H, S, D], log-sum-exp [B, H, S] float32, what the backward operator wants besides) of queries [B, H, S, D]."""
    return _FORWARD[query.device.type](query, key, value, is_causal, scale)


def flash_backward(
    gradient: torch.Tensor, saved: tuple[torch.Tensor, ...], besides: tuple[Any, ...], *, is_causal: bool, scale: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of query, key and value.

    With the output and log-sum-exp of attention over more keys than these, it is these keys' part of that attention's gradient: the
    operator needs no more than softmax weights exp(score - logsumexp) and the product of gradient and output.

    Args:
        saved: query, key, value, output and log-sum-exp.
    """
    return _BACKWARD[gradient.device.type]((gradient, *saved), besides, is_causal, scale)


def _cpu_forward(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, is_causal: bool, scale: float) -> Any:  # noqa: FBT001 (private)
    output, logsumexp = _aten._scaled_dot_product_flash_attention_for_cpu(query, key, value, 0.0, is_causal, scale=scale)
    return output, logsumexp, ()


def _cpu_backward(tensors: tuple[torch.Tensor, ...], _besides: tuple[Any, ...], is_causal: bool, scale: float) -> Any:  # noqa: FBT001 (private)
    return _aten._scaled_dot_product_flash_attention_for_cpu_backward(*tensors, 0.0, is_causal, scale=scale)


def _cuda_forward(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, is_causal: bool, scale: float) -> Any:  # noqa: FBT001 (private)
    result = _aten._scaled_dot_product_flash_attention(query, key, value, 0.0, is_causal, False, scale=scale)
    output, logsumexp, starts_q, starts_k, longest_q, longest_k, seed, offset = result[:8]
    return output, logsumexp, (starts_q, starts_k, longest_q, longest_k, seed, offset)


def _cuda_backward(tensors: tuple[torch.Tensor, ...], besides: tuple[Any, ...], is_causal: bool, scale: float) -> Any:  # noqa: FBT001 (private)
    starts_q, starts_k, longest_q, longest_k, seed, offset = besides
    return _aten._scaled_dot_product_flash_attention_backward(
        *tensors, starts_q, starts_k, longest_q, longest_k, 0.0, is_causal, seed, offset, scale=scale
    )


_FORWARD = {"cpu": _cpu_forward, "cuda": _cuda_forward}
_BACKWARD = {"cpu": _cpu_backward, "cuda": _cuda_backward}
