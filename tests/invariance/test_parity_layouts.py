"""The parity gate's layer comparison in parallel layouts: the whole model's outputs in each, and a fault of one rank named by its layer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from fakes.ranks import measure_on_ranks
from fakes.trainer_batches import save_model

from pivotrl.training.parity_child import place_in_one_process

_WORKER = Path(__file__).with_name("parity_layout_worker.py")
_TP = {"tensor_model_parallel_size": 2}
_CASES: list[tuple[str, dict[str, Any], str | None, str | None]] = [
    ("qwen3", _TP, None, None),
    ("qwen3", {**_TP, "sequence_parallel": True}, None, None),
    ("qwen3", {"pipeline_model_parallel_size": 2}, None, None),
    ("qwen3", {"context_parallel_size": 2}, None, None),
    ("qwen3", {}, None, None),
    ("qwen3_moe", {"expert_model_parallel_size": 2}, None, None),
    ("nemotron_3", {"pipeline_model_parallel_size": 2}, None, None),
    ("qwen3", _TP, "decoder.layers.1.mlp.linear_fc1", "layer 1"),
    ("qwen3", {**_TP, "sequence_parallel": True}, "decoder.layers.0.self_attention.linear_qkv", "layer 0"),
]
_FC1 = "decoder.layers.0.mlp.linear_fc1"
# Layout, a parameter that the last process alone has doubled, and the part that is named; None: it holds the only copy, which cannot differ.
_COPIES: list[tuple[str, dict[str, Any], str, str | None]] = [
    ("qwen3", {}, f"{_FC1}.weight", "decoder.layers.mlp.linear_fc1.weight of layer 0"),
    ("qwen3", {**_TP, "sequence_parallel": True}, f"{_FC1}.layer_norm_weight", "decoder.layers.mlp.linear_fc1.layer_norm_weight of layer 0"),
    ("qwen3", _TP, f"{_FC1}.weight", None),
    ("qwen3", {"context_parallel_size": 2}, f"{_FC1}.weight", "decoder.layers.mlp.linear_fc1.weight of layer 0"),
    ("qwen3_moe", {"expert_model_parallel_size": 2}, "decoder.layers.1.mlp.router.weight", "decoder.layers.mlp.router.weight of layer 1"),
]


def test_outputs_of_every_layout_and_the_layer_that_one_rank_computes_wrongly(tmp_path: Path) -> None:
    directories = {family: str(save_model(tmp_path / family, family)) for family in dict.fromkeys(case[0] for case in _CASES)}
    jobs = [{"directory": directories[family], "parallel": parallel, "fault": fault} for family, parallel, fault, _ in _CASES]
    answers = measure_on_ranks(_WORKER, {2: jobs}, tmp_path)[2]
    assert [answer["first"] for answer in answers] == [first for *_, first in _CASES]
    for (family, *_), answer in zip(_CASES, answers, strict=True):
        num_layers = 4 if family == "nemotron_3" else 2
        assert answer["unequal"] is None
        assert answer["places"] == sorted(["embedding", "final norm", *(f"layer {i}" for i in range(num_layers))])


def test_copies_of_a_part_that_processes_hold_differently(tmp_path: Path) -> None:
    directories = {family: str(save_model(tmp_path / family, family)) for family in dict.fromkeys(case[0] for case in _COPIES)}
    jobs = [{"directory": directories[family], "parallel": parallel, "fault": fault} for family, parallel, fault, _ in _COPIES]
    answers = measure_on_ranks(_WORKER, {2: jobs}, tmp_path)[2]
    for (*_, expected), answer in zip(_COPIES, answers, strict=True):
        assert (answer["unequal"] or "").startswith(expected or "")
        assert (answer["unequal"] is None) is (expected is None)


def test_one_process_alone_is_asked_outside_the_launchers_group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_model(tmp_path / "hf", "qwen3")
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    assert place_in_one_process(tmp_path, (5, 60, 7, 33)) is None
