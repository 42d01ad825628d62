"""What megatron-core's Mamba layer takes from the packages mamba-ssm and causal-conv1d, made of `mamba`.

`patch_mamba_mixer` gives upstream's module these in place of the kernels it did not find. Only its training path is served; generation
is an engine's work.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from pivotrl.megatron.cpu.mamba import MambaState, causal_convolution, state_space_scan


class GroupedNorm(nn.Module):
    """RMSNorm over each group of channels by itself; mamba-ssm's gated RMSNorm as upstream uses it, without a gate.

    Args:
        group_size: channels of a group.
    """

    def __init__(self, hidden_size: int, eps: float, group_size: int, *, dtype: torch.dtype, **_unused: Any) -> None:
        super().__init__()
        self._eps, self._group_size = eps, group_size
        self.weight = nn.Parameter(torch.ones(hidden_size, dtype=dtype))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """The normalised tensor, same shape."""
        grouped = functional.rms_norm(hidden.unflatten(-1, (-1, self._group_size)), (self._group_size,), eps=self._eps)
        return grouped.flatten(-2) * self.weight

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None) -> Any:
        """As upstream's subclass of mamba-ssm's norm: the weight is split over tensor parallel processes."""
        from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint

        state = self.state_dict(prefix="", keep_vars=True)
        groups = {"tp_group": self.tp_group, "dp_cp_group": metadata["dp_cp_group"]}
        return make_sharded_tensors_for_checkpoint(state, prefix, {"weight": 0}, sharded_offsets, **groups)


@dataclass(frozen=True, slots=True)
class MixerWeights:
    """Parameters of a Mamba-2 layer between its two projections."""

    convolution_C_W: torch.Tensor
    convolution_bias_C: torch.Tensor
    step_bias_H: torch.Tensor
    decay_H: torch.Tensor
    """A, negative."""
    skip_H: torch.Tensor
    """D."""
    channels: int
    """Channels of a head."""
    groups: int
    """Groups of heads that share B and C."""


def convolve_and_scan(
    zxbcdt_B_S_C: torch.Tensor, weights: MixerWeights, *, initial: MambaState | None = None, segments_B_S: torch.Tensor | None = None
) -> tuple[torch.Tensor, MambaState]:
    """A Mamba-2 layer between its projections, before its norm: outputs [B, S, H * channels] and the state after them.

    (z, x, B, C, dt) = input; (x, B, C) = silu(conv(x, B, C)); y = scan(x, softplus(dt + bias)) + D x; output = y silu(z).

    Args:
        zxbcdt_B_S_C: the input projection's output.
        initial: the state of a prefix; None: none.
        segments_B_S: segment ids of packed rows.
    """
    heads, groups = len(weights.decay_H), weights.groups
    inner = heads * weights.channels
    size = (weights.convolution_C_W.shape[0] - inner) // (2 * groups)
    gate, mixed, step = zxbcdt_B_S_C.split([inner, inner + 2 * groups * size, heads], dim=-1)
    mixed, convolution_state = causal_convolution(
        mixed,
        weights.convolution_C_W,
        weights.convolution_bias_C,
        initial_B_W_C=None if initial is None else initial.convolution_B_W_C,
        segments_B_S=segments_B_S,
    )
    x, write, read = functional.silu(mixed).split([inner, groups * size, groups * size], dim=-1)
    x = x.unflatten(-1, (heads, weights.channels))
    output, scan_state = state_space_scan(
        x,
        functional.softplus(step.float() + weights.step_bias_H),
        weights.decay_H,
        write.unflatten(-1, (groups, size)),
        read.unflatten(-1, (groups, size)),
        initial_B_H_P_N=None if initial is None else initial.scan_B_H_P_N,
        segments_B_S=segments_B_S,
    )
    output = (output + x * weights.skip_H.unsqueeze(-1).to(x.dtype)).flatten(-2) * functional.silu(gate)
    return output, MambaState(convolution_state, scan_state)


def _training_kernel(  # noqa: PLR0913 (upstream's call)
    zxbcdt: torch.Tensor,
    conv1d_weight: torch.Tensor,
    conv1d_bias: torch.Tensor,
    dt_bias: torch.Tensor,
    A: torch.Tensor,
    D: torch.Tensor,
    *,
    headdim: int,
    ngroups: int,
    seq_idx: torch.Tensor | None,
    **_unused: Any,
) -> torch.Tensor:
    """`convolve_and_scan` with the signature of mamba-ssm's fused training kernel, as upstream calls it."""
    weights = MixerWeights(conv1d_weight, conv1d_bias, dt_bias, A, D, headdim, ngroups)
    return convolve_and_scan(zxbcdt, weights, segments_B_S=seq_idx)[0]


def _scan_kernel(  # noqa: PLR0913 (upstream's call)
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    _chunk_size: int,
    *,
    D: torch.Tensor,
    z: torch.Tensor,
    dt_bias: torch.Tensor,
    initial_states: torch.Tensor | None,
    dt_softplus: bool,
    return_final_states: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The scan alone, from a given state and with the state after it, with the signature of mamba-ssm's kernel."""
    assert dt_softplus
    assert return_final_states
    output, state = state_space_scan(x, functional.softplus(dt.float() + dt_bias), A, B, C, initial_B_H_P_N=initial_states)
    return (output + x * D.unsqueeze(-1).to(x.dtype)) * functional.silu(z), state


def patch_mamba_mixer(module: ModuleType) -> None:
    """Upstream refuses to build a Mamba layer, and one that takes packed rows, without the two packages."""
    module.__dict__.update(
        HAVE_MAMBA_SSM=True,
        ExtendedRMSNorm=GroupedNorm,
        mamba_split_conv1d_scan_combined=_training_kernel,
        mamba_chunk_scan_combined=_scan_kernel,
        _check_mamba_sequence_packing_support=lambda **_keywords: (True, None),
    )
