"""Packed and shared-prefix steps in parallel layouts equal a padded step of one process: log-probs, loss, gradient norm, next step.

Each number of processes is started once and runs all its layouts.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from fakes.trainer_batches import save_model

_HERE = Path(__file__).parent
_TP, _PP, _CP, _EP = "tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size", "expert_model_parallel_size"
_SEQUENCE = {_TP: 2, "sequence_parallel": True}
_LAYOUTS: dict[int, dict[str, dict[str, Any]]] = {
    1: {"one process": {}},
    2: {"dp2": {}, "tp2": {_TP: 2}, "tp2 sp": _SEQUENCE, "pp2": {_PP: 2}, "cp2": {_CP: 2}},
    4: {"dp2 cp2": {_CP: 2}, "tp2 sp cp2": {**_SEQUENCE, _CP: 2}, "pp2 cp2": {_PP: 2, _CP: 2}, "tp2 sp pp2": {**_SEQUENCE, _PP: 2}, "cp4": {_CP: 4}},
}
_MODES = ("padded", "packed", "shared_prefix")
_CASES = [(world, name, mode) for world, layouts in _LAYOUTS.items() for name in layouts for mode in _MODES]


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[int, str, str], dict[str, Any]]:
    """What every case measured."""
    directory = tmp_path_factory.mktemp("layouts")
    model = str(save_model(directory / "hf", "qwen3"))
    results = {}
    for world, layouts in _LAYOUTS.items():
        cases = [case for case in _CASES if case[0] == world]
        jobs, answers = directory / f"jobs{world}.json", directory / f"answers{world}.json"
        jobs.write_text(json.dumps([(model, layouts[name], mode) for _, name, mode in cases]))
        launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(world)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{_HERE.parents[1]}{os.pathsep}{_HERE.parent}"}
        subprocess.run([*launch, str(_HERE / "batching_worker.py"), str(jobs), str(answers)], check=True, env=environment)
        results.update(zip(cases, json.loads(answers.read_text()), strict=True))
    return results


@pytest.mark.parametrize("case", _CASES[1:], ids=lambda case: f"{case[1]}, {case[2]}")
def test_every_mode_in_every_layout_is_the_padded_step_of_one_process(measured: dict[tuple[int, str, str], dict[str, Any]], case: Any) -> None:
    expected, ours = measured[_CASES[0]], measured[case]
    assert expected["num_micro_batches"] > 1
    assert ours["logprobs"].keys() == expected["logprobs"].keys()
    for tokens, values in expected["logprobs"].items():
        assert ours["logprobs"][tokens] == pytest.approx(values, abs=2e-6)
    for (loss, norm), (expected_loss, expected_norm) in zip(ours["steps"], expected["steps"], strict=True):
        assert loss == pytest.approx(expected_loss, abs=2e-5)
        assert norm == pytest.approx(expected_norm, rel=5e-4)
    assert expected["steps"][0] != pytest.approx(expected["steps"][1], rel=1e-2), "the first update moved nothing"
