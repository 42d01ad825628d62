"""`pivotrl convert`: a checkpoint from Hugging Face form to megatron-core's distributed form and back, and the proof that nothing changed.

The Megatron form is a directory with `weights/` (torch_dist: any parallel layout loads it), `hf/` (config.json, tokenizer, tensors that are
carried) and `tensors.json` (shape, format and hash of every tensor of the source). Weights alone, as those of a training checkpoint or of
another program on megatron-core, are read as well, given a Hugging Face directory that describes the model. Runs in one process.
"""

from __future__ import annotations

import hashlib
import os
import pickle
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path
from typing import Any, Literal

import torch
from torch.distributed.checkpoint.api import CheckpointException

from pivotrl.config.schema import ParallelConfig
from pivotrl.errors import UserError
from pivotrl.identity import derive_seed
from pivotrl.megatron.directories import atomic_directory
from pivotrl.megatron.hf_checkpoint import CONFIG, CheckpointTensors, copy_companions, read_config
from pivotrl.megatron.hf_names import is_carried
from pivotrl.megatron.hf_weights import export_hf, load_hf, repeated_names, save_hf
from pivotrl.megatron.model import LanguageModel, build_model
from pivotrl.megatron.parallel import initialize_parallel
from pivotrl.megatron.safetensors_shards import ShardWriter
from pivotrl.megatron.untrusted import check_index, weights_only
from pivotrl.megatron.upstream import PLATFORM, CheckpointingException, dist_checkpointing, parallel_state
from pivotrl.progress import progress_bar
from pivotrl.rundir import read_json, write_json
from pivotrl.weights.transformers_model import load_transformers

type Form = Literal["hf", "megatron"]

_WEIGHTS, _HF, _TENSORS = "weights", "hf", "tensors.json"
# Written by megatron-core beside the shards of a torch_dist checkpoint.
_DIST_METADATA = "metadata.json"
_PROMPTS, _PROMPT_TOKENS = 2, 48
# Largest difference of a logit that two implementations may show, relative to the largest logit where that exceeds 1.
_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 5e-2}


@dataclass(frozen=True, slots=True)
class TensorRecord:
    """One tensor of a checkpoint.

    >>> TensorRecord((2,), "float32", "ab").shape
    (2,)
    """

    shape: tuple[int, ...]
    dtype: str
    sha256: str

    @staticmethod
    def of(tensor: torch.Tensor) -> TensorRecord:
        """Its shape, format and the hash of its bytes."""
        content = tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy()
        return TensorRecord(tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."), hashlib.sha256(content).hexdigest())


@dataclass(frozen=True, slots=True)
class Request:
    """What to convert."""

    source: Path
    out: Path
    to: Form
    """The form of `out`."""
    verify: bool
    """Read back what was written, compare every tensor's bits, and compare logits with transformers' model."""
    config_dir: Path | None
    """Hugging Face directory that describes weights without `hf/` and `tensors.json`; None: they have these."""
    max_shard_bytes: int
    """Size of a safetensors file, bytes."""


@dataclass(frozen=True, slots=True)
class Conversion:
    """What a conversion did."""

    num_tensors: int
    """Tensors by Hugging Face name, those that are carried included."""
    num_verified: int | None
    """Tensors found equal bit for bit after a round trip; None where that was not asked for."""
    max_logit_difference: float | None
    """Largest difference from transformers' logits on fixed prompts; None where that was not asked for."""

    def summary(self) -> str:
        """One line for a reader.

        >>> Conversion(41, None, None).summary()
        '41 tensors converted'
        """
        if self.num_verified is None:
            return f"{self.num_tensors} tensors converted"
        logits = f"logits within {self.max_logit_difference:.1e} of transformers'"
        return f"{self.num_tensors} tensors converted, {self.num_verified} equal bit for bit after the round trip, {logits}"


def convert(request: Request) -> Conversion:
    """Writes a checkpoint in the other form, whole or not at all.

    Raises:
        UserError: where the source is no such checkpoint or does not fit its config, `out` exists, or the comparison fails; then nothing is
            left at `out`.
    """
    if request.out.exists():
        raise UserError(f"{request.out} exists", rule="a conversion never replaces a checkpoint", fix="choose another directory, or remove it")
    if int(os.environ.get("WORLD_SIZE", "1")) != 1:
        raise UserError("several processes were started", rule="a conversion runs in one", fix="start pivotrl without torchrun")
    initialize_parallel(ParallelConfig(), seed=0)
    return _to_megatron(request) if request.to == "megatron" else _to_hf(request)


def _to_megatron(request: Request) -> Conversion:
    source = request.source
    chunks = build_model(read_config(source), ParallelConfig())
    load_hf(chunks, source)
    with CheckpointTensors(source) as tensors, progress_bar("hash tensors", total=len(tensors.files), unit="tensors") as bar:
        records = {}
        for name in tensors.files:
            records[name] = TensorRecord.of(tensors.read(name))
            bar.advance(1)
    with atomic_directory(request.out) as temporary:
        (temporary / _WEIGHTS).mkdir()
        dist_checkpointing.save(_sharded_state(chunks), str(temporary / _WEIGHTS))
        _write_description(source, temporary / _HF)
        write_json(temporary / _TENSORS, {name: asdict(record) for name, record in records.items()})
        if not request.verify:
            return Conversion(len(records), None, None)
        read_back = build_model(read_config(source), ParallelConfig())
        _load_megatron(read_back, temporary / _WEIGHTS)
        return Conversion(len(records), *_verify(read_back, source, records))


def _to_hf(request: Request) -> Conversion:
    source, out, config_dir = request.source, request.out, request.config_dir
    description = config_dir or source / _HF
    if not (description / CONFIG).is_file():
        raise UserError(
            f"{description} has no {CONFIG}",
            rule="weights alone do not say which model they belong to",
            fix="give --config with a Hugging Face directory of the same architecture",
        )
    records = _read_records(source) if config_dir is None else {}
    chunks = build_model(read_config(description), ParallelConfig())
    _load_megatron(chunks, source / _WEIGHTS if (source / _WEIGHTS).is_dir() else source)
    formats = {name: getattr(torch, record.dtype) for name, record in records.items()}
    # Under another name until it has proved equal.
    pending = out.with_name(f".{out.name}.unverified")
    try:
        save_hf(chunks, source_dir=description, out_dir=pending, max_shard_bytes=request.max_shard_bytes, formats=formats)
        with CheckpointTensors(pending) as written:
            conversion = Conversion(len(written.files), None, None)
        if request.verify:
            expected = records or {name: TensorRecord.of(tensor) for name, tensor in export_hf(chunks)}
            conversion = Conversion(conversion.num_tensors, *_verify_written(pending, expected))
        pending.rename(out)
    finally:
        shutil.rmtree(pending, ignore_errors=True)
    return conversion


def _verify_written(out: Path, expected: Mapping[str, TensorRecord]) -> tuple[int, float]:
    read_back = build_model(read_config(out), ParallelConfig())
    load_hf(read_back, out)
    return _verify(read_back, out, expected)


def _verify(chunks: Sequence[LanguageModel], hf_dir: Path, expected: Mapping[str, TensorRecord]) -> tuple[int, float]:
    """Number of tensors whose bits are as expected, and the largest difference of a logit from transformers' model of `hf_dir`."""
    remaining = dict(expected)
    with CheckpointTensors(hf_dir) as tensors, progress_bar("compare tensors", total=len(expected), unit="tensors") as bar:
        carried = ((name, tensors.read(name)) for name in tensors.files if is_carried(name) and name in expected)
        for name, tensor in chain(export_hf(chunks), carried):
            record = remaining.pop(name, None)
            if record is None or TensorRecord.of(tensor.to(getattr(torch, record.dtype))) != record:
                raise UserError(f"{name} changed in the round trip", rule="a conversion keeps every bit", fix="report this: it is a bug")
            bar.advance(1)
    # Tensors that repeat others are compared when loading and not exported.
    lost = remaining.keys() - repeated_names(chunks, expected)
    if lost:
        raise UserError(f"{sorted(lost)[0]} was lost in the round trip", rule="a conversion keeps every tensor", fix="report this: it is a bug")
    return len(expected) - len(remaining), _compare_logits(chunks, hf_dir)


@torch.no_grad()
def _compare_logits(chunks: Sequence[LanguageModel], hf_dir: Path) -> float:
    loaded: Any = load_transformers(hf_dir, dtype=PLATFORM.parameter_dtype)
    reference = loaded.to(PLATFORM.device)
    generator = torch.Generator().manual_seed(derive_seed(0, "convert", "prompts"))
    token_ids = torch.randint(0, reference.config.vocab_size, (_PROMPTS, _PROMPT_TOKENS), generator=generator).to(PLATFORM.device)
    positions = torch.arange(_PROMPT_TOKENS, device=PLATFORM.device).expand_as(token_ids)
    expected = reference(token_ids).logits.float()
    difference = (chunks[0].eval()(token_ids, positions, None).float() - expected).abs().max().item()
    allowed = _TOLERANCE[PLATFORM.parameter_dtype] * max(1.0, expected.abs().max().item())
    if not difference < allowed:
        raise UserError(
            f"logits differ from transformers' by {difference:.2e}",
            rule=f"on {_PROMPTS} fixed prompts they may differ by {allowed:.2e}",
            fix="check that the installed transformers supports this checkpoint; otherwise report this",
        )
    return difference


def _sharded_state(chunks: Sequence[LanguageModel]) -> dict[str, Any]:
    metadata = {"dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True)}
    return {"model": chunks[0].sharded_state_dict(metadata=metadata)}


def _load_megatron(chunks: Sequence[LanguageModel], directory: Path) -> None:
    if not (directory / _DIST_METADATA).is_file():
        raise UserError(
            f"{directory} has no {_DIST_METADATA}",
            rule="a checkpoint in Megatron form is a torch_dist directory of megatron-core",
            fix="give the directory that holds it, or --from hf for a Hugging Face checkpoint",
        )
    try:
        check_index(directory)
        with weights_only():
            state: Any = dist_checkpointing.load(_sharded_state(chunks), str(directory))
    except (CheckpointingException, CheckpointException, pickle.UnpicklingError, KeyError, RuntimeError, OSError, ValueError) as error:
        raise UserError(
            f"{directory} cannot be read: {' '.join(str(error).split())[:400]}",
            rule="it must hold the weights of the model that config.json describes, whole",
            fix="check that the two belong together; convert or copy the checkpoint again",
        ) from error
    chunks[0].load_state_dict(state["model"])


def _write_description(source: Path, directory: Path) -> None:
    """What a Hugging Face checkpoint has beside trained weights."""
    directory.mkdir()
    copy_companions(source, directory)
    write_json(directory / CONFIG, read_config(source))
    with CheckpointTensors(source) as tensors:
        carried = [name for name in tensors.files if is_carried(name)]
        if carried:
            writer = ShardWriter(directory, 2**62)
            for name in carried:
                writer.add(name, tensors.read(name))
            writer.finish()


def _read_records(source: Path) -> dict[str, TensorRecord]:
    if not (source / _TENSORS).is_file():
        raise UserError(f"{source} has no {_TENSORS}", rule="`pivotrl convert --to megatron` writes it", fix="give --config for other weights")
    return {name: TensorRecord(tuple(record["shape"]), record["dtype"], record["sha256"]) for name, record in read_json(source / _TENSORS).items()}
