"""Weights of the dense families between Hugging Face names and this process's chunks of the model, in any parallel layout.

One `WeightRule` per parameter of the whole model says of which tensors of the checkpoint it is made and along which dimension it is split
over tensor parallel processes. Megatron-Bridge, which knows these families too, serves as the test's oracle; it is not used here because
its import costs nearly as much again as megatron-core's, in every process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from pivotrl.errors import UserError
from pivotrl.megatron.upstream import PLATFORM, GPTModel, TransformerConfig, parallel_state

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
_LAYERS = "decoder.layers."

type Tensors = tuple[torch.Tensor, ...]
type Fetch = Callable[[str], torch.Tensor]


@dataclass(frozen=True, slots=True)
class WeightRule:
    """How one parameter of the whole model is made of tensors of the checkpoint, and back."""

    parameter: str
    """Its name, with the layer's number in the whole model."""
    hf_names: tuple[str, ...]
    split_dim: int | None
    """Dimension that tensor parallel processes share, in equal consecutive parts; None where each holds all of it."""
    merge: Callable[[Tensors], torch.Tensor]
    """From the checkpoint's tensors to the parameter of all processes, their parts side by side."""
    split: Callable[[torch.Tensor], Tensors]
    """Inverse of `merge`."""
    is_exported: bool = True
    """False for the copy of a tied embedding that the last pipeline stage holds."""


def load(chunks: Sequence[GPTModel], fetch: Fetch) -> None:
    """Fills every parameter of this process, converted to the parameter's number format.

    Args:
        fetch: the checkpoint's tensor of a name.

    Raises:
        UserError: where a tensor has another shape than config.json says.
    """
    rules = {rule.parameter: rule for rule in weight_rules(chunks)}
    size, rank = parallel_state.get_tensor_model_parallel_world_size(), parallel_state.get_tensor_model_parallel_rank()
    for name, parameter in named_parameters(chunks).items():
        rule = rules[name]
        parts = tuple(fetch(hf_name) for hf_name in rule.hf_names)
        _check_shapes(rule, parts, parameter, size)
        whole = rule.merge(parts)
        with torch.no_grad():
            parameter.copy_(whole if rule.split_dim is None else whole.chunk(size, rule.split_dim)[rank])


def export(chunks: Sequence[GPTModel]) -> Iterator[tuple[str, torch.Tensor]]:
    """All weights of the whole model by Hugging Face name, in the model's number format, on every process; a tied head is not repeated.

    Collective over the processes that share a model. With one process a tensor may share memory with the model.
    """
    own = {name: parameter.detach() for name, parameter in named_parameters(chunks).items()}
    holders = _holders(own)
    for rule in weight_rules(chunks):
        if rule.is_exported:
            yield from zip(rule.hf_names, rule.split(_gather(rule, own.get(rule.parameter), holders[rule.parameter])), strict=True)


def expected_names(chunks: Sequence[GPTModel]) -> set[str]:
    """Names of all tensors the whole model is made of."""
    return {name for rule in weight_rules(chunks) for name in rule.hf_names}


def named_parameters(chunks: Sequence[GPTModel]) -> dict[str, torch.nn.Parameter]:
    """This process's parameters by their name in the whole model: upstream numbers the layers of each chunk from 0."""
    parameters = {}
    for chunk in chunks:
        layers: Any = chunk.decoder.layers
        for name, parameter in chunk.named_parameters():
            if name.startswith(_LAYERS):
                local, _, rest = name.removeprefix(_LAYERS).partition(".")
                name = f"{_LAYERS}{layers[int(local)].layer_number - 1}.{rest}"
            parameters[name] = parameter
    return parameters


def weight_rules(chunks: Sequence[GPTModel]) -> tuple[WeightRule, ...]:
    """One rule per parameter of the whole model, in the order of export.

    Raises:
        ValueError: where this process has a parameter that no rule fits (a bug here, not in a checkpoint).
    """
    config, is_tied = chunks[0].config, chunks[0].share_embeddings_and_output_weights
    rules = [_copy("embedding.word_embeddings.weight", EMBEDDING, 0)]
    for layer in range(config.num_layers):
        rules += _layer_rules(config, layer)
    rules.append(_copy("decoder.final_layernorm.weight", "model.norm.weight", None))
    if not is_tied:
        rules.append(_copy("output_layer.weight", HEAD, 0))
    elif config.pipeline_model_parallel_size > 1:
        rules.append(WeightRule("output_layer.weight", (EMBEDDING,), 0, _first, _alone, is_exported=False))
    unmapped = named_parameters(chunks).keys() - {rule.parameter for rule in rules}
    if unmapped:
        raise ValueError(f"no weight rule fits {sorted(unmapped)}")
    return tuple(rules)


def _layer_rules(config: TransformerConfig, layer: int) -> list[WeightRule]:
    ours, theirs = f"{_LAYERS}{layer}.", f"model.layers.{layer}."
    attention, mlp = f"{ours}self_attention.", f"{ours}mlp."
    rules = [
        _copy(f"{attention}linear_qkv.layer_norm_weight", f"{theirs}input_layernorm.weight", None),
        _qkv(config, f"{attention}linear_qkv.weight", f"{theirs}self_attn.{{}}_proj.weight"),
        _copy(f"{attention}linear_proj.weight", f"{theirs}self_attn.o_proj.weight", 1),
        _copy(f"{mlp}linear_fc1.layer_norm_weight", f"{theirs}post_attention_layernorm.weight", None),
        _gate_up(config, f"{mlp}linear_fc1.weight", f"{theirs}mlp.{{}}_proj.weight"),
        _copy(f"{mlp}linear_fc2.weight", f"{theirs}mlp.down_proj.weight", 1),
    ]
    if config.add_qkv_bias:
        rules.insert(2, _qkv(config, f"{attention}linear_qkv.bias", f"{theirs}self_attn.{{}}_proj.bias"))
    if config.qk_layernorm:
        rules += [_copy(f"{attention}{x}_layernorm.weight", f"{theirs}self_attn.{x}_norm.weight", None) for x in "qk"]
    return rules


def _first(parts: Tensors) -> torch.Tensor:
    return parts[0]


def _alone(tensor: torch.Tensor) -> Tensors:
    return (tensor,)


def _copy(parameter: str, hf_name: str, split_dim: int | None) -> WeightRule:
    return WeightRule(parameter, (hf_name,), split_dim, _first, _alone)


def _gate_up(config: TransformerConfig, parameter: str, hf_pattern: str) -> WeightRule:
    """Upstream's gated layer: every tensor parallel process holds its part of the gate, then its part of the up projection."""
    size = config.tensor_model_parallel_size

    def merge(parts: Tensors) -> torch.Tensor:
        return torch.cat([part for pair in zip(*(part.chunk(size) for part in parts), strict=True) for part in pair])

    def split(fused: torch.Tensor) -> Tensors:
        pieces = fused.chunk(2 * size)
        return torch.cat(pieces[0::2]), torch.cat(pieces[1::2])

    return WeightRule(parameter, (hf_pattern.format("gate"), hf_pattern.format("up")), 0, merge, split if size > 1 else lambda fused: fused.chunk(2))


def _qkv(config: TransformerConfig, parameter: str, hf_pattern: str) -> WeightRule:
    """Upstream's fused layout: for every key/value group its query heads, then its key head, then its value head."""
    groups, heads, channels = config.num_query_groups, config.num_attention_heads, config.kv_channels
    assert groups is not None
    assert channels is not None
    head_counts = (heads // groups, 1, 1)

    def merge(parts: Tensors) -> torch.Tensor:
        grouped = [part.reshape(groups, count * channels, *part.shape[1:]) for part, count in zip(parts, head_counts, strict=True)]
        return torch.cat(grouped, dim=1).flatten(0, 1)

    def split(fused: torch.Tensor) -> Tensors:
        grouped = fused.reshape(groups, sum(head_counts) * channels, *fused.shape[1:])
        return tuple(part.flatten(0, 1) for part in grouped.split([count * channels for count in head_counts], dim=1))

    return WeightRule(parameter, tuple(hf_pattern.format(x) for x in "qkv"), 0, merge, split)


def _check_shapes(rule: WeightRule, parts: Tensors, parameter: torch.Tensor, size: int) -> None:
    shape = list(parameter.shape)
    if rule.split_dim is not None:
        shape[rule.split_dim] *= size
    # Without memory: only the shapes of the parts matter.
    expected = rule.split(torch.empty(shape, device="meta"))
    for name, part, like in zip(rule.hf_names, parts, expected, strict=True):
        if part.shape != like.shape:
            raise UserError(
                f"{name} has shape {tuple(part.shape)}",
                rule=f"config.json asks for {tuple(like.shape)}",
                fix="check that config.json belongs to these weights",
            )


def _holders(own: Mapping[str, torch.Tensor]) -> dict[str, tuple[int, torch.Size, torch.dtype]]:
    """For every parameter of the whole model the pipeline stage that holds it, and what a tensor parallel process's part looks like."""
    described = {name: (tensor.shape, tensor.dtype) for name, tensor in own.items()}
    group: Any = parallel_state.get_pipeline_model_parallel_group()
    stages: list[Any] = [described]
    if group.size() > 1:
        stages = [None] * group.size()
        dist.all_gather_object(stages, described, group=group)
    return {name: (stage, *description) for stage, held in enumerate(stages) for name, description in held.items()}


def _gather(rule: WeightRule, part: torch.Tensor | None, holder: tuple[int, torch.Size, torch.dtype]) -> torch.Tensor:
    """The parameter of all tensor parallel processes, from the pipeline stage that holds it."""
    stage, shape, dtype = holder
    pipeline: Any = parallel_state.get_pipeline_model_parallel_group()
    tensor: Any = parallel_state.get_tensor_model_parallel_group()
    if part is None:
        part = torch.empty(shape, dtype=dtype, device=PLATFORM.device)
    if pipeline.size() > 1:
        part = part.contiguous()
        dist.broadcast(part, group=pipeline, group_src=stage)
    if rule.split_dim is None or tensor.size() == 1:
        return part
    parts = [torch.empty_like(part) for _ in range(tensor.size())]
    dist.all_gather(parts, part.contiguous(), group=tensor)
    return torch.cat(parts, dim=rule.split_dim)
