"""Checkpoint directories in Hugging Face form: reading their tensors, writing them whole, and making one from scratch.

Knows files and Hugging Face names, not megatron-core (which it never imports). `hf_weights` maps the names to the trainer's model.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from transformers import AutoTokenizer, LlamaConfig

from pivotrl.artifacts import WeightIndex, read_artifact
from pivotrl.config.schema import ScratchModel
from pivotrl.errors import UserError
from pivotrl.megatron.directories import atomic_directory
from pivotrl.megatron.hf_config import CONFIG as CONFIG
from pivotrl.megatron.hf_config import read_config as read_config
from pivotrl.megatron.safetensors_shards import INDEX, MAX_SHARD_BYTES, SINGLE, ShardWriter
from pivotrl.rundir import write_json

# Everything beside the weights and their config that transformers or vLLM read from a checkpoint directory.
_COMPANIONS = ("generation_config.json", "tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.*", "merges.txt", "chat_template*")
_INIT_STD = 0.02


class CheckpointTensors:
    """The tensors of a checkpoint directory by name, read one at a time from its safetensors files; a context manager.

    Raises:
        UserError: at construction where the directory holds no safetensors, or a file of the index is missing; at reading where a file lacks
            a tensor that the index promises, or is cut short.
    """

    def __init__(self, checkpoint_dir: Path) -> None:
        self.files: Mapping[str, Path] = weight_files(checkpoint_dir)
        self._opened: dict[Path, Any] = {}
        self._stack = ExitStack()

    def __enter__(self) -> CheckpointTensors:
        return self

    def __exit__(self, *exception: object) -> None:
        self._stack.close()

    def read(self, name: str) -> torch.Tensor:
        """The whole tensor, as stored."""
        file = self.files[name]
        try:
            if file not in self._opened:
                self._opened[file] = self._stack.enter_context(safe_open(file, framework="pt"))
            return self._opened[file].get_tensor(name)
        except SafetensorError as error:
            raise _unreadable(file, error) from error


def weight_files(checkpoint_dir: Path) -> dict[str, Path]:
    """For every tensor of the checkpoint, by name, the safetensors file that holds it.

    Raises:
        UserError: where the directory holds no safetensors, a file of the index is missing, or a file is cut short.
    """
    if (checkpoint_dir / INDEX).is_file():
        files = {name: checkpoint_dir / file for name, file in read_artifact(checkpoint_dir / INDEX, WeightIndex)["weight_map"].items()}
    elif (checkpoint_dir / SINGLE).is_file():
        try:
            with safe_open(checkpoint_dir / SINGLE, framework="pt") as tensors:
                files = dict.fromkeys(tensors.keys(), checkpoint_dir / SINGLE)
        except SafetensorError as error:
            raise _unreadable(checkpoint_dir / SINGLE, error) from error
    else:
        files = {}
    absent = sorted({str(file) for file in files.values() if not file.is_file()})
    if not files or absent:
        raise UserError(
            f"{checkpoint_dir} lacks {absent[0] if absent else f'{SINGLE} and {INDEX}'}",
            rule="weights are read from safetensors files only",
            fix="convert the checkpoint with transformers' save_pretrained, or download it again",
        )
    return files


def _unreadable(file: Path, error: SafetensorError) -> UserError:
    return UserError(f"{file} cannot be read: {error}", rule="weights are read from whole safetensors files", fix="download the checkpoint again")


def write_checkpoint(
    named_tensors: Iterable[tuple[str, torch.Tensor]],
    config: Mapping[str, Any],
    *,
    companions_dir: Path,
    out_dir: Path,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> None:
    """Writes a whole checkpoint directory atomically: safetensors, config.json, tokenizer files. Holds one shard in memory at a time.

    Args:
        config: content of config.json; its `dtype` becomes the one that most values of the tensors have.
        companions_dir: directory whose tokenizer and generation files are copied.
        max_shard_bytes: a checkpoint larger than this is cut into files of at most this size, with an index.

    Raises:
        UserError: where a file cannot be written, for example on a full disk; nothing is left behind then.
    """
    described = {key: value for key, value in config.items() if key != "torch_dtype"}
    with atomic_directory(out_dir) as temporary:
        writer = ShardWriter(temporary, max_shard_bytes)
        for name, tensor in named_tensors:
            writer.add(name, tensor)
        writer.finish()
        write_json(temporary / CONFIG, {**described, "dtype": writer.main_dtype()})
        copy_companions(companions_dir, temporary)


def copy_companions(source_dir: Path, directory: Path) -> None:
    """Copies what a checkpoint has beside its weights and their config: tokenizer, chat template, generation settings."""
    for pattern in _COMPANIONS:
        for companion in sorted(source_dir.glob(pattern)):
            if companion.is_file():
                shutil.copyfile(companion, directory / companion.name)


def init_hf_checkpoint(model_config: ScratchModel, *, tokenizer_dir: Path, out_dir: Path, seed: int) -> None:
    """Writes a Llama-shaped checkpoint with random weights, so that training from scratch is loading this directory.

    Weights are normal with std 0.02, the two projections that write to the residual stream with 0.02 / sqrt(2 * num_layers) (GPT-2);
    norms are 1; the output head is the embedding (tied), which halves the parameters of a tiny model.

    Raises:
        UserError: where the tokenizer has more tokens than the model.
    """
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_dir)
    if len(tokenizer) > model_config.vocab_size:
        raise UserError(
            f"model.vocab_size is {model_config.vocab_size}",
            rule=f"the tokenizer has {len(tokenizer)} tokens and each needs a row",
            fix=f"set model.vocab_size to {len(tokenizer)} or more",
        )
    config = LlamaConfig(
        architectures=["LlamaForCausalLM"],
        vocab_size=model_config.vocab_size,
        hidden_size=model_config.hidden_size,
        intermediate_size=model_config.ffn_hidden_size,
        num_hidden_layers=model_config.num_layers,
        num_attention_heads=model_config.num_attention_heads,
        num_key_value_heads=model_config.num_key_value_heads,
        max_position_embeddings=model_config.max_position_embeddings,
        tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    write_checkpoint(_random_llama(model_config, seed).items(), config.to_diff_dict(), companions_dir=tokenizer_dir, out_dir=out_dir)


def _random_llama(model: ScratchModel, seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    hidden, ffn = model.hidden_size, model.ffn_hidden_size
    key_value = model.num_key_value_heads * (hidden // model.num_attention_heads)
    residual_std = _INIT_STD / math.sqrt(2 * model.num_layers)

    def normal(rows: int, columns: int, std: float) -> torch.Tensor:
        return torch.empty(rows, columns).normal_(std=std, generator=generator)

    tensors = {"model.embed_tokens.weight": normal(model.vocab_size, hidden, _INIT_STD)}
    for layer in range(model.num_layers):
        prefix = f"model.layers.{layer}."
        tensors |= {
            f"{prefix}input_layernorm.weight": torch.ones(hidden),
            f"{prefix}self_attn.q_proj.weight": normal(hidden, hidden, _INIT_STD),
            f"{prefix}self_attn.k_proj.weight": normal(key_value, hidden, _INIT_STD),
            f"{prefix}self_attn.v_proj.weight": normal(key_value, hidden, _INIT_STD),
            f"{prefix}self_attn.o_proj.weight": normal(hidden, hidden, residual_std),
            f"{prefix}post_attention_layernorm.weight": torch.ones(hidden),
            f"{prefix}mlp.gate_proj.weight": normal(ffn, hidden, _INIT_STD),
            f"{prefix}mlp.up_proj.weight": normal(ffn, hidden, _INIT_STD),
            f"{prefix}mlp.down_proj.weight": normal(hidden, ffn, residual_std),
        }
    tensors["model.norm.weight"] = torch.ones(hidden)
    return tensors
