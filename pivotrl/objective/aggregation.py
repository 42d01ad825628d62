"""From per-token terms to one scalar, under the step's one global denominator.

Pure; shared by grpo and nll. Nothing here divides by anything counted inside the micro-batch except an action's own length,
so micro-batching, packing and row order cannot change a gradient. Suffixes: B = sequences, T = padded tokens.
"""

from __future__ import annotations

from typing import Literal

import torch

from pivotrl.objective.microbatch import MicroBatch

type Aggregation = Literal["action", "token"]


def check_shapes(logprobs_B_T: torch.Tensor, batch: MicroBatch) -> None:
    """The objective's one shape check, at its border.

    Raises:
        ValueError: naming the tensor whose shape is not that of the micro-batch's tokens, or a column 0 that carries loss.
    """
    shape = batch.token_ids_B_T.shape
    tensors = {
        "logprobs_B_T": logprobs_B_T,
        "action_mask_B_T": batch.action_mask_B_T,
        "behavior_logprobs_B_T": batch.behavior_logprobs_B_T,
        "old_logprobs_B_T": batch.old_logprobs_B_T,
        "reference_logprobs_B_T": batch.reference_logprobs_B_T,
    }
    for name, tensor in tensors.items():
        if tensor is not None and tensor.shape != shape:
            raise ValueError(f"{name} has shape {tuple(tensor.shape)}; the micro-batch's tokens have {tuple(shape)}")
    if bool((batch.action_mask_B_T[:, 0] != 0).any()):
        raise ValueError("action_mask_B_T marks column 0; no token predicts the first one, so it cannot carry loss")


def masked(values_B_T: torch.Tensor, mask_B_T: torch.Tensor) -> torch.Tensor:
    """Values with everything outside the mask replaced by 0. A product with the mask would keep NaN and inf of padding."""
    return torch.where(mask_B_T != 0, values_B_T, torch.zeros_like(values_B_T))


def aggregate(terms_B_T: torch.Tensor, batch: MicroBatch, aggregation: Aggregation) -> torch.Tensor:
    """Weighted sum of per-token terms over the global denominator; micro-batches add up to the step's value.

    action: sum_i weight_i (1/T_i) sum_t x_it / num_actions, the mean over actions of the mean over tokens (Eq. 7, where
    G is the same in every group).
    token: sum_i weight_i sum_t x_it / num_action_tokens, so that a long action weighs as many tokens as it has (DAPO).
    """
    sums_B = masked(terms_B_T, batch.action_mask_B_T).sum(dim=1) * batch.loss_weights_B
    if aggregation == "token":
        return sums_B.sum() / batch.num_action_tokens
    lengths_B = batch.action_mask_B_T.sum(dim=1).clamp(min=1)
    return (sums_B / lengths_B).sum() / batch.num_actions
