"""What safetensors files say they hold, without torch and without reading a weight: names, shapes, and whether the file is whole.

The format: eight bytes of length, little endian, then that many bytes of JSON {name: {dtype, shape, data_offsets}}, then the data.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

import orjson

from pivotrl.errors import UserError

_LENGTH_BYTES = 8
# The format's own limit on the header.
_MAX_HEADER_BYTES = 100_000_000
_METADATA = "__metadata__"
_RULE = "weights are read from whole safetensors files"


def read_shapes(file: Path) -> dict[str, tuple[int, ...]]:
    """Shapes by name of the tensors in one file.

    Raises:
        UserError: where the file is no safetensors, or shorter or longer than its header says.
    """
    size = file.stat().st_size
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(_LENGTH_BYTES), "little")
        if not 0 < length <= min(_MAX_HEADER_BYTES, size - _LENGTH_BYTES):
            raise _refused(file, "its header is cut short or no header at all")
        text = stream.read(length)
    try:
        header = orjson.loads(text)
        entries = {name: entry for name, entry in header.items() if name != _METADATA}
        end = max((entry["data_offsets"][1] for entry in entries.values()), default=0)
        shapes = {name: tuple(int(extent) for extent in entry["shape"]) for name, entry in entries.items()}
    except (orjson.JSONDecodeError, AttributeError, KeyError, TypeError, ValueError, IndexError) as error:
        raise _refused(file, "its header is not the format's") from error
    expected = _LENGTH_BYTES + length + end
    if size != expected:
        raise _refused(file, f"it has {size:,} bytes where its header promises {expected:,}")
    return shapes


def num_values(shapes: Mapping[str, tuple[int, ...]]) -> int:
    """Numbers in all tensors together.

    >>> num_values({"a": (2, 3), "b": ()})
    7
    """
    return sum(math.prod(shape) for shape in shapes.values())


def _refused(file: Path, problem: str) -> UserError:
    return UserError(f"{file} cannot be used: {problem}", rule=_RULE, fix="download or copy it again")
