"""Weights as files: safetensors shards of bounded size and a marker written last, for machines that share a file system.

OWN/v<version>/00000.safetensors, ..., and OWN/v<version>/_COMPLETE with the manifest, where OWN is a new directory below the user's. The
versions before are removed once a new one is complete, and OWN with the store; nothing beside it is touched. Also reads a checkpoint's own
safetensors files.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from pivotrl.rundir import write_json
from pivotrl.weights.buckets import Bucket, Invited, bucketed
from pivotrl.weights.digest import tensor_digest
from pivotrl.weights.manifest import TensorRecord, WeightCensus
from pivotrl.weights.owned_directory import OwnedDirectory, remove_abandoned

KIND = "file"
COMPLETE = "_COMPLETE"
_SHARD_BYTES = 1 << 30
# A network file system may show a new file to other machines some seconds late.
_PATIENCE_S, _LOOK_EVERY_S = 60.0, 0.2


class FilesystemStore:
    """A `WeightStore` below a directory, which is left alone until the first hand-over and may hold other things.

    The store's own directory is new. One that a killed process left there is removed when the first hand-over begins.
    """

    is_kept = True

    def __init__(self, directory: Path) -> None:
        self._directory = self._version = directory
        self._own: OwnedDirectory | None = None
        self._buckets: list[Bucket] = []

    def invite(self, members: Sequence[Invited]) -> list[dict[str, Any]]:
        """Nothing is needed but what every bucket says."""
        return [{} for _ in members]

    def begin(self, version: int) -> None:
        """Makes room for a version; an unfinished or older one of that number goes."""
        if self._own is None:
            remove_abandoned(self._directory)
            self._own = OwnedDirectory(self._directory)
        self._version = self._own.path / f"v{version}"
        shutil.rmtree(self._version, ignore_errors=True)
        self._version.mkdir()
        self._buckets = []

    def put(self, tensors: Sequence[tuple[TensorRecord, torch.Tensor]]) -> Bucket:
        """Writes one shard."""
        path = self._version / f"{len(self._buckets):05d}.safetensors"
        _write(path, [(record.name, tensor) for record, tensor in tensors])
        self._buckets.append(Bucket(KIND, str(path), tuple(record for record, _ in tensors), ()))
        return self._buckets[-1]

    def deliver(self) -> None:
        """Nothing: the bytes lie there already."""

    def finish(self) -> None:
        """Writes the marker, then removes other versions."""
        write_json(self._version / COMPLETE, [asdict(record) for bucket in self._buckets for record in bucket.records])
        for other in self._version.parent.glob("v*"):
            if other != self._version:
                shutil.rmtree(other, ignore_errors=True)

    def close(self) -> None:
        """Removes the store's own directory."""
        if self._own is not None:
            self._own.close()
            self._own = None


def read(bucket: Bucket) -> Iterator[torch.Tensor]:
    """A shard's tensors, one by one, in the bucket's order.

    Raises:
        ValueError: for a shard that is not there or holds other names.
    """
    from safetensors import safe_open

    path = Path(bucket.location)
    deadline_s = time.monotonic() + _PATIENCE_S
    while not path.is_file():
        if time.monotonic() > deadline_s:
            raise ValueError(f"{path} of a weight update is not visible here; placement.weights_dir must be a directory that every machine sees")
        time.sleep(_LOOK_EVERY_S)
    with safe_open(path, framework="pt") as reader:
        held = set(reader.keys())
        if held != {record.name for record in bucket.records}:
            raise ValueError(f"{path} holds other tensors than were announced, for example {sorted(held ^ {r.name for r in bucket.records})[0]!r}")
        for record in bucket.records:
            yield reader.get_tensor(record.name)


def write_shards(named_tensors: Iterable[tuple[str, torch.Tensor]], directory: Path) -> None:
    """All tensors as shards in a directory, for a reader that takes a path."""
    for index, tensors in enumerate(bucketed(named_tensors, _SHARD_BYTES)):
        _write(directory / f"model-{index:05d}.safetensors", tensors)


def checkpoint_digests(checkpoint_dir: Path, census: WeightCensus) -> dict[str, str]:
    """Digests of a checkpoint's required tensors in the types of the census; reads all of its files."""
    from safetensors import safe_open

    digests: dict[str, str] = {}
    for file in sorted(checkpoint_dir.glob("*.safetensors")):
        with safe_open(file, framework="pt") as reader:
            for name in set(reader.keys()) & census.tensors.keys():
                digests[name] = tensor_digest(reader.get_tensor(name).to(census.tensors[name].dtype))
    return digests


def _write(path: Path, tensors: list[tuple[str, torch.Tensor]]) -> None:
    from safetensors.torch import save_file

    temporary = path.with_name(f".{path.name}.tmp")
    # Cloned: tensors that share memory, such as slices of one, are refused by the format's writer.
    save_file({name: tensor.detach().cpu().clone(memory_format=torch.contiguous_format) for name, tensor in tensors}, temporary)
    temporary.replace(path)
