"""A transformers model's tensors under the names of its checkpoint, which are also the trainer's: stacked experts one by one, old prefixes."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

import torch

_MODEL_PREFIX = "model."
# What checkpoints of a model type have in its place.
_PREFIXES = {"nemotron_h": "backbone."}
# transformers 5 stacks a mixture's experts, [experts, rows, columns], and gate and up projection below each other; checkpoints keep them apart.
_STACKED = re.compile(r"(?P<experts>.*\.experts)\.(?P<part>gate_up_proj|up_proj|down_proj)")


def checkpoint_views(state: Mapping[str, torch.Tensor], *, model_type: str) -> dict[str, torch.Tensor]:
    """Checkpoint name -> view into the model's own memory, so that copying into it changes the model.

    Args:
        state: the model's state_dict.
        model_type: of its configuration.

    >>> sorted(checkpoint_views({"mlp.experts.gate_up_proj": torch.zeros(1, 4, 3), "norm": torch.zeros(3)}, model_type="qwen3_moe"))
    ['mlp.experts.0.gate_proj.weight', 'mlp.experts.0.up_proj.weight', 'norm']
    >>> list(checkpoint_views({"model.norm_f.weight": torch.zeros(3)}, model_type="nemotron_h"))
    ['backbone.norm_f.weight']
    """
    prefix = _PREFIXES.get(model_type, _MODEL_PREFIX)
    stored = ((re.sub(f"^{re.escape(_MODEL_PREFIX)}", prefix, name), tensor) for name, tensor in state.items())
    return {checkpoint_name: view for name, tensor in stored for checkpoint_name, view in _views(name, tensor)}


def _views(name: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    stacked = _STACKED.fullmatch(name)
    if stacked is None or tensor.dim() != 3:
        yield name, tensor
        return
    parts = ("gate_proj", "up_proj") if stacked["part"] == "gate_up_proj" else (stacked["part"],)
    for expert, matrix in enumerate(tensor):
        for part, view in zip(parts, matrix.chunk(len(parts)), strict=True):
            yield f"{stacked['experts']}.{expert}.{part}.weight", view
