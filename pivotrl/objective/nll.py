"""Eq. 1: the supervised loss on expert actions, for the SFT stage and the SFT baseline.

Pure; shares micro-batches, aggregation and trainer with objective/grpo.py, so the two differ in this file and in the source.
"""

from __future__ import annotations

import torch

from pivotrl.objective.aggregation import aggregate, check_shapes, masked
from pivotrl.objective.microbatch import LossFunction, LossTerms, MicroBatch


def make_nll_loss() -> LossFunction:
    """The supervised loss; it has no settings."""
    return nll_terms


def nll_terms(logprobs_B_T: torch.Tensor, entropies_B_T: torch.Tensor, batch: MicroBatch) -> LossTerms:
    """-sum_t log pi(a*_t | s, a*_<t) / num_action_tokens: the mean over all expert tokens of the step.

    Sums: ``tokens`` and ``entropy`` over expert tokens.

    Raises:
        ValueError: for tensors of the wrong shape.
    """
    check_shapes(logprobs_B_T, batch)
    sums = {"tokens": batch.action_mask_B_T.sum(), "entropy": masked(entropies_B_T, batch.action_mask_B_T).sum()}
    return LossTerms(aggregate(-logprobs_B_T, batch, "token"), {name: value.detach() for name, value in sums.items()})
