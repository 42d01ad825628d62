"""Forward and backward passes over a step's micro-batches, in any layout: who runs which, and every process gets every result.

All processes hold all micro-batches of a step, which are small (token ids and a few floats); only the model is spread. The micro-batches
are dealt out to the data parallel ranks in turn. Upstream's schedules make collective calls in every micro-batch, so all ranks run equally
many: where the deal does not come out even, fillers of two tokens, whose loss is multiplied by 0, take the empty places.
Called by the trainer. Suffixes: B = rows of a micro-batch, T = padded tokens.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from pivotrl.megatron.logprobs import token_scores
from pivotrl.megatron.parallel import control_group
from pivotrl.megatron.replay import RouterMemory
from pivotrl.megatron.upstream import PLATFORM, get_forward_backward_func, parallel_state
from pivotrl.objective.microbatch import LossFunction, MicroBatch


@dataclass(frozen=True, slots=True)
class LossReport:
    """What a loss function returned for one micro-batch, as numbers."""

    loss: float
    sums: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class _Dealt:
    """A micro-batch that this rank runs."""

    place: int | None
    """Its place in the step; None for a filler."""
    micro_batch: MicroBatch


def logprob_pass(
    chunks: Sequence[torch.nn.Module], micro_batches: Sequence[MicroBatch], *, temperature: float, memory: RouterMemory | None = None
) -> list[torch.Tensor]:
    """Forward only: log-probs [B, T] float32 of every micro-batch of the step, the same bits on every process."""
    if not micro_batches:
        return []
    shapes = [micro_batch.token_ids_B_T.shape for micro_batch in micro_batches]
    logprobs = torch.zeros(sum(shape.numel() for shape in shapes), device=PLATFORM.device)
    parts = [part.view(shape) for part, shape in zip(logprobs.split([shape.numel() for shape in shapes]), shapes, strict=True)]
    with torch.no_grad():
        outputs = _run(chunks, micro_batches, _keep_logprobs, temperature=temperature, memory=memory, forward_only=True)
    if _speaks_for_micro_batches():
        for place, logprobs_B_T in outputs:
            if place is not None:
                parts[place].copy_(logprobs_B_T)
    # One process contributes to each value and all others add 0.
    dist.all_reduce(logprobs)
    return parts


def training_pass(
    chunks: Sequence[torch.nn.Module],
    micro_batches: Sequence[MicroBatch],
    loss: LossFunction,
    *,
    temperature: float,
    memory: RouterMemory | None = None,
) -> list[LossReport]:
    """Forward and backward: leaves reduced gradients in the chunks' buffers; the report of every micro-batch, in order, on every process."""
    outputs = _run(chunks, micro_batches, partial(_compute_loss, loss), temperature=temperature, memory=memory, forward_only=False)
    spoken = [(place, report) for place, report in outputs if place is not None] if _speaks_for_micro_batches() else []
    gathered = [spoken]
    if dist.get_world_size() > 1:
        gathered = [spoken for _ in range(dist.get_world_size())]
        dist.all_gather_object(gathered, spoken, group=control_group())
    reports = dict(entry for entries in gathered for entry in entries)
    return [reports[place] for place in range(len(micro_batches))]


type _Finish = Callable[..., Any]
"""Upstream's loss function of one micro-batch: (what was dealt, scores of the last stage) -> what its schedule expects."""


def _run(
    chunks: Sequence[torch.nn.Module],
    micro_batches: Sequence[MicroBatch],
    finish: _Finish,
    *,
    temperature: float,
    memory: RouterMemory | None,
    forward_only: bool,
) -> list[tuple[int | None, Any]]:
    """Upstream's schedule over this rank's share; (place, result) of each where this rank has the last pipeline stage, else nothing."""
    share = _share(micro_batches)

    def forward_step(dealt: Iterator[_Dealt], chunk: torch.nn.Module) -> tuple[torch.Tensor, Any]:
        item = next(dealt)
        micro_batch = _on_device(item.micro_batch)
        index = next(index for index, each in enumerate(chunks) if each is chunk)
        with memory.forward(index, micro_batch) if memory is not None else nullcontext():
            scores = token_scores(chunk, micro_batch, temperature=temperature)
        return scores, partial(finish, dataclasses.replace(item, micro_batch=micro_batch))

    batch_size, sequence = share[0].micro_batch.token_ids_B_T.shape
    return get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=[iter(share) for _ in chunks],
        model=list(chunks),
        num_microbatches=len(share),
        # Shapes for receiving from another stage; stages tell each other the shape of every micro-batch instead.
        seq_length=sequence,
        micro_batch_size=batch_size,
        forward_only=forward_only,
        collect_non_loss_data=forward_only,
    )


def _share(micro_batches: Sequence[MicroBatch]) -> list[_Dealt]:
    """This data parallel rank's micro-batches, as many as every other rank's."""
    size, rank = parallel_state.get_data_parallel_world_size(), parallel_state.get_data_parallel_rank()
    is_interleaved = parallel_state.get_virtual_pipeline_model_parallel_world_size() is not None
    # The interleaved schedule takes its micro-batches in groups of as many as there are stages.
    multiple = parallel_state.get_pipeline_model_parallel_world_size() if is_interleaved else 1
    rounds = -(-len(micro_batches) // (size * multiple)) * multiple
    share = [_Dealt(place, micro_batches[place]) for place in range(rank, len(micro_batches), size)]
    return share + [_Dealt(None, _filler(micro_batches[0]))] * (rounds - len(share))


def _filler(like: MicroBatch) -> MicroBatch:
    """Two tokens, the second scored, so that every layer has a forward and a backward pass; both are padding, which no count sees."""
    blank: dict[str, Any] = {"batching": "padded", "group_ids_B": None, "prefix_lengths_B": None, "routes_B": None}
    for field in dataclasses.fields(like):
        value = getattr(like, field.name)
        if torch.is_tensor(value) and field.name not in blank:
            blank[field.name] = torch.zeros((1, 2) if value.dim() == 2 else 1, dtype=value.dtype)
    filler = dataclasses.replace(like, **blank)
    filler.action_mask_B_T[0, 1] = 1
    return filler


def _speaks_for_micro_batches() -> bool:
    """Whether this rank is the one, of the many that computed the same micro-batches, whose results count."""
    is_last_stage = parallel_state.is_pipeline_last_stage(ignore_virtual=True)
    return is_last_stage and parallel_state.get_tensor_model_parallel_rank() == 0 and parallel_state.get_context_parallel_rank() == 0


def _keep_logprobs(dealt: _Dealt, scores_2_B_T: torch.Tensor, *, non_loss_data: bool) -> tuple[int | None, torch.Tensor]:
    assert non_loss_data
    return dealt.place, scores_2_B_T[0]


def _compute_loss(
    loss: LossFunction, dealt: _Dealt, scores_2_B_T: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, tuple[int | None, LossReport | None]]:
    # The count of tokens that upstream adds up and `update` ignores.
    no_tokens = torch.zeros((), dtype=torch.int, device=PLATFORM.device)
    if dealt.place is None:
        return scores_2_B_T[0].sum() * 0, no_tokens, (None, None)
    terms = loss(scores_2_B_T[0], scores_2_B_T[1].detach(), dealt.micro_batch)
    report = LossReport(terms.loss.item(), {name: value.item() for name, value in terms.sums.items()})
    return terms.loss, no_tokens, (dealt.place, report)


def _on_device(micro_batch: MicroBatch) -> MicroBatch:
    tensors = {field.name: value for field in dataclasses.fields(micro_batch) if torch.is_tensor(value := getattr(micro_batch, field.name))}
    return dataclasses.replace(micro_batch, **{name: tensor.to(PLATFORM.device) for name, tensor in tensors.items()})
