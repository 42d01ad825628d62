"""Whether processes that should hold the same weights do: data parallel replicas, and what the other axes do not divide (norms, routers).

Which parts are the same is what the distributed checkpoint says: its sharded tensors carry their place in the whole model. Called by the
parity gate through the trainer, on every process alike, when a check has failed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from pivotrl.megatron.parallel import control_group
from pivotrl.megatron.upstream import ShardedTensor, apply_factories, nested_values, parallel_state
from pivotrl.weights.digest import tensor_digest


@dataclass(frozen=True, slots=True)
class UnequalCopy:
    """The first part of the weights that two processes hold differently.

    >>> UnequalCopy("output_layer.weight", 1, 0, num_unequal=1).process
    1
    """

    name: str
    """Upstream's name in a distributed checkpoint, with the layer where the name has none."""
    process: int
    """The process whose bytes are not those of `other`."""
    other: int
    """The first process that holds this part."""
    num_unequal: int
    """Parts of the model of which not all copies are equal."""


def unequal_copy(chunks: Sequence[torch.nn.Module]) -> UnequalCopy | None:
    """Compares digests of all parameters and buffers that a checkpoint stores; the same answer on every process."""
    mine = _digests(chunks)
    everywhere: list[Mapping[str, str]] = [mine for _ in range(dist.get_world_size())]
    if dist.get_world_size() > 1:
        dist.all_gather_object(everywhere, mine, group=control_group())
    owners: dict[str, tuple[int, str]] = {}
    unequal: dict[str, tuple[int, int]] = {}
    for process, digests in enumerate(everywhere):
        for name, digest in digests.items():
            owner, first = owners.setdefault(name, (process, digest))
            if digest != first:
                unequal.setdefault(name, (process, owner))
    if not unequal:
        return None
    name = next(name for name in owners if name in unequal)
    return UnequalCopy(name, *unequal[name], num_unequal=len(unequal))


def _digests(chunks: Sequence[torch.nn.Module]) -> dict[str, str]:
    """Of this process's parts, by their place in the whole model, in the order of the model."""
    metadata = {"dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True)}
    digests: dict[str, str] = {}
    for chunk in chunks:
        model: Any = chunk
        state = model.sharded_state_dict(metadata=metadata)
        apply_factories(state)
        for part in nested_values(state):
            if isinstance(part, ShardedTensor) and part.data is not None:
                digests[_place(part)] = tensor_digest(part.data)
    return digests


def _place(part: Any) -> str:
    # Upstream stacks the layers of a uniform model: the first place of the offset is the layer then.
    layer = f" of layer {part.global_offset[0]}" if part.prepend_axis_num else ""
    rest = part.global_offset[1:] if part.prepend_axis_num else part.global_offset
    return f"{part.key}{layer}" + (f" from {tuple(rest)} on" if any(rest) else "")
