"""The trainer on one GPU (transformer-engine) gives the CPU platform's numbers: float32 to its rounding, bfloat16 to its own.

Runs only where torch sees a CUDA device and transformer-engine is installed. Prints a table of the largest differences.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

_HERE = Path(__file__).resolve().parent
# (log-prob, loss, relative gradient norm). float32 matrices may be multiplied in TF32, with 10 bits; bfloat16 has 7.
_BARS = {"float32": (5e-3, 2e-3, 5e-3), "bfloat16": (3e-1, 5e-2, 1e-1)}

if not torch.cuda.is_available():
    pytest.skip("torch sees no CUDA device", allow_module_level=True)
if importlib.util.find_spec("transformer_engine") is None:
    pytest.skip("transformer-engine is not installed", allow_module_level=True)


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize("name", list(_BARS))
def test_a_gpu_gives_the_cpu_platforms_numbers(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    expected = json.loads((_HERE / "expected.json").read_text())
    run = subprocess.run([sys.executable, str(_HERE / "parity.py"), name, str(tmp_path / "out.json")], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr[-5000:]
    measured = json.loads((tmp_path / "out.json").read_text())
    rows = {arrangement: _differences(measured[arrangement], expected[arrangement]) for arrangement in expected}
    with capsys.disabled():
        sys.stdout.write(f"\n{'format':9} {'rows':8} {'log-prob':>9} {'loss':>9} {'grad norm':>9}   {torch.cuda.get_device_name()}\n")
        for arrangement, row in rows.items():
            sys.stdout.write(f"{name:9} {arrangement:8} " + " ".join(f"{value:9.1e}" for value in row) + "\n")
    for row in rows.values():
        assert all(value <= bar for value, bar in zip(row, _BARS[name], strict=True))


def _differences(found: dict[str, Any], expected: dict[str, Any]) -> tuple[float, float, float]:
    pairs = [pair for rows in zip(found["logprobs"], expected["logprobs"], strict=True) for pair in zip(*rows, strict=True)]
    steps = list(zip(found["steps"], expected["steps"], strict=True))
    return (
        max(abs(ours - theirs) for ours, theirs in pairs),
        max(abs(ours[0] - theirs[0]) for ours, theirs in steps),
        max(abs(ours[1] / theirs[1] - 1) for ours, theirs in steps),
    )
