"""Reading a checkpoint without running what is in it: torch's files are pickles, and a pickle can name any function.

A checkpoint of upstream's torch_dist format holds a pickled index (`.metadata`), tensors, and small pickled objects. torch unpickles the
index without any limit and the objects with `weights_only=False`. Here the index is first read by an unpickler that knows the dozen
classes such an index is made of, and objects are read with `weights_only=True` whatever the caller asks for.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

_INDEX = ".metadata"
_FORCE_WEIGHTS_ONLY = "TORCH_FORCE_WEIGHTS_ONLY_LOAD"
_PACKAGE = "torch.distributed.checkpoint"
_CLASSES = {
    (f"{_PACKAGE}.metadata", "BytesStorageMetadata"),
    (f"{_PACKAGE}.metadata", "ChunkStorageMetadata"),
    (f"{_PACKAGE}.metadata", "Metadata"),
    (f"{_PACKAGE}.metadata", "MetadataIndex"),
    (f"{_PACKAGE}.metadata", "StorageMeta"),
    (f"{_PACKAGE}.metadata", "TensorProperties"),
    (f"{_PACKAGE}.metadata", "TensorStorageMetadata"),
    (f"{_PACKAGE}.metadata", "_MEM_FORMAT_ENCODING"),
    (f"{_PACKAGE}.filesystem", "_StorageInfo"),
    (f"{_PACKAGE}.planner", "SavePlan"),
    (f"{_PACKAGE}.planner", "TensorWriteData"),
    (f"{_PACKAGE}.planner", "WriteItem"),
    (f"{_PACKAGE}.planner", "WriteItemType"),
    # From a torch.strided or the like, by name.
    ("torch.serialization", "_get_layout"),
    ("torch", "Size"),
}


class _IndexUnpickler(pickle.Unpickler):
    def find_class(self, module_name: str, global_name: str, /) -> Any:
        is_dtype = module_name == "torch" and isinstance(getattr(torch, global_name, None), torch.dtype)
        if is_dtype or (module_name, global_name) in _CLASSES:
            return super().find_class(module_name, global_name)
        raise pickle.UnpicklingError(f"it names {module_name}.{global_name}, which has no place in a checkpoint's index")


def check_index(state_dir: Path) -> None:
    """Reads the index of a checkpoint with the classes an index is made of and no others.

    Raises:
        pickle.UnpicklingError: where it names another class or function, or is no pickle.
        OSError: where it cannot be read.
    """
    try:
        with (state_dir / _INDEX).open("rb") as stream:
            _IndexUnpickler(stream).load()
    except (EOFError, ValueError, AttributeError, IndexError, KeyError, TypeError, ImportError) as error:
        raise pickle.UnpicklingError(f"its index is damaged: {error}") from error


@contextmanager
def weights_only() -> Iterator[None]:
    """Every torch.load inside the block refuses what is no tensor, number, string or container of these."""
    before = os.environ.get(_FORCE_WEIGHTS_ONLY)
    os.environ[_FORCE_WEIGHTS_ONLY] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[_FORCE_WEIGHTS_ONLY]
        else:
            os.environ[_FORCE_WEIGHTS_ONLY] = before
