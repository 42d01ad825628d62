"""Weights between Hugging Face names and the trainer's model: `load_hf`, `export_hf`, `save_hf`.

The mapping is written out for the dense families that `model` builds (Llama, Qwen2, Qwen3). Megatron-Bridge, which knows every family,
is meant to replace it behind these three functions. Nothing is converted silently: every tensor of the checkpoint must be used and
every parameter filled, and a round trip returns the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open

from pivotrl.errors import UserError
from pivotrl.megatron.hf_checkpoint import read_config, weight_files, write_checkpoint
from pivotrl.megatron.upstream import GPTModel, TransformerConfig

_NAMES_SHOWN = 5
_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"
# Old exports store the rotary frequencies, which the config determines.
_DERIVED_SUFFIX = "rotary_emb.inv_freq"

type _Merge = Callable[[tuple[torch.Tensor, ...]], torch.Tensor]
type _Split = Callable[[torch.Tensor], tuple[torch.Tensor, ...]]


@dataclass(frozen=True, slots=True)
class WeightRule:
    """How one parameter of the model is made of tensors of the checkpoint, and back."""

    parameter: str
    hf_names: tuple[str, ...]
    merge: _Merge
    split: _Split


def load_hf(model: GPTModel, checkpoint_dir: Path) -> None:
    """Fills every parameter from the checkpoint's safetensors, converted to the parameter's number format.

    Raises:
        UserError: where a tensor is left over, missing or has another shape, naming the first few.
    """
    files = weight_files(checkpoint_dir)
    rules = weight_rules(model)
    _check_census(rules, files, checkpoint_dir)
    parameters = dict(model.named_parameters())
    with ExitStack() as stack, torch.no_grad():
        opened = {file: stack.enter_context(safe_open(file, framework="pt")) for file in sorted(set(files.values()))}
        for rule in rules:
            parts = tuple(opened[files[name]].get_tensor(name) for name in rule.hf_names)
            target = parameters[rule.parameter]
            _check_shapes(rule, parts, target)
            target.copy_(rule.merge(parts))
        if _HEAD in files and model.share_embeddings_and_output_weights:
            embedding, head = (opened[files[name]].get_tensor(name) for name in (_EMBEDDING, _HEAD))
            _check_tied_head(embedding, head, checkpoint_dir)


def export_hf(model: GPTModel) -> Iterator[tuple[str, torch.Tensor]]:
    """All weights by Hugging Face name, in the model's number format.

    A tensor may share memory with the model: copy what must outlive the next step. A tied output head is not repeated.
    """
    parameters = dict(model.named_parameters())
    for rule in weight_rules(model):
        yield from zip(rule.hf_names, rule.split(parameters[rule.parameter].detach()), strict=True)


def save_hf(model: GPTModel, *, source_dir: Path, out_dir: Path) -> None:
    """Writes the model as a Hugging Face checkpoint, whole or not at all.

    Args:
        source_dir: the checkpoint the model came from: its config and its tokenizer files go with the new weights.
    """
    write_checkpoint(export_hf(model), read_config(source_dir), companions_dir=source_dir, out_dir=out_dir)


def weight_rules(model: GPTModel) -> tuple[WeightRule, ...]:
    """One rule per parameter of the model, in the order of export.

    Raises:
        ValueError: where the rules and the model's parameters are not the same set (a bug here, not in a checkpoint).
    """
    config = model.config
    rules = [_copy("embedding.word_embeddings.weight", _EMBEDDING)]
    for layer in range(config.num_layers):
        rules += _layer_rules(config, layer)
    rules.append(_copy("decoder.final_layernorm.weight", "model.norm.weight"))
    if not model.share_embeddings_and_output_weights:
        rules.append(_copy("output_layer.weight", _HEAD))
    unmapped = {name for name, _ in model.named_parameters()} ^ {rule.parameter for rule in rules}
    if unmapped:
        raise ValueError(f"no weight rule fits {sorted(unmapped)}")
    return tuple(rules)


def _layer_rules(config: TransformerConfig, layer: int) -> list[WeightRule]:
    ours, theirs = f"decoder.layers.{layer}.", f"model.layers.{layer}."
    attention, mlp = f"{ours}self_attention.", f"{ours}mlp."
    rules = [
        _copy(f"{attention}linear_qkv.layer_norm_weight", f"{theirs}input_layernorm.weight"),
        _qkv(config, f"{attention}linear_qkv.weight", f"{theirs}self_attn.{{}}_proj.weight"),
        _copy(f"{attention}linear_proj.weight", f"{theirs}self_attn.o_proj.weight"),
        _copy(f"{mlp}linear_fc1.layer_norm_weight", f"{theirs}post_attention_layernorm.weight"),
        WeightRule(f"{mlp}linear_fc1.weight", (f"{theirs}mlp.gate_proj.weight", f"{theirs}mlp.up_proj.weight"), torch.cat, lambda fc1: fc1.chunk(2)),
        _copy(f"{mlp}linear_fc2.weight", f"{theirs}mlp.down_proj.weight"),
    ]
    if config.add_qkv_bias:
        rules.insert(2, _qkv(config, f"{attention}linear_qkv.bias", f"{theirs}self_attn.{{}}_proj.bias"))
    if config.qk_layernorm:
        rules += [_copy(f"{attention}{x}_layernorm.weight", f"{theirs}self_attn.{x}_norm.weight") for x in "qk"]
    return rules


def _copy(parameter: str, hf_name: str) -> WeightRule:
    return WeightRule(parameter, (hf_name,), lambda parts: parts[0], lambda tensor: (tensor,))


def _qkv(config: TransformerConfig, parameter: str, hf_pattern: str) -> WeightRule:
    """Upstream's fused layout: for every key/value group its query heads, then its key head, then its value head."""
    groups, heads, channels = config.num_query_groups, config.num_attention_heads, config.kv_channels
    assert groups is not None
    assert channels is not None
    head_counts = (heads // groups, 1, 1)

    def merge(parts: tuple[torch.Tensor, ...]) -> torch.Tensor:
        grouped = [part.reshape(groups, count * channels, *part.shape[1:]) for part, count in zip(parts, head_counts, strict=True)]
        return torch.cat(grouped, dim=1).flatten(0, 1)

    def split(fused: torch.Tensor) -> tuple[torch.Tensor, ...]:
        grouped = fused.reshape(groups, sum(head_counts) * channels, *fused.shape[1:])
        return tuple(part.flatten(0, 1) for part in grouped.split([count * channels for count in head_counts], dim=1))

    return WeightRule(parameter, tuple(hf_pattern.format(x) for x in "qkv"), merge, split)


def _check_census(rules: tuple[WeightRule, ...], files: Mapping[str, Path], checkpoint_dir: Path) -> None:
    expected = {name for rule in rules for name in rule.hf_names}
    missing = sorted(expected - files.keys())
    # A head stored although it is tied is compared with the embedding instead (`_check_tied_head`).
    unused = sorted(name for name in files.keys() - expected - {_HEAD} if not name.endswith(_DERIVED_SUFFIX))
    for problem, names in (("lacks", missing), ("has, beside what the model uses,", unused)):
        if names:
            shown = ", ".join(names[:_NAMES_SHOWN]) + (f" and {len(names) - _NAMES_SHOWN} more" if len(names) > _NAMES_SHOWN else "")
            raise UserError(
                f"{checkpoint_dir} {problem} {shown}",
                rule="every tensor of a checkpoint must be used and every parameter filled",
                fix="check that config.json belongs to these weights",
            )


def _check_shapes(rule: WeightRule, parts: tuple[torch.Tensor, ...], target: torch.Tensor) -> None:
    for name, part, expected in zip(rule.hf_names, parts, rule.split(target), strict=True):
        if part.shape != expected.shape:
            raise UserError(
                f"{name} has shape {tuple(part.shape)}",
                rule=f"config.json asks for {tuple(expected.shape)}",
                fix="check that config.json belongs to these weights",
            )


def _check_tied_head(embedding: torch.Tensor, head: torch.Tensor, checkpoint_dir: Path) -> None:
    if not torch.equal(embedding, head):
        raise UserError(
            f"{checkpoint_dir} stores a {_HEAD} that differs from {_EMBEDDING}",
            rule="config.json sets tie_word_embeddings, so the two are one tensor",
            fix="set tie_word_embeddings to false in config.json, or drop the stale tensor",
        )
