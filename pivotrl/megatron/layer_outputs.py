"""What each layer of a model gives for one sequence, in any parallel layout and in every replica, for finding the first place that is wrong.

Called by the parity gate through the trainer, on every process alike, when a check has failed; holds all outputs of the sequence in memory.
Suffixes: T = tokens of the sequence, S = tokens of this rank's stream, H = hidden size.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from pivotrl.megatron.parallel import control_group
from pivotrl.megatron.passes import logprob_pass
from pivotrl.megatron.slices import global_order
from pivotrl.megatron.upstream import parallel_state, unwrap_model
from pivotrl.objective.microbatch import MicroBatch

EMBEDDING, NORM = "embedding", "final norm"


@dataclass(frozen=True, slots=True)
class Replica:
    """A data parallel replica other than the first, against the first.

    >>> Replica((1, 3), {"layer 0": 0.0}).processes
    (1, 3)
    """

    processes: tuple[int, ...]
    differences: Mapping[str, float]
    """By place: the largest difference of an output, as a share of the largest value."""


@dataclass(frozen=True, slots=True)
class LayerOutputs:
    """What a trainer gives for one sequence.

    >>> LayerOutputs({"embedding": torch.zeros(3, 8)}, ()).replicas
    ()
    """

    outputs: Mapping[str, torch.Tensor]
    """Of the first data parallel replica, float32 [T, H] on the CPU: "embedding", "layer 0" ... and "final norm"."""
    replicas: tuple[Replica, ...]
    """The other replicas, which are given the same sequence."""


def layer_outputs(chunks: Sequence[torch.nn.Module], token_ids: Sequence[int]) -> LayerOutputs:
    """The outputs of every place, the same on every process.

    Args:
        token_ids: at least two tokens.
    """
    num_replicas = parallel_state.get_data_parallel_world_size()
    # The first call of a module is the sequence's; fillers of the schedule follow.
    seen: dict[str, torch.Tensor] = {}
    handles = [module.register_forward_hook(partial(_keep, seen, place)) for chunk in chunks for place, module in _places(chunk)]
    try:
        # Micro-batches are dealt out in turn: one for each replica.
        logprob_pass(chunks, [_one_row(token_ids)] * num_replicas, temperature=1.0)
    finally:
        for handle in handles:
            handle.remove()
    first_chunk: Any = unwrap_model(chunks[0])
    config = first_chunk.config
    whole = {place: _whole(output_S_1_H, config)[: len(token_ids)] for place, output_S_1_H in sorted(seen.items())}
    differences = {place: _difference(output_T_H) for place, output_T_H in whole.items()}
    is_spokesman = parallel_state.get_data_parallel_rank(with_context_parallel=True) == 0 and parallel_state.get_tensor_model_parallel_rank() == 0
    outputs = {place: output_T_H.float().cpu() for place, output_T_H in whole.items()} if is_spokesman else {}
    mine = (parallel_state.get_data_parallel_rank(), outputs, differences)
    parts = [mine for _ in range(dist.get_world_size())]
    if dist.get_world_size() > 1:
        dist.all_gather_object(parts, mine, group=control_group())
    merged = {place: output for _, outputs, _ in parts for place, output in outputs.items()}
    return LayerOutputs(merged, tuple(_replica(number, parts) for number in range(1, num_replicas)))


def _difference(output_T_H: torch.Tensor) -> float:
    """From the first replica's output, as a share of its largest value."""
    group: Any = parallel_state.get_data_parallel_group()
    first_T_H = output_T_H.float()
    if dist.get_world_size(group) == 1:
        return 0.0
    first_T_H = first_T_H.clone().contiguous()
    dist.broadcast(first_T_H, dist.get_global_rank(group, 0), group=group)
    return float((output_T_H.float() - first_T_H).abs().max() / first_T_H.abs().max())


def _replica(number: int, parts: Sequence[tuple[int, Mapping[str, torch.Tensor], Mapping[str, float]]]) -> Replica:
    processes = tuple(process for process, (replica, _, _) in enumerate(parts) if replica == number)
    measured: dict[str, list[float]] = {}
    for process in processes:
        for place, difference in parts[process][2].items():
            measured.setdefault(place, []).append(difference)
    # torch's maximum, unlike Python's, keeps what is not a number.
    return Replica(processes, {place: float(torch.tensor(differences).max()) for place, differences in measured.items()})


def _places(chunk: torch.nn.Module) -> list[tuple[str, torch.nn.Module]]:
    """The modules of one chunk whose outputs are the residual stream; upstream counts layers of the whole model from 1."""
    model: Any = unwrap_model(chunk)
    places = [(EMBEDDING, model.embedding)] if model.pre_process else []
    places += [(f"layer {layer.layer_number - 1}", layer) for layer in model.decoder.layers]
    norms = [module for name, module in model.decoder.named_children() if name in ("final_layernorm", "final_norm")]
    return places + [(NORM, norm) for norm in norms if norm is not None]


def _keep(seen: dict[str, torch.Tensor], place: str, _module: torch.nn.Module, _arguments: object, output: Any) -> None:
    seen.setdefault(place, (output[0] if isinstance(output, tuple) else output).detach())


def _one_row(token_ids: Sequence[int]) -> MicroBatch:
    row, blank = torch.tensor([list(token_ids)]), torch.zeros(1)
    mask = torch.zeros(row.shape)
    mask[0, -1] = 1
    return MicroBatch(row, torch.tensor([len(token_ids)]), mask, blank, blank + 1, None, None, None, 1, 1, batching="packed")


def _whole(output_S_1_H: torch.Tensor, config: Any) -> torch.Tensor:
    """The sequence's [T, H], padding behind, from the parts of tensor parallel and context parallel ranks."""
    output_S_H = output_S_1_H[:, 0].contiguous()
    if config.sequence_parallel:
        output_S_H = _gathered(output_S_H, parallel_state.get_tensor_model_parallel_group())
    if config.context_parallel_size == 1:
        return output_S_H
    output_S_H = _gathered(output_S_H, parallel_state.get_context_parallel_group())
    return output_S_H[global_order([0, len(output_S_H)], size=config.context_parallel_size).to(output_S_H.device)]


def _gathered(part_S_H: torch.Tensor, group: Any) -> torch.Tensor:
    parts = [torch.empty_like(part_S_H) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, part_S_H, group=group)
    return torch.cat(parts)
