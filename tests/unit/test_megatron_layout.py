"""Every layout that cannot be is refused by the name of its key, before a process group exists; every layout that can be passes."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from typing import Any, Literal

import pytest
from transformers import LlamaConfig, NemotronHConfig, Qwen3MoeConfig

from pivotrl.config.schema import MoeConfig, ParallelConfig
from pivotrl.errors import UserError
from pivotrl.megatron.layout import ModelShape, check_model, check_shared_prefix, check_world

_DENSE = ModelShape(8, 8, 2, {"vocab_size": 96, "intermediate_size": 48}, num_experts=0, expert_widths={}, mamba_heads=None)
_MIXTURE = dataclasses.replace(_DENSE, widths={"vocab_size": 96}, num_experts=6, expert_widths={"moe_intermediate_size": 20})
_HYBRID = dataclasses.replace(_DENSE, mamba_heads=(8, 4))


def _layout(tp: int = 1, pp: int = 1, cp: int = 1, ep: int = 1, **more: Any) -> ParallelConfig:
    return ParallelConfig(
        tensor_model_parallel_size=tp, pipeline_model_parallel_size=pp, context_parallel_size=cp, expert_model_parallel_size=ep, **more
    )


@pytest.mark.parametrize(
    ("layout", "world_size", "named"),
    [
        (_layout(tp=2), 1, r"2 x 1 x 1 = 2 but there are 1 processes.*torchrun --nproc-per-node 2"),
        (_layout(tp=2, pp=2, cp=3), 8, r"2 x 2 x 3 = 12 but there are 8"),
        (_layout(pp=3), 4, r"1 x 3 x 1 = 3 but there are 4"),
        (_layout(ep=3), 4, r"expert_model_parallel_size is 3.*3 x 1 x 1 = 3"),
        (_layout(tp=2, ep=4), 4, r"expert_model_parallel_size is 4.*4 x 2 x 1 = 8"),
        (_layout(pp=2, ep=4), 4, r"expert_model_parallel_size is 4.*4 x 1 x 2 = 8"),
        (_layout(sequence_parallel=True), 2, r"sequence_parallel is true and tensor_model_parallel_size is 1"),
        (_layout(virtual_pipeline_model_parallel_size=2), 2, r"virtual_pipeline_model_parallel_size is 2 and pipeline_model_parallel_size is 1"),
        (_layout(pp=2, virtual_pipeline_model_parallel_size=1), 2, r"virtual_pipeline_model_parallel_size is 1"),
    ],
)
def test_the_number_of_processes_must_fit(layout: ParallelConfig, world_size: int, named: str) -> None:
    with pytest.raises(UserError, match=named):
        check_world(layout, world_size)


@pytest.mark.parametrize(
    ("layout", "shape", "named"),
    [
        (_layout(tp=3), _DENSE, r"tensor_model_parallel_size is 3 and the model's num_attention_heads is 8"),
        (_layout(tp=4), dataclasses.replace(_DENSE, num_key_value_heads=6), r"tensor_model_parallel_size is 4 and the model has 6 num_key_value"),
        (_layout(tp=4), dataclasses.replace(_DENSE, widths={"vocab_size": 97}), r"tensor_model_parallel_size is 4 and the model's vocab_size is 97"),
        (_layout(tp=4), dataclasses.replace(_DENSE, widths={"intermediate_size": 50}), r"the model's intermediate_size is 50"),
        (_layout(pp=3), _DENSE, r"pipeline_model_parallel_size x virtual_pipeline_model_parallel_size is 3 and the model has 8 layers"),
        (_layout(pp=2, virtual_pipeline_model_parallel_size=3), _DENSE, r"is 6 and the model has 8 layers"),
        (_layout(ep=2), _DENSE, r"expert_model_parallel_size is 2 and the model has no experts"),
        (_layout(tp=2, expert_tensor_parallel_size=2), _DENSE, r"expert_tensor_parallel_size is 2 and the model has no experts"),
        (_layout(ep=4), _MIXTURE, r"expert_model_parallel_size is 4 and the model's number of experts is 6"),
        (_layout(tp=2), _MIXTURE, r"sequence_parallel is false, tensor_model_parallel_size is 2 and the model has experts"),
        (_layout(tp=8, sequence_parallel=True), _MIXTURE, r"expert_tensor_parallel_size is 8 and the model's moe_intermediate_size is 20"),
        (_layout(tp=8), _HYBRID, r"tensor_model_parallel_size is 8 and the model's n_groups is 4"),
        (_layout(cp=3), _HYBRID, r"context_parallel_size is 3 and the model's mamba_num_heads"),
        (_layout(cp=4), dataclasses.replace(_HYBRID, mamba_heads=(12, 3)), r"context_parallel_size is 4 and the model has 3 n_groups"),
    ],
)
def test_the_model_must_divide(layout: ParallelConfig, shape: ModelShape, named: str) -> None:
    with pytest.raises(UserError, match=named):
        check_model(layout, MoeConfig(), shape)


def test_replay_and_recomputation_in_a_pipeline_are_refused_together() -> None:
    layout = _layout(pp=2, recompute="full")
    with pytest.raises(UserError, match=r"moe.router_replay is updates, parallel.recompute is full"):
        check_model(layout, MoeConfig(router_replay="updates"), _MIXTURE)
    check_model(layout, MoeConfig(), _MIXTURE)
    check_model(_layout(recompute="full"), MoeConfig(router_replay="updates"), _MIXTURE)


@pytest.mark.parametrize("replay", ["updates", "rollout"])
def test_a_dense_model_has_nothing_to_replay(replay: Literal["updates", "rollout"]) -> None:
    with pytest.raises(UserError, match=rf"moe.router_replay is {replay} and the model has no experts"):
        check_model(_layout(), MoeConfig(router_replay=replay), _DENSE)
    check_model(_layout(), MoeConfig(router_replay=replay), _MIXTURE)


@pytest.mark.parametrize(
    ("layout", "shape", "world_size"),
    [
        (_layout(), _DENSE, 1),
        (_layout(), _MIXTURE, 7),
        (_layout(tp=2), _DENSE, 4),
        (_layout(tp=8), dataclasses.replace(_DENSE, num_key_value_heads=4), 8),
        (_layout(pp=2, virtual_pipeline_model_parallel_size=2), _DENSE, 2),
        (_layout(tp=2, pp=2, ep=2, sequence_parallel=True, expert_tensor_parallel_size=1), _MIXTURE, 4),
        (_layout(tp=2, cp=2, ep=2, sequence_parallel=True), _MIXTURE, 4),
        (_layout(ep=6), _MIXTURE, 6),
        (_layout(tp=2, cp=4, sequence_parallel=True), _HYBRID, 8),
    ],
)
def test_what_can_be_laid_out_passes(layout: ParallelConfig, shape: ModelShape, world_size: int) -> None:
    check_world(layout, world_size)
    check_model(layout, MoeConfig(), shape)


@pytest.mark.parametrize(
    ("layout", "heads", "named"),
    [
        (_layout(cp=16), (8, 2), r"context_parallel_size is 16 and the model has 8 num_attention_heads.*train.batching"),
        (_layout(tp=4, cp=4), (8, 2), r"context_parallel_size is 4 and the model has 2 num_attention_heads"),
        (_layout(cp=4), (12, 3), r"context_parallel_size is 4 and the model has 3 num_key_value_heads"),
    ],
)
def test_shared_prefixes_need_heads_for_every_context_parallel_process(layout: ParallelConfig, heads: tuple[int, int], named: str) -> None:
    shape = dataclasses.replace(_DENSE, num_attention_heads=heads[0], num_key_value_heads=heads[1])
    with pytest.raises(UserError, match=named):
        check_shared_prefix(layout, shape)
    check_shared_prefix(_layout(tp=2, cp=2), dataclasses.replace(_DENSE, num_attention_heads=8, num_key_value_heads=2))


def test_shapes_are_read_from_every_family() -> None:
    dense = ModelShape.of(LlamaConfig(num_key_value_heads=4))
    assert (dense.num_key_value_heads, dense.num_experts, dense.mamba_heads) == (4, 0, None)
    assert dense.widths == {"vocab_size": 32000, "intermediate_size": 11008}
    mixture = ModelShape.of(Qwen3MoeConfig(num_experts=16, moe_intermediate_size=24))
    assert (mixture.num_experts, mixture.expert_widths, mixture.widths) == (16, {"moe_intermediate_size": 24}, {"vocab_size": 151936})
    kinds = ["linear_attention", "moe", "full_attention", "moe"]
    hybrid = ModelShape.of(NemotronHConfig(layers_block_type=kinds, n_routed_experts=4, mamba_num_heads=8, n_groups=2))
    assert (hybrid.num_layers, hybrid.num_experts, hybrid.mamba_heads) == (4, 4, (8, 2))
    assert sorted(hybrid.widths) == ["moe_shared_expert_intermediate_size", "vocab_size"]
    without = ModelShape.of(NemotronHConfig(layers_block_type=["full_attention", "mlp"]))
    assert (without.num_experts, without.mamba_heads, without.expert_widths) == (0, None, {})


def test_refusals_need_no_torch() -> None:
    code = "import pivotrl.megatron.layout, sys; print([name for name in ('torch', 'megatron') if name in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.strip() == "[]"
