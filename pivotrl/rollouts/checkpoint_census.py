"""The weight census of an engine that cannot say its model's tensors under the checkpoint's names: read from the checkpoint's files."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import torch

from pivotrl.errors import UserError
from pivotrl.megatron.safetensors_headers import read_shapes
from pivotrl.weights.manifest import TensorSpec, WeightCensus


def checkpoint_census(checkpoint_dir: Path, dtype: torch.dtype) -> WeightCensus:
    """The tensors of a checkpoint's safetensors files, from their headers alone, all in `dtype`; `with_types` says where an engine differs.

    Raises:
        UserError: for a directory without config.json or safetensors, or with a file that is cut short.
    """
    from transformers import AutoConfig

    files = sorted(checkpoint_dir.glob("*.safetensors"))
    if not files or not (checkpoint_dir / "config.json").is_file():
        raise UserError(
            f"{checkpoint_dir} holds no checkpoint (config.json and *.safetensors)",
            rule="the policy is a Hugging Face checkpoint directory",
            fix="check the path of the model or of the stage that writes it",
        )
    tensors = {name: TensorSpec(shape, dtype) for file in files for name, shape in read_shapes(file).items()}
    is_tied = AutoConfig.from_pretrained(checkpoint_dir, local_files_only=True).get_text_config(decoder=True).tie_word_embeddings
    embedding = next((name for name in tensors if name.endswith("embed_tokens.weight")), None)
    if not is_tied or embedding is None:
        return WeightCensus(tensors, {})
    return WeightCensus({name: spec for name, spec in tensors.items() if name != "lm_head.weight"}, {"lm_head.weight": embedding})


def with_types(census: WeightCensus, types: Mapping[str, torch.dtype]) -> WeightCensus:
    """The census with these types, by name, in place of its own."""
    return replace(census, tensors={name: replace(spec, dtype=types.get(name, spec.dtype)) for name, spec in census.tensors.items()})
