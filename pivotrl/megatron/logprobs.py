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

from pivotrl.megatron.upstream import GPTModel, parallel_state, vocab_parallel_cross_entropy

# Rows projected together: float32 logits of a 150k vocabulary then take 300 MiB, and a matrix product is no faster with more rows.
_CHUNK_ROWS = 512

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
    rows = _CHUNK_ROWS
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
    logits_N_V = project(hidden_N_H.unsqueeze(1))[0].squeeze(1).float() / temperature
    entropies_N = vocab_parallel_entropy(logits_N_V.detach())
    # Upstream's function works in place on its argument, hence last.
    cross_entropies_N = vocab_parallel_cross_entropy(logits_N_V.unsqueeze(1), targets_N.unsqueeze(1)).squeeze(1)
    return -cross_entropies_N, entropies_N


def vocab_parallel_entropy(logits_N_V: torch.Tensor) -> torch.Tensor:
    """Entropy [N], in nats, of softmax(logits) over a vocabulary split over the tensor parallel group.

    With z = logits - max and Z = sum exp(z): H = log Z - sum z exp(z) / Z. No gradient.
    """
    group = parallel_state.get_tensor_model_parallel_group()
    with torch.no_grad():
        maxima_N = logits_N_V.max(dim=-1).values
        dist.all_reduce(maxima_N, op=dist.ReduceOp.MAX, group=group)
        shifted_N_V = logits_N_V - maxima_N.unsqueeze(-1)
        exponentials_N_V = shifted_N_V.exp()
        sums_2_N = torch.stack([exponentials_N_V.sum(dim=-1), torch.einsum("nv,nv->n", exponentials_N_V, shifted_N_V)])
        dist.all_reduce(sums_2_N, group=group)
        total_N, weighted_N = sums_2_N
        return total_N.log() - weighted_N / total_N


def full_logits(model: GPTModel, token_ids_B_T: torch.Tensor) -> torch.Tensor:
    """Logits [B, T, V] of every position, for comparing models; no gradient."""
    positions = torch.arange(token_ids_B_T.shape[1], device=token_ids_B_T.device).expand_as(token_ids_B_T)
    with torch.no_grad():
        return model(token_ids_B_T, positions, None)
