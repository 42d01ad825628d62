"""Importance weights from the engine that sampled to the trainer that learns: truncated or masked, by token or by action.

Pure tensor functions; called by objective/grpo.py. Engine and trainer hold the same weights and still differ (number formats, kernels, and
under `train.max_policy_age: 1` a step of training): tokens come from q, the engine, and Eq. 7 averages over pi_old, the trainer. The weight
r = pi_old / q repairs that; cut or masked, it is biased and its variance is bounded. Suffixes: B = sequences, T = padded tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from pivotrl.config.correction import CorrectionConfig, Level, TruncatedCorrection
from pivotrl.objective.aggregation import masked
from pivotrl.objective.kl import bounded_ratio, kl_terms


@dataclass(frozen=True, slots=True)
class CorrectionWeights:
    """What every token's term of the loss is multiplied by; all of shape [B, T], without gradient."""

    weights_B_T: torch.Tensor
    is_truncated_B_T: torch.Tensor
    """Bool, inside the action: the ratio was above the cap."""
    is_masked_B_T: torch.Tensor
    """Bool, inside the action: the ratio was outside [low, high]."""


def correction_weights(
    old_logprobs_B_T: torch.Tensor, engine_logprobs_B_T: torch.Tensor, action_mask_B_T: torch.Tensor, config: CorrectionConfig
) -> CorrectionWeights:
    """min(r, cap), or r where low <= r <= high and else 0, with r of the configured level; 1 outside the action.

    token: r_t = exp(log pi_old_t - log q_t); sequence: exp(sum_t ...), the product; geometric: exp(mean_t ...). The exponent is clamped to
    +-`kl.LOG_RATIO_BOUND`. A function of its row alone: micro-batching, padding and shared prefixes do not reach it.

    Args:
        old_logprobs_B_T: the trainer's, under the policy that Eq. 7 calls pi_old; any gradient is cut.
        engine_logprobs_B_T: as the engine reported them for the tokens it sampled.
    """
    log_ratios_B_T = masked((old_logprobs_B_T - engine_logprobs_B_T).detach(), action_mask_B_T)
    ratios_B_T = bounded_ratio(_at_level(log_ratios_B_T, action_mask_B_T, config.level))
    is_action_B_T = action_mask_B_T != 0
    nothing_B_T = torch.zeros_like(is_action_B_T)
    if isinstance(config, TruncatedCorrection):
        is_truncated_B_T = (ratios_B_T > config.cap) & is_action_B_T
        weights_B_T = ratios_B_T.clamp(max=config.cap)
        return CorrectionWeights(_only_actions(weights_B_T, is_action_B_T), is_truncated_B_T, nothing_B_T)
    is_outside_B_T = (ratios_B_T < config.low) | (ratios_B_T > config.high)
    weights_B_T = torch.where(is_outside_B_T, torch.zeros_like(ratios_B_T), ratios_B_T)
    return CorrectionWeights(_only_actions(weights_B_T, is_action_B_T), nothing_B_T, is_outside_B_T & is_action_B_T)


def mismatch_sums(old_logprobs_B_T: torch.Tensor, engine_logprobs_B_T: torch.Tensor, active_B_T: torch.Tensor) -> dict[str, torch.Tensor]:
    """Sums over active tokens of what tells engine and trainer apart, for the metrics.

    ``logprob_mismatch`` and its ``/max``: |log pi_old - log q|; ``engine_ratio`` and its ``/max``: pi_old / q, whose mean is 1 where
    the tokens are q's; ``kl_engine``: k3's estimate of KL(q || pi_old), never negative.
    """
    log_ratios_B_T = masked((old_logprobs_B_T - engine_logprobs_B_T).detach(), active_B_T)
    ratios_B_T = masked(bounded_ratio(log_ratios_B_T), active_B_T)
    kl_B_T = kl_terms(torch.zeros_like(log_ratios_B_T), log_ratios_B_T, "k3")
    return {
        "logprob_mismatch": log_ratios_B_T.abs().sum(),
        "logprob_mismatch/max": log_ratios_B_T.abs().max(),
        "engine_ratio": ratios_B_T.sum(),
        "engine_ratio/max": ratios_B_T.max(),
        "kl_engine": kl_B_T.sum(),
    }


def _at_level(log_ratios_B_T: torch.Tensor, action_mask_B_T: torch.Tensor, level: Level) -> torch.Tensor:
    if level == "token":
        return log_ratios_B_T
    sums_B_1 = log_ratios_B_T.sum(dim=1, keepdim=True)
    if level == "geometric":
        sums_B_1 = sums_B_1 / action_mask_B_T.sum(dim=1, keepdim=True).clamp(min=1)
    return sums_B_1.expand_as(log_ratios_B_T)


def _only_actions(weights_B_T: torch.Tensor, is_action_B_T: torch.Tensor) -> torch.Tensor:
    return torch.where(is_action_B_T, weights_B_T, torch.ones_like(weights_B_T))
