"""The tensors of one forward pass and what a loss returns: the border between batching, trainer and objective.

Suffixes: B = sequences of the micro-batch, T = padded tokens. All [B, T] tensors are aligned with `token_ids_B_T`: entry t
of a log-prob, mask or entropy tensor speaks about predicting token t from tokens < t, so column 0 is always masked.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from pivotrl.config.training import Batching
from pivotrl.types import RoutedExperts


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """One padded forward pass of a step."""

    token_ids_B_T: torch.Tensor
    """int64 [B, T], right-padded; padding is unmasked nowhere, and causal attention keeps it out of real positions."""
    lengths_B: torch.Tensor
    """int64 [B], real tokens of each sequence."""
    action_mask_B_T: torch.Tensor
    """float32 [B, T], 1 at tokens of the action (its end-of-turn token included)."""
    advantages_B: torch.Tensor
    """float32 [B]; zeros for demonstrations."""
    loss_weights_B: torch.Tensor
    """float32 [B]; 0 takes a sequence out of loss and KL but not out of the denominators."""
    behavior_logprobs_B_T: torch.Tensor | None
    """float32 [B, T], log-probs under the engine that sampled; None for demonstrations."""
    old_logprobs_B_T: torch.Tensor | None
    """float32 [B, T], trainer's log-probs of the policy that sampled; None where the step is exactly on-policy."""
    reference_logprobs_B_T: torch.Tensor | None
    """float32 [B, T], log-probs under pi_0; None where beta = 0."""
    num_actions: int
    """Global denominator for aggregation `action`: actions of the whole step, the same in every micro-batch."""
    num_action_tokens: int
    """Global denominator for aggregation `token`: action tokens of the whole step."""
    batching: Batching = "padded"
    """How the rows go through the model; scores and gradients do not depend on it."""
    group_ids_B: torch.Tensor | None = None
    """int64 [B], equal for rows that share their prefix; None where no row is in a group."""
    prefix_lengths_B: torch.Tensor | None = None
    """int64 [B], tokens of the shared prefix, all before the action; None where no row is in a group."""
    routes_B: tuple[RoutedExperts | None, ...] | None = None
    """Experts by row as the engine chose them, for the tokens before a row's last; None where no row has any."""


@dataclass(frozen=True, slots=True)
class LossTerms:
    """What a loss function returns for one micro-batch."""

    loss: torch.Tensor
    """Scalar, already divided by the global denominator: micro-batch losses add up to the step's loss."""
    sums: Mapping[str, torch.Tensor]
    """Detached scalars that add up over micro-batches; a name ending in ``/max`` is combined by maximum."""


type LossFunction = Callable[[torch.Tensor, torch.Tensor, MicroBatch], LossTerms]
"""(logprobs_B_T with gradient, entropies_B_T without, micro-batch) -> terms."""
