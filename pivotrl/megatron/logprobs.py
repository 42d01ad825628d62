"""Log-probabilities and entropies of chosen tokens from a model's hidden states, without logits for the others.

Prompt positions carry no loss, and with a 500-token prompt and a large vocabulary their projection is the largest cost of a step: the
rows that predict an action token are picked out of the hidden states before the output layer. The projection runs in chunks of rows;
where there is more than one chunk each is computed again in the backward pass, so no [tokens, vocabulary] tensor outlives its chunk.
Works on a vocabulary split over tensor parallel ranks. Suffixes: B = sequences, T = padded tokens, S = T as upstream orders it,
H = hidden size, N = chosen tokens, V = this rank's part of the vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

from pivotrl.megatron.upstream import parallel_state

# Logits of one chunk: 2**26 float32 values are 256 MiB, 1,365 rows of a 49k vocabulary. Recomputing costs a third of the projection again,
# so chunks are as large as memory allows rather than as small as possible.
_CHUNK_VALUES = 2**26

type _Project = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor | None]]


@dataclass(frozen=True, slots=True)
class ChosenTokens:
    """Which tokens of a micro-batch to score."""

    token_ids_B_T: torch.Tensor
    mask_B_T: torch.Tensor
    """Non-zero at the tokens to score; column 0 must be zero, since nothing predicts a first token."""
    temperature: float


def token_scores(model: torch.nn.Module, chosen: ChosenTokens) -> torch.Tensor:
    """One forward pass: [2, B, T] float32, log-probs (with gradient) and entropies (without), zero where the mask is zero.

    Both are of softmax(logits / temperature); entropies are in nats.

    Args:
        model: a GPTModel, bare or wrapped for data parallel training.
    """
    tokens = chosen.token_ids_B_T
    positions = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
    return model(tokens, positions, None, output_processor=_score_hidden_states, output_processor_context=chosen)


def _score_hidden_states(
    *,
    hidden_states: torch.Tensor,
    output_layer: torch.nn.Module,
    output_weight: torch.Tensor | None,
    context: ChosenTokens,
    **_unused: Any,
) -> torch.Tensor:
    """Upstream's output hook (`GPTModel.forward(output_processor=...)`): gets the final hidden states [S, B, H] in place of the projection."""
    mask_B_T = context.mask_B_T != 0
    if bool(mask_B_T[:, 0].any()):
        raise ValueError("the action mask is set in column 0, which no token predicts")
    batch_N, token_N = mask_B_T.nonzero(as_tuple=True)
    hidden_N_H = hidden_states[token_N - 1, batch_N]
    targets_N = context.token_ids_B_T[batch_N, token_N]
    logprobs_N, entropies_N = _score_rows(partial(output_layer, weight=output_weight), hidden_N_H, targets_N, context.temperature)
    blank_B_T = hidden_states.new_zeros(mask_B_T.shape, dtype=torch.float32)
    scattered = (blank_B_T.index_put((batch_N, token_N), values_N) for values_N in (logprobs_N, entropies_N))
    return torch.stack(tuple(scattered))


def _score_rows(project: _Project, hidden_N_H: torch.Tensor, targets_N: torch.Tensor, temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
    if len(targets_N) == 0:
        return hidden_N_H.new_zeros(0, dtype=torch.float32), hidden_N_H.new_zeros(0, dtype=torch.float32)
    score = partial(_score_chunk, project, temperature)
    rows = max(_CHUNK_VALUES // project.func.output_size_per_partition, 1)
    if len(targets_N) <= rows:
        return score(hidden_N_H, targets_N)
    chunks = [
        checkpoint(score, hidden, targets, use_reentrant=False, preserve_rng_state=False)
        for hidden, targets in zip(hidden_N_H.split(rows), targets_N.split(rows), strict=True)
    ]
    logprobs, entropies = zip(*chunks, strict=True)
    return torch.cat(logprobs), torch.cat(entropies)


def _score_chunk(project: _Project, temperature: float, hidden_N_H: torch.Tensor, targets_N: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    # The output layer takes [S, B, H]; a batch of one leaves the rows as the sequence.
    logits_N_V = project(hidden_N_H.unsqueeze(1))[0].squeeze(1).float()
    if temperature != 1.0:
        logits_N_V = logits_N_V / temperature
    return vocab_parallel_scores(logits_N_V, targets_N)


def vocab_parallel_scores(logits_N_V: torch.Tensor, targets_N: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probs [N] of the targets, with gradient, and entropies [N] in nats, without, over a vocabulary split over tensor parallel ranks.

    With z = logits - max and Z = sum exp(z): log p = z[target] - log Z and H = log Z - sum z exp(z) / Z. One pass over the logits gives
    both, where upstream's `vocab_parallel_cross_entropy` beside a separate entropy takes two.

    Args:
        logits_N_V: float32, the rank's part of the vocabulary; overwritten.
        targets_N: token ids of the whole vocabulary.
    """
    return _VocabParallelScores.apply(logits_N_V, targets_N)


class _VocabParallelScores(torch.autograd.Function):
    """d log p / d logits = onehot(target) - softmax; the softmax takes the logits' memory."""

    @staticmethod
    def forward(ctx: Any, logits_N_V: torch.Tensor, targets_N: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        group = parallel_state.get_tensor_model_parallel_group()
        first = parallel_state.get_tensor_model_parallel_rank() * logits_N_V.shape[1]
        is_mine_N = (targets_N >= first) & (targets_N < first + logits_N_V.shape[1])
        columns_N_1 = (targets_N - first).masked_fill(~is_mine_N, 0).unsqueeze(1)
        maxima_N = logits_N_V.detach().amax(dim=1)
        dist.all_reduce(maxima_N, op=dist.ReduceOp.MAX, group=group)
        shifted_N_V = logits_N_V.detach().sub_(maxima_N.unsqueeze(1))
        target_N = shifted_N_V.gather(1, columns_N_1).squeeze(1).masked_fill(~is_mine_N, 0.0)
        softmax_N_V = shifted_N_V.exp()
        sums_3_N = torch.stack([target_N, softmax_N_V.sum(dim=1), torch.linalg.vecdot(softmax_N_V, shifted_N_V)])
        dist.all_reduce(sums_3_N, group=group)
        target_N, total_N, weighted_N = sums_3_N
        softmax_N_V.div_(total_N.unsqueeze(1))
        ctx.save_for_backward(softmax_N_V, columns_N_1, is_mine_N)
        logprobs_N, entropies_N = target_N - total_N.log(), total_N.log() - weighted_N / total_N
        ctx.mark_non_differentiable(entropies_N)
        return logprobs_N, entropies_N

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        softmax_N_V, columns_N_1, is_mine_N = ctx.saved_tensors
        gradient_N_1 = gradients[0].unsqueeze(1)
        gradient_N_V = softmax_N_V * -gradient_N_1
        gradient_N_V.scatter_add_(1, columns_N_1, gradient_N_1 * is_mine_N.unsqueeze(1))
        return gradient_N_V, None
