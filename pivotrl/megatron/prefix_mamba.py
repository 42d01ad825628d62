"""A Mamba-2 layer over a stream in which the actions of a group share their prefix.

The layer's memory of a prefix is the convolution's last inputs and the state of the scan. The prefix runs once; every action of the
group starts from a copy of both, so that their gradients add up in the prefix. Suffixes: S = tokens of the whole stream, G = actions,
A = tokens of the longest, P = prefix tokens, X = what the input projection gives a token, C = channels of the convolution.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional

from pivotrl.megatron.shared_prefix import Branches, SharedPrefixParams
from pivotrl.megatron.upstream import mamba_mixer


def scan_branches(mixer: Any, projected_S_1_X: torch.Tensor, packing: SharedPrefixParams) -> torch.Tensor:
    """What upstream's `MambaMixer._ssm_training` computes, for such a stream: convolution, scan, gate and norm.

    Args:
        mixer: the layer.
        projected_S_1_X: z, x, B, C and dt of every token; under context parallelism of all tokens and this rank's share of the heads.
    """
    projected_S_X = projected_S_1_X.squeeze(1)
    output_S = projected_S_X.new_zeros(projected_S_X.shape[0], mixer.cp.d_inner_local_tpcp)
    for group in packing.branches:
        prefix_P, actions_N = _scan_group(mixer, projected_S_X, group)
        rows = torch.cat([torch.arange(group.prefix.start, group.prefix.stop, device=output_S.device), group.action_rows])
        output_S = output_S.index_copy(0, rows, torch.cat([prefix_P, actions_N]))
    output = mixer.cp.post_conv_ssm(output_S.unsqueeze(1), packing)
    return mixer.norm(output) if mixer.rmsnorm else output


def _scan_group(mixer: Any, projected_S_X: torch.Tensor, group: Branches) -> tuple[torch.Tensor, torch.Tensor]:
    """Outputs of the prefix's tokens and of all action tokens."""
    taps = mixer.cp.get_conv1d_weight().shape[-1]
    prefix_1_P_X, actions_G_A_X = projected_S_X[group.prefix].unsqueeze(0), projected_S_X[group.action_index_G_A]
    nothing_1_W_C = prefix_1_P_X.new_zeros(1, taps - 1, mixer.cp.conv1d_channels())
    output_1_P, last_1_W_C, state = _scan_from(mixer, prefix_1_P_X, nothing_1_W_C, None)
    num_actions = actions_G_A_X.shape[0]
    output_G_A, _, _ = _scan_from(
        mixer, actions_G_A_X, last_1_W_C.expand(num_actions, -1, -1), state.expand(num_actions, *state.shape[1:]).contiguous()
    )
    return output_1_P.squeeze(0), output_G_A[group.is_real_G_A]


def _scan_from(
    mixer: Any, projected: torch.Tensor, before_W_C: torch.Tensor, state: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(outputs, the convolution's last inputs, the scan's last state) of rows [rows, positions, X] that go on from a given memory."""
    cp = mixer.cp
    channels = cp.conv1d_channels()
    gate, convolved, step = projected.split([cp.d_inner_local_tpcp, channels, cp.nheads_local_tpcp], dim=-1)
    extended = torch.cat([before_W_C, convolved], dim=1)
    mixed = functional.conv1d(extended.transpose(1, 2), cp.get_conv1d_weight(), cp.get_conv1d_bias(), groups=channels)
    groups = cp.ngroups_local_tpcp
    inputs, write, read = functional.silu(mixed).transpose(1, 2).split([cp.d_inner_local_tpcp, groups * cp.d_state, groups * cp.d_state], dim=-1)
    skip = cp.get_D().float()
    output, last_state = mamba_mixer.mamba_chunk_scan_combined(
        inputs.unflatten(-1, (-1, mixer.headdim)).contiguous(),
        step.contiguous(),
        -torch.exp(cp.get_A_log().float()),
        write.unflatten(-1, (groups, -1)).contiguous(),
        read.unflatten(-1, (groups, -1)).contiguous(),
        mixer.chunk_size,
        D=skip.unflatten(0, (-1, mixer.headdim)) if mixer.D_has_hdim else skip,
        z=gate.unflatten(-1, (-1, mixer.headdim)).contiguous(),
        dt_bias=cp.get_dt_bias().float(),
        dt_softplus=True,
        initial_states=state,
        return_final_states=True,
    )
    return output.flatten(2), extended[:, convolved.shape[1] :], last_state
