"""Per-token estimators of KL(pi_theta || pi_0) from sampled tokens, Eq. 7's second term.

Pure tensor functions; called by objective/grpo.py. p is the policy in training, q the frozen reference pi_0, both under the
sampling temperature. The reference is always pi_0, never the policy that sampled.
"""

from __future__ import annotations

from typing import Literal

import torch

LOG_RATIO_BOUND = 20.0
"""Log-ratios are clamped to [-20, 20] before exp. exp(88.8) overflows float32, and one inf times a mask of 0 is NaN in every
weight; exp(20) = 4.9e8 is far outside any trust region and still leaves room to be squared in float32. A clamped token gives
no gradient: beyond the bound its sample says nothing reliable about the policy."""

type KlEstimator = Literal["k1", "k3"]


def bounded_ratio(log_ratios: torch.Tensor) -> torch.Tensor:
    """exp of log-ratios clamped to +-`LOG_RATIO_BOUND`, any shape."""
    return torch.exp(log_ratios.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND))


def kl_terms(logprobs: torch.Tensor, reference_logprobs: torch.Tensor, estimator: KlEstimator) -> torch.Tensor:
    """One estimate per sampled token, unweighted, same shape as the arguments.

    k1 = log p - log q: unbiased, of either sign.
    k3 = exp(log q - log p) - (log q - log p) - 1: unbiased, never negative, less variance (Schulman 2020, approximating KL).

    The VALUE is unbiased where tokens come from p. Its plain gradient is not the gradient of the KL: k1's has expectation 0
    and k3's is that of KL(q || p). `grpo_terms` multiplies by the differentiable ratio pi_theta / pi_old, which makes the gradient of
    both the gradient of KL(p || q), so that beta means what Eq. 7 and Theorem 3.3 say (as DeepSeek-V3.2, arXiv 2512.02556).
    """
    if estimator == "k1":
        return logprobs - reference_logprobs
    log_q_over_p = reference_logprobs - logprobs
    return bounded_ratio(log_q_over_p) - log_q_over_p - 1
