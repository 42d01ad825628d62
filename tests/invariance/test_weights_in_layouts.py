"""Weights in and out of every parallel layout: each process exports the source checkpoint bit for bit, for every family."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

_WORKER = Path(__file__).parent / "weights_layout_worker.py"
_NUM_CASES = {2: 11, 4: 4}


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [2, 4])
def test_every_process_exports_the_source_checkpoint(tmp_path: Path, world_size: int) -> None:
    root = _WORKER.parents[2]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{root}{os.pathsep}{root / 'tests'}"}
    command = [sys.executable, str(_WORKER), str(world_size), str(tmp_path)]
    finished = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=800)
    assert finished.returncode == 0, finished.stdout + finished.stderr[-8000:]
    assert finished.stdout.count("ok ") == _NUM_CASES[world_size]
