"""Two optimizer steps of the tiny dense model, measured on whatever platform this process has.

    python tests/gpu/parity.py float32|bfloat16 OUT.json

On a GPU the model is made of transformer-engine's layers, in the format named. On a CPU it is the CPU platform's, float32 only: that is
how expected.json beside this file was made (`CUDA_VISIBLE_DEVICES= python tests/gpu/parity.py float32 tests/gpu/expected.json`).
"""

from __future__ import annotations

import dataclasses
import json
import sys
import tempfile
from pathlib import Path

import torch

_HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(_HERE.parents[1]), str(_HERE.parent), str(_HERE.parent / "invariance")]


def main() -> None:
    """Measures and writes."""
    name, out = sys.argv[1], Path(sys.argv[2])
    _choose_format(getattr(torch, name))
    from fakes.trainer_batches import save_model
    from layout_worker import measure

    with tempfile.TemporaryDirectory() as directory:
        model = save_model(Path(directory), "qwen3", num_hidden_layers=4)
        measured = {arrangement: measure({"model": str(model), "parallel": {}, "arrangement": arrangement}) for arrangement in ("uneven", "packed")}
    out.write_text(json.dumps(measured, indent=1) + "\n")


def _choose_format(parameter_dtype: torch.dtype) -> None:
    """Before megatron-core is first imported: the platform's device with another number format, which only this comparison wants."""
    from pivotrl.megatron import platform

    active = dataclasses.replace(platform.activate(), parameter_dtype=parameter_dtype)
    if parameter_dtype != torch.float32 and not active.is_gpu:
        sys.exit("the CPU platform computes in float32")
    platform.activate = lambda: active  # type: ignore[assignment]


if __name__ == "__main__":
    main()
