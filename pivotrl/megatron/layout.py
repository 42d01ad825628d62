"""What a layout needs of the model and of the number of processes, refused by name before any process group exists.

Pure: reads numbers, imports neither torch nor megatron-core. Upstream checks most of this too, but in the middle of building groups or
models, in every process at once and in its own words. The rules are those of `initialize_model_parallel`, `TransformerConfig` and the
parallel layers of megatron-core 0.19.2, and the few that upstream leaves to its command line; docs/parallelism.md lists them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pivotrl.config.schema import MoeConfig, ParallelConfig
from pivotrl.errors import UserError
from pivotrl.megatron.architecture import LayerKind, layers, num_experts

_TP, _PP, _VPP = "tensor_model_parallel_size", "pipeline_model_parallel_size", "virtual_pipeline_model_parallel_size"
_CP, _EP, _ETP = "context_parallel_size", "expert_model_parallel_size", "expert_tensor_parallel_size"


@dataclass(frozen=True, slots=True)
class ModelShape:
    """The numbers of a model that a layout divides.

    >>> ModelShape(4, 8, 2, {"vocab_size": 96}, num_experts=0, expert_widths={}, mamba_heads=None).num_layers
    4
    """

    num_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    widths: Mapping[str, int]
    """Sizes that tensor parallelism splits, by their name in config.json."""
    num_experts: int
    """Routed experts of a mixture-of-experts layer; 0 for a model without."""
    expert_widths: Mapping[str, int]
    """Sizes that expert tensor parallelism splits, by their name in config.json."""
    mamba_heads: tuple[int, int] | None
    """Heads and groups of a Mamba layer; None for a model without."""

    @staticmethod
    def of(hf: Any) -> ModelShape:
        """The shape of a transformers configuration object of a supported family."""
        kinds, experts = {kind for layer in layers(hf) for kind in layer}, num_experts(hf)
        widths = {"vocab_size": hf.vocab_size} | ({"intermediate_size": hf.intermediate_size} if LayerKind.MLP in kinds else {})
        if experts and hasattr(hf, "moe_shared_expert_intermediate_size"):
            widths["moe_shared_expert_intermediate_size"] = hf.moe_shared_expert_intermediate_size
        return ModelShape(
            num_layers=hf.num_hidden_layers,
            num_attention_heads=hf.num_attention_heads,
            num_key_value_heads=hf.num_key_value_heads,
            widths=widths,
            num_experts=experts,
            expert_widths={"moe_intermediate_size": hf.moe_intermediate_size} if experts else {},
            mamba_heads=(hf.mamba_num_heads, hf.n_groups) if LayerKind.MAMBA in kinds else None,
        )


def check_world(parallel: ParallelConfig, world_size: int) -> None:
    """Refuses a layout that no model could have on this number of processes.

    Raises:
        UserError: naming the key of `parallel`, its value, the rule and the fix.
    """
    tp, pp, cp = parallel.tensor_model_parallel_size, parallel.pipeline_model_parallel_size, parallel.context_parallel_size
    if world_size % (tp * pp * cp):
        raise UserError(
            f"parallel.{_TP} x {_PP} x {_CP} is {tp} x {pp} x {cp} = {tp * pp * cp} but there are {world_size} processes",
            rule="the product must divide the number of processes; the quotient is data parallel",
            fix=f"start with torchrun --nproc-per-node {tp * pp * cp} (or a multiple), or lower one of them",
        )
    etp, ep = expert_tensor_size(parallel), parallel.expert_model_parallel_size
    if world_size % (etp * ep * pp):
        raise UserError(
            f"parallel.{_EP} is {ep}, and {_EP} x {_ETP} x {_PP} is {ep} x {etp} x {pp} = {etp * ep * pp} but there are {world_size} processes",
            rule="the product must divide the number of processes: experts are laid out over all processes of a pipeline stage",
            fix=f"lower {_EP}, or set {_ETP} to 1",
        )
    if parallel.sequence_parallel and tp == 1:
        raise UserError(
            f"parallel.sequence_parallel is true and {_TP} is 1",
            rule="the sequence is split over the tensor parallel processes",
            fix=f"raise {_TP}, or set sequence_parallel to false",
        )
    vpp = parallel.virtual_pipeline_model_parallel_size
    if vpp is not None and (pp == 1 or vpp == 1):
        raise UserError(
            f"parallel.{_VPP} is {vpp} and {_PP} is {pp}",
            rule="a schedule interleaves at least two chunks of at least two stages",
            fix=f"leave {_VPP} out, or set both to 2 or more",
        )


def check_model(parallel: ParallelConfig, moe: MoeConfig, shape: ModelShape) -> None:
    """Refuses a layout that this model cannot have.

    Raises:
        UserError: naming the key of `parallel`, its value, the model's number, the rule and the fix.
    """
    tp = parallel.tensor_model_parallel_size
    _refuse_undivided(_TP, tp, {"num_attention_heads": shape.num_attention_heads, **shape.widths}, "every process holds an equal part of it")
    groups = shape.num_key_value_heads
    if groups % tp and tp % groups:
        raise UserError(
            f"parallel.{_TP} is {tp} and the model has {groups} num_key_value_heads",
            rule="one must divide the other: key/value heads are dealt out, or where there are fewer of them repeated",
            fix=f"set {_TP} to a divisor or a multiple of {groups}",
        )
    stages = parallel.pipeline_model_parallel_size * (parallel.virtual_pipeline_model_parallel_size or 1)
    if shape.num_layers % stages:
        raise UserError(
            f"parallel.{_PP} x {_VPP} is {stages} and the model has {shape.num_layers} layers",
            rule="every stage holds the same number of layers",
            fix=f"choose a product that divides {shape.num_layers}",
        )
    if shape.mamba_heads is not None:
        _check_mamba(parallel, *shape.mamba_heads)
    _check_experts(parallel, shape)
    if moe.router_replay != "none" and not shape.num_experts:
        raise UserError(
            f"moe.router_replay is {moe.router_replay} and the model has no experts",
            rule="only routers have choices to repeat",
            fix="set router_replay to none",
        )
    if moe.router_replay != "none" and parallel.recompute == "full" and parallel.pipeline_model_parallel_size > 1:
        raise UserError(
            f"moe.router_replay is {moe.router_replay}, parallel.recompute is full and {_PP} is {parallel.pipeline_model_parallel_size}",
            rule="between a micro-batch's forward pass and its recomputation a stage runs others, whose experts the routers would then repeat",
            fix="set recompute to none, or router_replay to none",
        )


def check_shared_prefix(parallel: ParallelConfig, shape: ModelShape) -> None:
    """Refuses a layout in which this model's attention cannot share prefixes: context parallel ranks then deal out heads, not tokens.

    Raises:
        UserError: naming the key of `parallel`, its value, the model's number, the rule and the fix.
    """
    tp, cp = parallel.tensor_model_parallel_size, parallel.context_parallel_size
    heads, groups = shape.num_attention_heads // tp, max(shape.num_key_value_heads // tp, 1)
    rule = "with train.batching shared_prefix each context parallel process attends with an equal part of the heads"
    if heads % cp:
        raise UserError(
            f"parallel.{_CP} is {cp} and the model has {heads} num_attention_heads / {_TP}",
            rule=rule,
            fix=f"set {_CP} to a divisor of {heads}, or train.batching to packed",
        )
    if groups % cp and cp % groups:
        raise UserError(
            f"parallel.{_CP} is {cp} and the model has {groups} num_key_value_heads / {_TP}",
            rule=f"{rule}; key/value heads are dealt out, or where there are fewer of them repeated",
            fix=f"set {_CP} to a divisor or a multiple of {groups}, or train.batching to packed",
        )


def _check_experts(parallel: ParallelConfig, shape: ModelShape) -> None:
    if not shape.num_experts:
        for key, value in ((_EP, parallel.expert_model_parallel_size), (_ETP, parallel.expert_tensor_parallel_size or 1)):
            if value > 1:
                raise UserError(f"parallel.{key} is {value} and the model has no experts", rule="only experts are laid out by it", fix="leave it out")
        return
    if parallel.tensor_model_parallel_size > 1 and not parallel.sequence_parallel:
        raise UserError(
            f"parallel.sequence_parallel is false, {_TP} is {parallel.tensor_model_parallel_size} and the model has experts",
            rule="without it every tensor parallel process would send the same tokens to the experts",
            fix="set sequence_parallel to true",
        )
    _refuse_undivided(_EP, parallel.expert_model_parallel_size, {"number of experts": shape.num_experts}, "every process holds as many experts")
    _refuse_undivided(_ETP, expert_tensor_size(parallel), shape.expert_widths, "every process holds an equal part of it")


def _check_mamba(parallel: ParallelConfig, heads: int, groups: int) -> None:
    tp, cp = parallel.tensor_model_parallel_size, parallel.context_parallel_size
    _refuse_undivided(_TP, tp, {"mamba_num_heads": heads, "n_groups": groups}, "every process holds as many heads and groups")
    _refuse_undivided(_CP, cp, {f"mamba_num_heads / {_TP}": heads // tp}, "a Mamba layer scans whole sequences, a part of the heads on each process")
    if (groups // tp) % cp and cp % (groups // tp):
        raise UserError(
            f"parallel.{_CP} is {cp} and the model has {groups // tp} n_groups / {_TP}",
            rule="one must divide the other: a Mamba layer's groups are dealt out, or where there are fewer of them repeated",
            fix=f"set {_CP} to a divisor or a multiple of {groups // tp}",
        )


def expert_tensor_size(parallel: ParallelConfig) -> int:
    """Processes that share one expert."""
    return parallel.expert_tensor_parallel_size or parallel.tensor_model_parallel_size


def _refuse_undivided(key: str, value: int, sizes: Mapping[str, int], reason: str) -> None:
    for name, size in sizes.items():
        if size % value:
            raise UserError(
                f"parallel.{key} is {value} and the model's {name} is {size}",
                rule=f"it must divide {size}: {reason}",
                fix=f"set {key} to a divisor of {size}",
            )
