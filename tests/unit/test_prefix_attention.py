"""Attention over shared prefixes against a dense softmax in float64: outputs and gradients, grouped queries, ragged actions, padding."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from pivotrl.megatron.prefix_attention import attend_branches
from pivotrl.megatron.shared_prefix import Branches

# Positions 7, 11, 14, 15 and 30 are padding, as context parallelism leaves it.
_GROUPS = (
    Branches.of(prefix_start=0, prefix_length=7, action_starts=[8, 12], action_lengths=[3, 2]),
    Branches.of(prefix_start=16, prefix_length=5, action_starts=[21, 24, 27], action_lengths=[3, 3, 3]),
)
_LENGTH, _HEADS, _CHANNELS, _SCALE = 31, 4, 8, 0.35


def visible(groups: Sequence[Branches]) -> torch.Tensor:
    """bool [S, S]: which key a query sees."""
    sees = torch.zeros(_LENGTH, _LENGTH, dtype=torch.bool)
    for group in groups:
        prefix = list(range(group.prefix.start, group.prefix.stop))
        for row, is_real in zip(group.action_index_G_A.tolist(), group.is_real_G_A.tolist(), strict=True):
            sequence = prefix + [place for place, real in zip(row, is_real, strict=True) if real]
            for i, query in enumerate(sequence):
                sees[query, sequence[: i + 1]] = True
    return sees


def dense(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    key, value = (tensor.repeat_interleave(_HEADS // tensor.shape[1], dim=1) for tensor in (key, value))
    sees = visible(_GROUPS)
    scores = torch.einsum("qhd,khd->hqk", query, key) * _SCALE
    weights = scores.masked_fill(~sees, -torch.inf).softmax(-1).masked_fill(~sees.any(1)[:, None], 0)
    return torch.einsum("hqk,khd->qhd", weights, value)


def shared(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    return attend_branches(query, key, value, _GROUPS, scale=_SCALE)


@pytest.mark.parametrize("key_heads", [4, 2, 1])
def test_outputs_and_gradients_equal_a_dense_softmax(key_heads: int) -> None:
    generator = torch.Generator().manual_seed(0)
    heads = (_HEADS, key_heads, key_heads, _HEADS)
    query, key, value, weight = (torch.randn(_LENGTH, count, _CHANNELS, generator=generator, dtype=torch.float64) for count in heads)
    weight *= visible(_GROUPS).any(1)[:, None, None]
    results = []
    for attend, dtype in ((dense, torch.float64), (shared, torch.float32)):
        inputs = [tensor.to(dtype, copy=True).requires_grad_() for tensor in (query, key, value)]
        output = attend(*inputs)
        (output * weight.to(dtype)).sum().backward()
        results.append([output.detach(), *(tensor.grad for tensor in inputs)])
    for expected, ours in zip(*results, strict=True):
        assert expected is not None
        assert ours is not None
        torch.testing.assert_close(ours.double(), expected, atol=1e-6 * expected.abs().max().item(), rtol=0)


def test_padding_neither_gives_nor_takes() -> None:
    is_padding = ~visible(_GROUPS).any(1)
    assert is_padding.nonzero().flatten().tolist() == [7, 11, 14, 15, 30]
    generator = torch.Generator().manual_seed(1)
    inputs = [torch.randn(_LENGTH, _HEADS, _CHANNELS, generator=generator) for _ in range(3)]
    changed = [tensor.clone() for tensor in inputs]
    for tensor in changed:
        tensor[is_padding] = 1e4
    assert torch.equal(shared(*changed), shared(*inputs))
    assert not shared(*inputs)[is_padding].any()
