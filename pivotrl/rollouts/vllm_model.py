"""What is asked of the model that vLLM holds, in vLLM's worker: types of its parameters, and the repair of what a reload leaves stale on a CPU.

Functions of a torch module, given to `LLM.apply_model` by vllm.py, whose head says why. Imports no vllm.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from pivotrl.weights.manifest import loses_precision


def held_wider(model: Any, *, names: Sequence[str], dtype: torch.dtype) -> dict[str, torch.dtype]:
    """Of a checkpoint's tensors those that vLLM holds in a wider type than `dtype`, and the type; runs inside vLLM's worker.

    Where a wide parameter is none of the checkpoint's by vLLM's own renaming, any tensor whose place is unknown may be part of it: all of those
    are then demanded in its type, and vLLM rounds what it holds in `dtype`.
    """
    held = {name: parameter.dtype for name, parameter in model.named_parameters()}
    wide = {name: held_type for name, held_type in held.items() if held_type.is_floating_point and loses_precision(held_type, dtype)}
    mapper = getattr(model, "hf_to_vllm_mapper", None)
    places = {name: name if mapper is None else mapper.map_name(name) for name in names}
    types = {name: wide[place] for name, place in places.items() if place in wide}
    if missed := sorted(wide.keys() - places.values()):
        types |= {name: wide[missed[0]] for name, place in places.items() if place not in held}
    return types


def _tied_pair(model: Any) -> tuple[Any, Any] | None:
    """A tied head and its embedding, where they are two layers."""
    head, embedding = getattr(model, "lm_head", None), getattr(getattr(model, "model", None), "embed_tokens", None)
    is_pair = model.config.tie_word_embeddings and head is not None and embedding is not None and head is not embedding
    return (head, embedding) if is_pair else None


def drop_packed_embedding(model: Any) -> None:
    """Forgets the embedding's packed copy before a reload, so that one found after it was made by it."""
    if (pair := _tied_pair(model)) is not None:
        vars(pair[1]).pop("cpu_linear", None)


def repack(model: Any) -> None:
    """Repairs what a reload leaves stale on a CPU (see the head of vllm.py); runs inside vLLM's worker.

    A tied head takes the packed copy that the reload made of the embedding: nothing else uses it, and to pack the largest matrix again is slow.

    Raises:
        RuntimeError: where the reload did not pack the embedding.
    """
    for layer in model.modules():
        kernel = getattr(getattr(layer, "quant_method", None), "moe_kernel", None)
        if kernel is not None and hasattr(layer, "w13_weight"):
            kernel.fused_experts.process_weights_after_loading(layer)
    if (pair := _tied_pair(model)) is not None:
        head, embedding = pair
        if "cpu_linear" not in vars(embedding):
            raise RuntimeError("vLLM no longer packs the embedding when weights are reloaded: a tied head would keep the old one")
        head.weight, head.cpu_linear = embedding.weight, embedding.cpu_linear
