"""What each layer of a model gives for one sequence, in any parallel layout, for finding the first layer that is wrong.

Called by the parity gate through the trainer, on every process alike, when a check has failed; holds all outputs of the sequence in memory.
Suffixes: T = tokens of the sequence, S = tokens of this rank's stream, H = hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence
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


def layer_outputs(chunks: Sequence[torch.nn.Module], token_ids: Sequence[int]) -> dict[str, torch.Tensor]:
    """Outputs float32 [T, H] on the CPU: "embedding", "layer 0" ... and "final norm", the same on every process.

    Args:
        token_ids: at least two tokens.
    """
    # The first call of a module is the sequence's; fillers of the schedule follow.
    seen: dict[str, torch.Tensor] = {}
    handles = [module.register_forward_hook(partial(_keep, seen, place)) for chunk in chunks for place, module in _places(chunk)]
    try:
        logprob_pass(chunks, [_one_row(token_ids)], temperature=1.0)
    finally:
        for handle in handles:
            handle.remove()
    first_chunk: Any = unwrap_model(chunks[0])
    config = first_chunk.config
    whole = {place: _whole(output_S_1_H, config)[: len(token_ids)] for place, output_S_1_H in sorted(seen.items())}
    is_spokesman = parallel_state.get_data_parallel_rank(with_context_parallel=True) == 0 and parallel_state.get_tensor_model_parallel_rank() == 0
    mine = {place: output_T_H.float().cpu() for place, output_T_H in whole.items()} if is_spokesman else {}
    parts = [mine for _ in range(dist.get_world_size())]
    if dist.get_world_size() > 1:
        dist.all_gather_object(parts, mine, group=control_group())
    return {place: output for part in parts for place, output in part.items()}


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
