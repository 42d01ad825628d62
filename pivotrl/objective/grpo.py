"""Eq. 7: the clipped group-relative objective with a KL to pi_0, as a loss over one micro-batch.

Pure tensor functions; `make_grpo_loss` binds a recipe's settings and is handed to the trainer by build. Advantages are
computed before (objective/advantages.py); denominators too (training/batching.py). objective/oracle.py says the same in
plain Python. Suffixes: B = sequences, T = padded tokens.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import torch

from pivotrl.objective.aggregation import aggregate, check_shapes, masked
from pivotrl.objective.importance import correction_weights, mismatch_sums
from pivotrl.objective.kl import bounded_ratio, kl_terms
from pivotrl.objective.microbatch import LossFunction, LossTerms, MicroBatch

if TYPE_CHECKING:
    from pivotrl.config.schema import TrainConfig


def make_grpo_loss(config: TrainConfig) -> LossFunction:
    """The loss of one recipe: clip, beta, estimator and aggregation are read here and fixed. Picklable: other processes compute it too."""
    return partial(grpo_terms, config=config)


def grpo_terms(logprobs_B_T: torch.Tensor, entropies_B_T: torch.Tensor, batch: MicroBatch, config: TrainConfig) -> LossTerms:
    """-(Eq. 7) of one micro-batch, with the sums the metrics are made of.

    w_t = exp(log pi_theta - log pi_old), pi_old = pi_theta (held constant) where `old_logprobs_B_T` is None: then w_t = 1 and
    its gradient is that of log pi_theta.
    loss = aggregate(c_t (-min(w_t A, clip(w_t, 1 - eps_low, 1 + eps_high) A) + beta w_t kl_t)); see `kl.kl_terms` for the factor w_t.
    c_t is 1, or under `train.correction` the weight from the engine that sampled to pi_old (`importance.correction_weights`).

    Sums, over action tokens that carry loss (weight not 0): ``tokens``, ``ratio_clipped`` (tokens where the clipped branch is
    the smaller one), ``entropy``; where the engine's log-probs are known those of `importance.mismatch_sums`, pi_old against the engine;
    under a correction ``correction_truncated`` and ``correction_masked`` (tokens); and, where beta > 0, ``kl_reference``.

    Raises:
        ValueError: for tensors of the wrong shape, beta > 0 without reference log-probs, or a correction without the engine's log-probs.
    """
    check_shapes(logprobs_B_T, batch)
    beta, reference_B_T = config.kl.beta, batch.reference_logprobs_B_T
    if beta > 0 and reference_B_T is None:
        raise ValueError(f"train.kl.beta is {beta} but the micro-batch has no reference log-probs; compute them before the loss")

    old_B_T = logprobs_B_T.detach() if batch.old_logprobs_B_T is None else batch.old_logprobs_B_T
    ratios_B_T = bounded_ratio(masked(logprobs_B_T - old_B_T, batch.action_mask_B_T))
    advantages_B_1 = batch.advantages_B.unsqueeze(1)
    unclipped_B_T = ratios_B_T * advantages_B_1
    clipped_B_T = ratios_B_T.clamp(1 - config.clip.low, 1 + config.clip.high) * advantages_B_1
    terms_B_T = -torch.minimum(unclipped_B_T, clipped_B_T)

    active_B_T = batch.action_mask_B_T * (batch.loss_weights_B != 0).unsqueeze(1)
    sums = {
        "tokens": active_B_T.sum(),
        "ratio_clipped": ((clipped_B_T < unclipped_B_T) * active_B_T).sum(),
        "entropy": masked(entropies_B_T, active_B_T).sum(),
    }
    if batch.behavior_logprobs_B_T is not None:
        sums |= mismatch_sums(old_B_T, batch.behavior_logprobs_B_T, active_B_T)
    if beta > 0 and reference_B_T is not None:
        kl_B_T = ratios_B_T * kl_terms(masked(logprobs_B_T, batch.action_mask_B_T), masked(reference_B_T, batch.action_mask_B_T), config.kl.estimator)
        terms_B_T = terms_B_T + beta * kl_B_T
        sums["kl_reference"] = masked(kl_B_T, active_B_T).sum()
    if config.correction is not None:
        if batch.behavior_logprobs_B_T is None:
            raise ValueError("train.correction needs the log-probs of the engine that sampled, and the micro-batch has none")
        correction = correction_weights(old_B_T, batch.behavior_logprobs_B_T, batch.action_mask_B_T, config.correction)
        terms_B_T = terms_B_T * correction.weights_B_T
        sums["correction_truncated"] = (correction.is_truncated_B_T * active_B_T).sum()
        sums["correction_masked"] = (correction.is_masked_B_T * active_B_T).sum()
    return LossTerms(aggregate(terms_B_T, batch, config.aggregation), {name: value.detach() for name, value in sums.items()})
