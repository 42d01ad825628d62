"""Mamba-2 in plain torch: the causal convolution and the state space scan, each from a given state and to a state that can be given on.

The scan is the chunked form of state space duality (Dao and Gu, arXiv 2405.21060, listing 1): inside a chunk a masked matrix product,
between chunks a short recurrence. Differentiable throughout. The running sum of log decays is kept in float64: its differences over a
chunk lose digits in float32, which alone moved outputs by 2e-5.

Packed rows are given by segment ids, equal within a sequence and different from its neighbours': neither state nor convolution crosses
from one to the next. A given state belongs to the first segment, a returned one to the last.
Suffixes: B = rows, S = positions, C = channels, W = taps, H = heads, P = channels of a head, G = groups, R = heads of a group,
N = state size, K = chunks, L and Q = positions of a chunk.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn import functional

# A chunk's masked products cost S * Q and the recurrence S / Q steps; 32 and 64 are equally fast on a CPU from 512 to 8,192 positions.
CHUNK = 64


@dataclass(frozen=True, slots=True)
class MambaState:
    """What a Mamba-2 layer remembers of a prefix."""

    convolution_B_W_C: torch.Tensor
    """The last W - 1 inputs of the convolution, oldest first."""
    scan_B_H_P_N: torch.Tensor
    """The state of the scan."""


def causal_convolution(
    input_B_S_C: torch.Tensor,
    weight_C_W: torch.Tensor,
    bias_C: torch.Tensor,
    *,
    initial_B_W_C: torch.Tensor | None = None,
    segments_B_S: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Each channel convolved with its own taps over the W last positions: outputs [B, S, C] and the last W - 1 inputs [B, W - 1, C].

    y[s] = bias + sum over w of weight[w] * x[s - (W - 1) + w], where x before the start is the given state or zero.

    Args:
        initial_B_W_C: the W - 1 inputs before the first position, oldest first; None: zeros.
        segments_B_S: segment ids; None: every row is one sequence.
    """
    taps, positions = weight_C_W.shape[1], input_B_S_C.shape[1]
    if initial_B_W_C is None:
        initial_B_W_C = input_B_S_C.new_zeros(input_B_S_C.shape[0], taps - 1, input_B_S_C.shape[2])
    extended = torch.cat([initial_B_W_C.to(input_B_S_C.dtype), input_B_S_C], dim=1)
    if segments_B_S is None:
        output_B_C_S = functional.conv1d(extended.transpose(1, 2), weight_C_W.unsqueeze(1), bias_C, groups=len(weight_C_W))
        return output_B_C_S.transpose(1, 2), extended[:, positions:]
    # Before the first position lies the first segment's state.
    segments = torch.cat([segments_B_S[:, :1].expand(-1, taps - 1), segments_B_S], dim=1)
    output = bias_C.expand_as(input_B_S_C)
    for tap in range(taps):
        is_own = segments[:, tap : tap + positions] == segments_B_S
        output = output + extended[:, tap : tap + positions] * (weight_C_W[:, tap] * is_own.unsqueeze(-1))
    is_last = segments[:, positions:] == segments[:, -1:]
    return output, extended[:, positions:] * is_last.unsqueeze(-1)


def state_space_scan(
    input_B_S_H_P: torch.Tensor,
    step_B_S_H: torch.Tensor,
    decay_H: torch.Tensor,
    write_B_S_G_N: torch.Tensor,
    read_B_S_G_N: torch.Tensor,
    *,
    initial_B_H_P_N: torch.Tensor | None = None,
    segments_B_S: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Outputs [B, S, H, P] in the input's number format and the final state [B, H, P, N], float32 or wider.

    h[s] = exp(step[s] * decay) * h[s - 1] + step[s] * input[s] (outer) write[s];  y[s] = h[s] read[s].

    Args:
        input_B_S_H_P: x.
        step_B_S_H: Delta, positive: after softplus and bias.
        decay_H: A, negative.
        write_B_S_G_N: B of each group of heads.
        read_B_S_G_N: C of each group of heads.
        initial_B_H_P_N: state before the first position; None: zeros.
        segments_B_S: segment ids; None: every row is one sequence.
    """
    compute = torch.promote_types(input_B_S_H_P.dtype, torch.float32)
    rows, positions, heads, channels = input_B_S_H_P.shape
    groups, size = write_B_S_G_N.shape[2:]
    step = step_B_S_H.to(compute)
    chunk = min(CHUNK, positions)
    padding = -positions % chunk

    def chunked(tensor: torch.Tensor, *shape: int) -> torch.Tensor:
        """[B, K, Q, ...] with padding that changes no state: a step of zero neither decays nor writes."""
        padded = functional.pad(tensor, (0, 0) * (tensor.dim() - 2) + (0, padding))
        return padded.reshape(rows, -1, chunk, *shape)

    driven_BKGR_Q_P = chunked(input_B_S_H_P.to(compute) * step.unsqueeze(-1), groups, heads // groups, channels).permute(0, 1, 3, 4, 2, 5)
    write_BKG_Q_N, read_BKG_Q_N = (chunked(tensor.to(compute), groups, size).transpose(2, 3) for tensor in (write_B_S_G_N, read_B_S_G_N))
    log_decays = chunked(step.double() * decay_H.double(), groups, heads // groups).permute(0, 1, 3, 4, 2)
    masks = None
    if segments_B_S is not None:
        masks = _segment_masks(torch.cat([segments_B_S, segments_B_S[:, -1:].expand(-1, padding)], dim=1).view(rows, -1, chunk))
    decays = _chunk_decays(log_decays, masks, compute)

    scores_BKGR_L_Q = (read_BKG_Q_N @ write_BKG_Q_N.transpose(-1, -2)).unsqueeze(3) * decays.within
    to_end_BKGR_P_N = (driven_BKGR_Q_P * decays.to_end.unsqueeze(-1)).transpose(-1, -2) @ write_BKG_Q_N.unsqueeze(3)
    state = driven_BKGR_Q_P.new_zeros(rows, groups, heads // groups, channels, size)
    if initial_B_H_P_N is not None:
        state = initial_B_H_P_N.to(compute).view_as(state)
    before = []
    # Unbound once: indexing each chunk would make the backward pass quadratic in their number.
    for across, written in zip(decays.across.unbind(1), to_end_BKGR_P_N.unbind(1), strict=True):
        before.append(state)
        state = state * across[..., None, None] + written
    carried_BKGR_L_P = (read_BKG_Q_N.unsqueeze(3) @ torch.stack(before, dim=1).transpose(-1, -2)) * decays.from_start.unsqueeze(-1)
    output = (scores_BKGR_L_Q @ driven_BKGR_Q_P + carried_BKGR_L_P).permute(0, 1, 4, 2, 3, 5).reshape(rows, -1, heads, channels)
    return output[:, :positions].to(input_B_S_H_P.dtype), state.reshape(rows, heads, channels, size)


@dataclass(frozen=True, slots=True)
class _SegmentMasks:
    """Which positions of a chunk a state may reach, [B, K, Q] and the like; all True without packing."""

    within_B_K_L_Q: torch.Tensor
    to_end_B_K_Q: torch.Tensor
    from_start_B_K_Q: torch.Tensor
    across_B_K: torch.Tensor


@dataclass(frozen=True, slots=True)
class _ChunkDecays:
    """Factors of a chunk: from a position to a later one, to the chunk's end, from its start, and from start to end."""

    within: torch.Tensor
    to_end: torch.Tensor
    from_start: torch.Tensor
    across: torch.Tensor


def _segment_masks(segments_B_K_Q: torch.Tensor) -> _SegmentMasks:
    first, last = segments_B_K_Q[..., :1], segments_B_K_Q[..., -1:]
    # The segment whose state arrives at a chunk is that of the position before it.
    arriving = torch.cat([first[:, :1], last[:, :-1]], dim=1)
    return _SegmentMasks(
        within_B_K_L_Q=segments_B_K_Q.unsqueeze(-1) == segments_B_K_Q.unsqueeze(-2),
        to_end_B_K_Q=segments_B_K_Q == last,
        from_start_B_K_Q=segments_B_K_Q == arriving,
        across_B_K=(last == arriving).squeeze(-1),
    )


def _chunk_decays(log_decays: torch.Tensor, masks: _SegmentMasks | None, compute: torch.dtype) -> _ChunkDecays:
    """From the log decay of every position, float64 [B, K, G, R, Q]; the last dimension of `within` is the earlier position."""
    sums = log_decays.cumsum(-1)
    chunk = sums.shape[-1]
    is_earlier = torch.ones(chunk, chunk, dtype=torch.bool, device=sums.device).tril()
    within = sums.unsqueeze(-1) - sums.unsqueeze(-2)
    decays = _ChunkDecays(
        within=within.to(compute).masked_fill(~is_earlier, float("-inf")).exp(),
        to_end=(sums[..., -1:] - sums).to(compute).exp(),
        from_start=sums.to(compute).exp(),
        across=sums[..., -1].to(compute).exp(),
    )
    if masks is None:
        return decays
    return _ChunkDecays(
        within=decays.within * masks.within_B_K_L_Q[:, :, None, None],
        to_end=decays.to_end * masks.to_end_B_K_Q[:, :, None, None],
        from_start=decays.from_start * masks.from_start_B_K_Q[:, :, None, None],
        across=decays.across * masks.across_B_K[:, :, None, None],
    )
