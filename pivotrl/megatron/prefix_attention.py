"""Causal attention over a stream in which the actions of a group share their prefix.

An action's token sees the whole prefix and its own action up to itself. The two sets of keys go through fused attention apart, all
actions of a group at once against the prefix, and the results are merged by their log-sum-exp: with o1, l1 over the prefix and o2, l2
over the action,
    l = log(exp(l1) + exp(l2)),    o = o1 exp(l1 - l) + o2 exp(l2 - l).
No mask and no score matrix is built. Backward, each part gets the merged output and log-sum-exp, and the parts' gradients add up.
Suffixes: S = tokens of the stream, N = action tokens of a group, G = actions, A = tokens of the longest, P = prefix tokens, H = heads of
queries, K = heads of keys and values, D = channels of a head.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from pivotrl.megatron.flash import flash_backward, flash_forward
from pivotrl.megatron.shared_prefix import Branches


def attend_branches(
    query_S_H_D: torch.Tensor, key_S_K_D: torch.Tensor, value_S_K_D: torch.Tensor, branches: Sequence[Branches], *, scale: float
) -> torch.Tensor:
    """Attention output [S, H, D]; zero at padding.

    Args:
        branches: the stream's groups, by positions in these tensors.
    """
    return _BranchAttention.apply(query_S_H_D, key_S_K_D, value_S_K_D, branches, scale)


@dataclass(frozen=True, slots=True)
class _Part:
    """One call of fused attention: which rows of the stream ask and answer, and how they are laid out for the operator."""

    is_causal: bool
    query_rows: slice | torch.Tensor
    key_rows: slice | torch.Tensor
    queries: Callable[[torch.Tensor], torch.Tensor]
    """[S, H, ...] of the stream to the operator's layout."""
    keys: Callable[[torch.Tensor], torch.Tensor]
    """[S, K, ...] of the stream to the operator's layout."""
    from_queries: Callable[[torch.Tensor], torch.Tensor]
    """The operator's layout to [rows, H, ...]."""
    from_keys: Callable[[torch.Tensor], torch.Tensor]
    """A gradient in the operator's layout to [rows, K, ...]."""
    is_padding: torch.Tensor | None = None
    """Queries of the operator's layout, less channels, that stand for no row."""


class _BranchAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query_S_H_D: torch.Tensor, key_S_K_D: torch.Tensor, value_S_K_D: torch.Tensor, branches: Sequence[Branches], scale: float
    ) -> torch.Tensor:
        ratio = query_S_H_D.shape[1] // key_S_K_D.shape[1]
        output_S_H_D = torch.zeros_like(query_S_H_D, memory_format=torch.contiguous_format)
        logsumexp_S_H = query_S_H_D.new_zeros(query_S_H_D.shape[:2], dtype=torch.float32)
        ctx.parts = []

        def attend(part: _Part) -> tuple[torch.Tensor, torch.Tensor]:
            inputs = part.queries(query_S_H_D), part.keys(key_S_K_D), part.keys(value_S_K_D)
            output, logsumexp, besides = flash_forward(*inputs, is_causal=part.is_causal, scale=scale)
            ctx.parts.append((part, besides))
            return part.from_queries(output), part.from_queries(logsumexp)

        for group in branches:
            within, on_prefix, on_own = _parts(group, ratio)
            output_S_H_D[group.prefix], logsumexp_S_H[group.prefix] = attend(within)
            (prefix_N_H_D, prefix_N_H), (own_N_H_D, own_N_H) = attend(on_prefix), attend(on_own)
            merged_N_H = torch.logaddexp(prefix_N_H, own_N_H)
            weight_N_H_1 = (prefix_N_H - merged_N_H).exp().unsqueeze(-1)
            output_S_H_D[group.action_rows] = torch.lerp(own_N_H_D.float(), prefix_N_H_D.float(), weight_N_H_1).to(output_S_H_D.dtype)
            logsumexp_S_H[group.action_rows] = merged_N_H
        ctx.scale = scale
        ctx.save_for_backward(query_S_H_D, key_S_K_D, value_S_K_D, output_S_H_D, logsumexp_S_H)
        return output_S_H_D

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        query_S_H_D, key_S_K_D, value_S_K_D, output_S_H_D, logsumexp_S_H = ctx.saved_tensors
        to_query, to_key, to_value = (torch.zeros_like(tensor) for tensor in (query_S_H_D, key_S_K_D, value_S_K_D))
        for part, besides in ctx.parts:
            logsumexp = part.queries(logsumexp_S_H)
            if part.is_padding is not None:
                # A padding query repeats another one; an infinite log-sum-exp takes its softmax weights, and so all it adds, to 0.
                logsumexp = logsumexp.masked_fill(part.is_padding, torch.inf)
            saved = part.queries(query_S_H_D), part.keys(key_S_K_D), part.keys(value_S_K_D), part.queries(output_S_H_D), logsumexp.contiguous()
            dq, dk, dv = flash_backward(part.queries(gradients[0]), saved, besides, is_causal=part.is_causal, scale=ctx.scale)
            to_query[part.query_rows] += part.from_queries(dq)
            to_key[part.key_rows] += part.from_keys(dk)
            to_value[part.key_rows] += part.from_keys(dv)
        return to_query, to_key, to_value, None, None


def _parts(group: Branches, ratio: int) -> tuple[_Part, _Part, _Part]:
    """The prefix on itself, all actions on the prefix, and each action on itself."""
    prefix, rows, own_G_A, is_real_G_A = group.prefix, group.action_rows, group.action_index_G_A, group.is_real_G_A

    def repeated(tensor: torch.Tensor) -> torch.Tensor:
        return tensor if ratio == 1 else tensor.repeat_interleave(ratio, dim=-2)

    def summed(gradient: torch.Tensor) -> torch.Tensor:
        return gradient if ratio == 1 else gradient.unflatten(1, (-1, ratio)).sum(2)

    within = _Part(
        is_causal=True,
        query_rows=prefix,
        key_rows=prefix,
        queries=lambda tensor: tensor[prefix].transpose(0, 1).unsqueeze(0),
        keys=lambda tensor: repeated(tensor[prefix]).transpose(0, 1).unsqueeze(0),
        from_queries=lambda result: result.squeeze(0).transpose(0, 1),
        from_keys=lambda gradient: summed(gradient).squeeze(0).transpose(0, 1),
    )
    on_prefix = _Part(
        is_causal=False,
        query_rows=rows,
        key_rows=prefix,
        # Query heads that share a head of keys one after the other, as if they were more queries: no key is repeated.
        queries=lambda tensor: tensor[rows].unflatten(1, (-1, ratio)).movedim(0, 2).flatten(1, 2).unsqueeze(0).contiguous(),
        keys=lambda tensor: tensor[prefix].transpose(0, 1).unsqueeze(0),
        from_queries=lambda result: result.squeeze(0).unflatten(1, (ratio, -1)).movedim(2, 0).flatten(1, 2),
        from_keys=lambda gradient: gradient.squeeze(0).transpose(0, 1),
    )
    on_own = _Part(
        is_causal=True,
        query_rows=rows,
        key_rows=rows,
        queries=lambda tensor: tensor[own_G_A].transpose(1, 2),
        keys=lambda tensor: repeated(tensor[own_G_A]).transpose(1, 2),
        from_queries=lambda result: result.transpose(1, 2)[is_real_G_A],
        from_keys=lambda gradient: summed(gradient).transpose(1, 2)[is_real_G_A],
        is_padding=~is_real_G_A.unsqueeze(1),
    )
    return within, on_prefix, on_own
