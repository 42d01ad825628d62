"""Packed and shared-prefix steps in parallel layouts equal a padded step of one process: log-probs, loss, gradient norm, next step.

The dense model is a Qwen3, the mixture a Qwen3-MoE, the
hybrid a Nemotron-3: Mamba-2, latent experts, attention.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from fakes.ranks import measure_on_ranks
from fakes.trainer_batches import save_model

_WORKER = Path(__file__).with_name("batching_worker.py")
_TP, _PP, _CP, _EP = "tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size", "expert_model_parallel_size"
_SEQUENCE = {_TP: 2, "sequence_parallel": True}
_FAMILIES = {"dense": "qwen3", "mixture": "qwen3_moe", "hybrid": "nemotron_3"}
_MODES = ("padded", "packed", "shared_prefix")
# By number of processes: name of the layout, keys of `parallel`, models.
_LAYOUTS: dict[int, list[tuple[str, dict[str, Any], tuple[str, ...]]]] = {
    1: [("one process", {}, ("dense", "mixture", "hybrid"))],
    2: [
        ("dp2", {}, ("dense",)),
        ("tp2", {_TP: 2}, ("dense",)),
        ("tp2 sp", _SEQUENCE, ("dense", "mixture", "hybrid")),
        ("pp2", {_PP: 2}, ("dense", "hybrid")),
        ("cp2", {_CP: 2}, ("dense", "hybrid")),
        ("ep2", {_EP: 2}, ("mixture", "hybrid")),
    ],
    4: [
        ("dp2 cp2", {_CP: 2}, ("dense",)),
        ("tp2 sp cp2", {**_SEQUENCE, _CP: 2}, ("dense", "hybrid")),
        ("pp2 cp2", {_PP: 2, _CP: 2}, ("dense",)),
        ("tp2 sp pp2", {**_SEQUENCE, _PP: 2}, ("dense",)),
        ("cp4", {_CP: 4}, ("dense",)),
        ("tp2 sp ep2", {**_SEQUENCE, _EP: 2, "expert_tensor_parallel_size": 1}, ("mixture",)),
    ],
}

type Case = tuple[int, str, str, str]
"""Processes, model, layout, mode."""

_CASES: list[Case] = [
    (world, model, name, mode) for world, layouts in _LAYOUTS.items() for name, _, models in layouts for model in models for mode in _MODES
]


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> dict[Case, dict[str, Any]]:
    """What every case measured."""
    directory = tmp_path_factory.mktemp("layouts")
    models = {model: str(save_model(directory / model, family)) for model, family in _FAMILIES.items()}
    keys = {(world, name): parallel for world, layouts in _LAYOUTS.items() for name, parallel, _ in layouts}
    cases = {world: [case for case in _CASES if case[0] == world] for world in _LAYOUTS}
    jobs = {world: [(models[model], keys[world, name], mode) for _, model, name, mode in here] for world, here in cases.items()}
    answers = measure_on_ranks(_WORKER, jobs, directory)
    return {case: answer for world, here in cases.items() for case, answer in zip(here, answers[world], strict=True)}


@pytest.mark.parametrize("case", _CASES, ids=lambda case: ", ".join(case[1:]))
def test_every_mode_in_every_layout_is_the_padded_step_of_one_process(measured: dict[Case, dict[str, Any]], case: Case) -> None:
    expected, ours = measured[1, case[1], "one process", "padded"], measured[case]
    assert ours["num_micro_batches"] > 1
    assert ours["logprobs"].keys() == expected["logprobs"].keys()
    for tokens, values in expected["logprobs"].items():
        assert ours["logprobs"][tokens] == pytest.approx(values, abs=2e-6)
    for (loss, norm), (expected_loss, expected_norm) in zip(ours["steps"], expected["steps"], strict=True):
        assert loss == pytest.approx(expected_loss, abs=2e-5)
        assert norm == pytest.approx(expected_norm, rel=5e-4)
    assert ours["biases"].keys() == expected["biases"].keys()
    for name, bias in expected["biases"].items():
        assert ours["biases"][name] == pytest.approx(bias, abs=1e-6)
    assert expected["steps"][0] != pytest.approx(expected["steps"][1], rel=1e-3), "the first update moved nothing"
