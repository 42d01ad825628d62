"""Writes tensors as they come into safetensors files of a bounded size, with the index that transformers and vLLM read.

One shard is in memory at a time, so that a model larger than memory can be written. Knows no model.
"""

from __future__ import annotations

import shutil
from collections import Counter
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from pivotrl.errors import UserError
from pivotrl.rundir import write_json

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
MAX_SHARD_BYTES = 5 * 10**9


class ShardWriter:
    """Lifecycle: `add` every tensor once, in the order of the files, then `finish`."""

    def __init__(self, directory: Path, max_shard_bytes: int) -> None:
        self._directory = directory
        self._max_shard_bytes = max_shard_bytes
        self._pending: dict[str, torch.Tensor] = {}
        self._pending_bytes = 0
        self._shards: list[list[str]] = []
        self._total_bytes = 0
        self._values: Counter[torch.dtype] = Counter()

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Takes a copy of the tensor; writes the shard before it where the two would exceed the limit.

        Raises:
            UserError: where the shard cannot be written.
            ValueError: where the name was added before.
        """
        if name in self._pending or any(name in names for names in self._shards):
            raise ValueError(f"{name} was written twice")
        # A copy, because tensors that share memory (halves of one fused weight) are refused by the writer.
        copied = tensor.detach().to("cpu", copy=True).contiguous()
        if self._pending and self._pending_bytes + copied.nbytes > self._max_shard_bytes:
            self._flush()
        self._pending[name] = copied
        self._pending_bytes += copied.nbytes
        self._total_bytes += copied.nbytes
        self._values[copied.dtype] += copied.numel()

    def finish(self) -> None:
        """Writes the last shard and gives the files their final names: one file, or shards and their index."""
        self._flush()
        count = len(self._shards)
        if count == 1:
            self._part(0).rename(self._directory / SINGLE)
            return
        weight_map = {}
        for number, names in enumerate(self._shards):
            file = f"model-{number + 1:05d}-of-{count:05d}.safetensors"
            self._part(number).rename(self._directory / file)
            weight_map |= dict.fromkeys(names, file)
        write_json(self._directory / INDEX, {"metadata": {"total_size": self._total_bytes}, "weight_map": weight_map})

    def main_dtype(self) -> str:
        """Number format of most values, as config.json names it; a hybrid model keeps a few vectors in float32 beside bfloat16 matrices."""
        return str(self._values.most_common(1)[0][0]).removeprefix("torch.")

    def _part(self, number: int) -> Path:
        return self._directory / f"model-{number + 1:05d}.safetensors.part"

    def _flush(self) -> None:
        path = self._part(len(self._shards))
        try:
            save_file(self._pending, path, metadata={"format": "pt"})
        except (OSError, SafetensorError) as error:
            free = shutil.disk_usage(self._directory).free
            raise UserError(
                f"{path.name} of {self._pending_bytes:,} bytes could not be written below {self._directory.parent}: {error}",
                rule=f"a checkpoint is written whole or not at all, and {free:,} bytes are free there",
                fix="free space, or choose another output directory",
            ) from error
        self._shards.append(list(self._pending))
        self._pending, self._pending_bytes = {}, 0
