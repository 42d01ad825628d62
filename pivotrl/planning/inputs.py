"""Reads what a plan is about: a checkpoint's config.json, or a YAML file with the same keys for a model nobody has downloaded yet."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from pivotrl.config.yaml_text import read_yaml_file
from pivotrl.errors import UserError
from pivotrl.megatron.families import read_family
from pivotrl.megatron.hf_config import CONFIG, read_config
from pivotrl.rundir import read_json

_NAME = "name"
_KEYS = (
    *("model_type", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "tie_word_embeddings"),
    *("num_attention_heads", "num_key_value_heads", "head_dim"),
    *("num_experts", "num_experts_per_tok", "moe_intermediate_size", "decoder_sparse_step", "mlp_only_layers"),
    *("layers_block_type", "n_routed_experts", "moe_latent_size", "n_shared_experts", "moe_shared_expert_intermediate_size"),
    *("mamba_num_heads", "mamba_head_dim", "n_groups", "ssm_state_size", "conv_kernel"),
)


def load_model(path: Path) -> tuple[str, SimpleNamespace]:
    """A model's name and the attributes of its transformers configuration.

    Plain attributes, because a plan reads them a million times and transformers' object computes each.

    Raises:
        UserError: for a path that is neither, or a model that the trainer does not build, naming the key.
    """
    values = _read(path)
    name = str(values.pop(_NAME, path.stem if path.is_file() else path.name))
    config = read_family(values)
    return name, SimpleNamespace(**{key: getattr(config, key) for key in _KEYS if hasattr(config, key)})


def _read(path: Path) -> dict[str, Any]:
    if (path / CONFIG).is_file():
        return read_config(path)
    if not path.is_file():
        raise UserError(
            f"{path} is neither a checkpoint directory nor a file",
            rule="--model names a directory with config.json, or a YAML file with its keys",
            fix="see configs/models for examples",
        )
    if path.suffix == ".json":
        return read_json(path)
    values = read_yaml_file(path)
    if not isinstance(values, dict):
        raise UserError(f"{path} holds no mapping", rule="it has the keys of a config.json", fix="see configs/models for examples")
    return {str(key): value for key, value in values.items()}
