"""Planned activation memory against a count of the storages autograd keeps in a forward pass of a real model, within 15 %.

The plan speaks of fused kernels, the CPU platform has none. Here the leaves are made to keep what the fused kernels keep: norms their input,
rotations nothing, gated and weighted activations what upstream's own fused functions save, mamba-ssm's training kernel its input and the scan's
output (`mamba_split_conv1d_scan_combined`). All else - which tensors there are, which share memory, which a layer lets go of - is the model's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from fakes.trainer_batches import micro_batches, save_model

from pivotrl.config.schema import ParallelConfig
from pivotrl.megatron.hf_checkpoint import read_config
from pivotrl.megatron.hf_weights import load_hf
from pivotrl.megatron.logprobs import _hidden_states, stream_layout
from pivotrl.megatron.model import build_model
from pivotrl.megatron.parallel import initialize_parallel
from pivotrl.megatron.streams import token_stream
from pivotrl.megatron.upstream import mamba_mixer
from pivotrl.planning.activations import activation_bytes
from pivotrl.planning.inputs import load_model

_NUM_TOKENS = 120


class Census:
    """Bytes of the storages that autograd was handed, each once; those of the model itself do not count."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.num_bytes = 0
        self._kept: list[torch.Tensor] = []
        self._seen = {tensor.untyped_storage().data_ptr() for tensor in (*model.parameters(), *model.buffers())}

    def count(self, tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self._seen:
            self._seen.add(storage.data_ptr())
            # Held, so that no address is used twice.
            self._kept.append(tensor)
            self.num_bytes += storage.nbytes()
        return tensor

    def hooks(self) -> Any:
        return torch.autograd.graph.saved_tensors_hooks(self.count, lambda tensor: tensor)

    def fused(self, function: Callable[..., Any], keep: Callable[..., list[torch.Tensor]]) -> Callable[..., Any]:
        """The function, of whose inner tensors none counts, only what `keep` names of (result, *arguments)."""

        def call(*arguments: Any, **named: Any) -> Any:
            with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor):
                result = function(*arguments, **named)
            for tensor in keep(result, *arguments):
                self.count(tensor)
            return result

        return call


def _fuse(model: Any, census: Census, patch: pytest.MonkeyPatch) -> None:
    from megatron.core.fusions.fused_weighted_squared_relu import weighted_squared_relu_impl
    from megatron.core.models.common.embeddings import rope_utils
    from megatron.core.transformer.moe.experts import SequentialMLP

    from pivotrl.megatron.cpu import layers, transformer_engine
    from pivotrl.megatron.cpu.mamba_mixer import GroupedNorm

    normalize = census.fused(layers.normalize, lambda _result, hidden, *_: [hidden])
    for module in (layers, transformer_engine):
        patch.setattr(module, "normalize", normalize)
    patch.setattr(GroupedNorm, "forward", census.fused(GroupedNorm.forward, lambda _result, _norm, hidden: [hidden]))
    patch.setattr(rope_utils, "_apply_rotary_pos_emb_bshd", census.fused(rope_utils._apply_rotary_pos_emb_bshd, lambda *_: []))
    # The scan's output before its gate is of the size of the result.
    kernel = census.fused(mamba_mixer.mamba_split_conv1d_scan_combined, lambda result, projected, *_: [projected, torch.empty_like(result)])
    patch.setattr(mamba_mixer, "mamba_split_conv1d_scan_combined", kernel)
    for module in model.modules():
        if getattr(getattr(module, "config", None), "gated_linear_unit", False):
            module.config.bias_activation_fusion = True
        elif isinstance(module, SequentialMLP):
            for expert in module.local_experts:
                patch.setattr(expert, "forward", _weighted(expert, weighted_squared_relu_impl))


def _weighted(expert: Any, activation: Callable[..., torch.Tensor]) -> Callable[..., Any]:
    """A squared-ReLU expert as upstream's grouped experts compute it, which a GPU has in place of one after the other."""

    def forward(hidden: torch.Tensor, per_token_scale: torch.Tensor) -> Any:
        return expert.linear_fc2(activation(expert.linear_fc1(hidden)[0], per_token_scale.unsqueeze(-1)))

    return forward


@pytest.fixture
def patch() -> Iterator[pytest.MonkeyPatch]:
    with pytest.MonkeyPatch.context() as context:
        yield context


@pytest.mark.parametrize("family", ["llama", "qwen3", "qwen3_moe", "nemotron_h", "nemotron_3"])
def test_a_plan_is_within_15_percent_of_what_a_model_keeps(family: str, tmp_path: Path, patch: pytest.MonkeyPatch) -> None:
    directory = save_model(tmp_path, family)
    initialize_parallel(ParallelConfig(), seed=0)
    (model,) = build_model(read_config(directory), ParallelConfig())
    load_hf([model], directory)
    (batch,) = micro_batches(rows=1, tokens=_NUM_TOKENS, action_tokens=8)
    stream = token_stream(batch, stream_layout(model.config))
    census = Census(model)
    _fuse(model, census, patch)
    with census.hooks():
        _hidden_states(model, model, stream)
    planned = activation_bytes(load_model(directory)[1], ParallelConfig(), expert_imbalance=1.0, is_bf16=False)
    assert planned.of(num_tokens=_NUM_TOKENS, num_in_flight=1) == pytest.approx(census.num_bytes, rel=0.15)
