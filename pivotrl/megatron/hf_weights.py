"""Weights between a Hugging Face checkpoint and the trainer's model, in any parallel layout: `load_hf`, `export_hf`, `save_hf`.

All three are collective over the processes of the run. Nothing is converted silently: every tensor of the checkpoint is used or carried
over, every parameter filled, and a round trip returns the same bits. Dense families are mapped by `dense_weights`, the others by
Megatron-Bridge (`bridge`, an extra).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from types import ModuleType
from typing import cast

import torch
import torch.distributed as dist

from pivotrl.errors import UserError
from pivotrl.megatron import dense_weights
from pivotrl.megatron.dense_weights import EMBEDDING, HEAD
from pivotrl.megatron.hf_checkpoint import CheckpointTensors, read_config, write_checkpoint
from pivotrl.megatron.hf_names import is_carried, is_derived
from pivotrl.megatron.model import LanguageModel
from pivotrl.megatron.safetensors_shards import MAX_SHARD_BYTES
from pivotrl.megatron.upstream import GPTModel

_NAMES_SHOWN = 5


def load_hf(chunks: Sequence[LanguageModel], checkpoint_dir: Path) -> None:
    """Fills every parameter of this process from the checkpoint's safetensors, converted to the parameter's number format.

    Raises:
        UserError: where a tensor is left over, missing or has another shape, naming the first few.
    """
    with CheckpointTensors(checkpoint_dir) as tensors:
        ignored = repeated_names(chunks, tensors.files) | {name for name in tensors.files if is_carried(name)}
        check_census(expected_names(chunks), tensors.files, ignored, checkpoint_dir)
        if _is_dense(chunks):
            dense_weights.load(_dense(chunks), tensors.read)
        else:
            _bridge().load(chunks, tensors)
        if chunks[0].share_embeddings_and_output_weights and HEAD in tensors.files:
            _check_tied_head(tensors.read(EMBEDDING), tensors.read(HEAD), checkpoint_dir)


def export_hf(chunks: Sequence[LanguageModel]) -> Iterator[tuple[str, torch.Tensor]]:
    """All weights of the whole model by Hugging Face name, in the model's number format, on every process.

    A tensor may share memory with the model: copy what must outlive the next step. A tied output head is not repeated.
    """
    return dense_weights.export(_dense(chunks)) if _is_dense(chunks) else _bridge().export(chunks)


def expected_names(chunks: Sequence[LanguageModel]) -> set[str]:
    """Hugging Face names of all tensors the whole model is made of, a tied head not repeated."""
    return dense_weights.expected_names(_dense(chunks)) if _is_dense(chunks) else _bridge().expected_names(chunks)


def repeated_names(chunks: Sequence[LanguageModel], names: Iterable[str]) -> set[str]:
    """Those of a checkpoint's names that repeat what the model has: a head stored although it is tied, which is compared, and derived tensors."""
    is_tied = chunks[0].share_embeddings_and_output_weights
    return {name for name in names if is_derived(name) or (is_tied and name == HEAD)}


def save_hf(
    chunks: Sequence[LanguageModel],
    *,
    source_dir: Path,
    out_dir: Path,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    formats: Mapping[str, torch.dtype] | None = None,
) -> None:
    """Writes the model as a Hugging Face checkpoint, whole or not at all; the first process writes, all return when it is done.

    Args:
        source_dir: the checkpoint the model came from: its config, tokenizer files and carried tensors go with the new weights.
        max_shard_bytes: size of a weights file, bytes.
        formats: number formats of tensors by name; those left out keep the model's.

    Raises:
        UserError: on every process, where the first could not write.
    """
    tensors = export_hf(chunks)
    failure: Exception | None = None
    if dist.get_rank() == 0:
        try:
            formatted = ((name, tensor.to((formats or {}).get(name, tensor.dtype))) for name, tensor in tensors)
            named = chain(formatted, _carried_tensors(source_dir))
            write_checkpoint(named, read_config(source_dir), companions_dir=source_dir, out_dir=out_dir, max_shard_bytes=max_shard_bytes)
        except (UserError, OSError) as error:
            failure = error
    # Exporting is collective: a process that does not write, or no longer does, still takes part to the end.
    deque(tensors, maxlen=0)
    outcome = [None if failure is None else str(failure)]
    dist.broadcast_object_list(outcome, src=0)
    if failure is not None:
        raise failure
    if outcome[0] is not None:
        raise UserError(f"the first process could not write {out_dir}: {outcome[0]}", rule="it writes for all", fix="see its message")


def check_census(expected: Iterable[str], stored: Iterable[str], ignored: Iterable[str], checkpoint_dir: Path) -> None:
    """Compares the names a model is made of with those a checkpoint holds.

    Args:
        ignored: names that may be stored without being used.

    Raises:
        UserError: where a name is missing or left over.
    """
    missing = sorted(set(expected) - set(stored))
    unused = sorted(set(stored) - set(expected) - set(ignored))
    for problem, names in (("lacks", missing), ("has, beside what the model uses,", unused)):
        if names:
            shown = ", ".join(names[:_NAMES_SHOWN]) + (f" and {len(names) - _NAMES_SHOWN} more" if len(names) > _NAMES_SHOWN else "")
            raise UserError(
                f"{checkpoint_dir} {problem} {shown}",
                rule="every tensor of a checkpoint must be used and every parameter filled",
                fix="check that config.json belongs to these weights",
            )


def _carried_tensors(source_dir: Path) -> Iterator[tuple[str, torch.Tensor]]:
    if any(source_dir.glob("*.safetensors")):
        with CheckpointTensors(source_dir) as source:
            for name in source.files:
                if is_carried(name):
                    yield name, source.read(name)


def _is_dense(chunks: Sequence[LanguageModel]) -> bool:
    return isinstance(chunks[0], GPTModel) and chunks[0].config.num_moe_experts is None


def _dense(chunks: Sequence[LanguageModel]) -> Sequence[GPTModel]:
    return cast(Sequence[GPTModel], chunks)


def _bridge() -> ModuleType:
    """The module `bridge`, loaded only where it is needed: see its first paragraph."""
    from pivotrl.megatron import bridge

    return bridge


def _check_tied_head(embedding: torch.Tensor, head: torch.Tensor, checkpoint_dir: Path) -> None:
    if not torch.equal(embedding, head):
        raise UserError(
            f"{checkpoint_dir} stores a {HEAD} that differs from {EMBEDDING}",
            rule="config.json sets tie_word_embeddings, so the two are one tensor",
            fix="set tie_word_embeddings to false in config.json, or drop the stale tensor",
        )
