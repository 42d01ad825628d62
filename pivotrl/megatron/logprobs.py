"""Log-probabilities and entropies of the tokens with loss from a model's hidden states, without logits for the others.

Prompt positions carry no loss, and with a 500-token prompt and a large vocabulary their projection is the largest cost of a step: the
rows that predict an action token are picked out of the hidden states before the output layer. The projection runs in chunks of rows;
where there is more than one chunk each is computed again in the backward pass, so no [tokens, vocabulary] tensor outlives its chunk.
Works on a vocabulary split over tensor parallel ranks, and on any stream of streams.py. Suffixes: B = sequences, T = padded tokens,
S = tokens of the stream, H = hidden size, N = tokens with loss, V = this rank's part of the vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

from pivotrl.megatron import upstream
from pivotrl.megatron.shared_prefix import stream_rotary
from pivotrl.megatron.streams import StreamLayout, TokenStream, token_stream
from pivotrl.megatron.upstream import parallel_state
from pivotrl.objective.microbatch import MicroBatch

# Logits of one chunk: 2**26 float32 values are 256 MiB, 1,365 rows of a 49k vocabulary. Recomputing costs a third of the projection again,
# so chunks are as large as memory allows rather than as small as possible.
_CHUNK_VALUES = 2**26

type _Project = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor | None]]


def token_scores(model: torch.nn.Module, batch: MicroBatch, *, temperature: float) -> torch.Tensor:
    """One forward pass: [2, B, T] float32, log-probs (with gradient) and entropies (without), zero where the action mask is zero.

    Both are of softmax(logits / temperature); entropies are in nats. Every tensor and context parallel rank gets all of them, and each
    context parallel rank's gradient is that of the tokens it scored: gradients add up over these ranks, and nothing is divided.

    Args:
        model: a model chunk, bare or wrapped for data parallel training.

    Returns:
        The scores on the last pipeline stage; on the others the chunk's hidden states, for the next one.

    Raises:
        ValueError: where the action mask is set in column 0, which no token predicts.
    """
    chunk: Any = upstream.unwrap_model(model)
    stream = token_stream(batch, stream_layout(chunk.config))
    hidden_S_B_H = _hidden_states(model, chunk, stream)
    if not chunk.post_process:
        return hidden_S_B_H
    is_split = chunk.config.sequence_parallel
    if is_split:
        # The output layer below sums the gradient over tensor parallel ranks itself, so this gather's backward only cuts it.
        hidden_S_B_H = upstream.gather_from_sequence_parallel_region(hidden_S_B_H, tensor_parallel_output_grad=False)
    hidden_N_H = hidden_S_B_H.flatten(0, 1).index_select(0, stream.source_N)
    targets_N = batch.token_ids_B_T[stream.row_N, stream.column_N]
    weight = chunk.shared_embedding_or_output_weight() if chunk.share_embeddings_and_output_weights else None
    with _replaced(chunk.output_layer, "sequence_parallel", False):
        logprobs_N, entropies_N = _score_rows(partial(chunk.output_layer, weight=weight), hidden_N_H, targets_N, temperature)
    blank_B_T = hidden_S_B_H.new_zeros(batch.action_mask_B_T.shape, dtype=torch.float32)
    scattered = (blank_B_T.index_put((stream.row_N, stream.column_N), values_N) for values_N in (logprobs_N, entropies_N))
    scores_2_B_T = torch.stack(tuple(scattered))
    if chunk.config.context_parallel_size == 1:
        return scores_2_B_T
    return upstream.reduce_from_tensor_model_parallel_region(scores_2_B_T, group=parallel_state.get_context_parallel_group())


def stream_layout(config: upstream.TransformerConfig) -> StreamLayout:
    """How the ranks of an initialised layout share a stream."""
    return StreamLayout(
        context_parallel_size=config.context_parallel_size,
        context_parallel_rank=parallel_state.get_context_parallel_rank() if config.context_parallel_size > 1 else 0,
        sequence_parallel_size=config.tensor_model_parallel_size if config.sequence_parallel else 1,
    )


def _hidden_states(model: torch.nn.Module, chunk: Any, stream: TokenStream) -> torch.Tensor:
    """The last layer's output [S, B, H]. Upstream's models return it where they are told that the projection is not theirs."""
    # Only a count of tokens per expert asks which are padding; causal attention keeps it out of everything else.
    padding_B_S = None if chunk.config.num_moe_experts is None else stream.padding_B_S
    with _replaced(chunk, "post_process", False), stream_rotary(chunk, stream.packing):
        return model(stream.token_ids_B_S, stream.positions_B_S, None, packed_seq_params=stream.packing, padding_mask=padding_B_S)


@contextmanager
def _replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


def _score_rows(project: _Project, hidden_N_H: torch.Tensor, targets_N: torch.Tensor, temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
    if len(targets_N) == 0:
        # A rank without a scored token takes part in the others' backward pass all the same: its zeros hang on its hidden states.
        nothing_N = hidden_N_H.sum(dim=1).float()
        return nothing_N, nothing_N.detach()
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
