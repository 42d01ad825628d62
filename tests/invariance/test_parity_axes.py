"""The parity gate names the axes of a layout that carry a difference: a fault of one axis, of two together or of one process follows into layouts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from fakes.ranks import measure_on_ranks
from fakes.trainer_batches import save_model

from pivotrl.config.schema import ParallelConfig
from pivotrl.training.parity_axes import axes_of

_WORKER = Path(__file__).with_name("parity_axes_worker.py")
_TP: dict[str, Any] = {"tensor_model_parallel_size": 2}
_PP: dict[str, Any] = {"pipeline_model_parallel_size": 2}
_CP: dict[str, Any] = {"context_parallel_size": 2}
_EP: dict[str, Any] = {"expert_model_parallel_size": 2}
_SP: dict[str, Any] = {"sequence_parallel": True}
_WHOLE_EXPERTS: dict[str, Any] = {"expert_tensor_parallel_size": 1}
_NO_TP_ALONE = "not tried: tensor parallel 2 (parallel.sequence_parallel is false"
# Family, layout, fault, and what the finding says of the axes; the number of layouts tried is the figure that docs/parity.md gives a bound for.
_CASES: list[tuple[str, dict[str, Any], list[str], list[str]]] = [
    (
        "qwen3",
        {**_TP, **_PP},
        ["tensor"],
        ["axis that differs alone is tensor parallel 2 (at layer 0); no difference has pipeline parallel 2; data parallelism; 4 layouts tried"],
    ),
    (
        "qwen3",
        {**_TP, **_PP},
        ["pipeline"],
        ["axis that differs alone is pipeline parallel 2 (at layer 1); no difference has tensor parallel 2; data parallelism; 4 layouts tried"],
    ),
    (
        "qwen3",
        {**_TP, **_PP},
        ["tensor", "pipeline"],
        ["no axis differs alone, these together do: tensor parallel 2, pipeline parallel 2 (at layer 0); no difference has", "; 4 layouts tried"],
    ),
    ("qwen3", {**_TP, **_CP}, ["context"], ["axis that differs alone is context parallel 2 (at layer 0); no difference has tensor parallel 2;"]),
    ("qwen3_moe", {**_PP, **_EP}, ["expert"], ["axis that differs alone is expert parallel 2 (at layer 0); no difference has pipeline parallel 2;"]),
    (
        "qwen3_moe",
        {**_TP, **_SP, **_EP},
        ["expert", "tensor"],
        ["these together do: tensor parallel 2 with sequence parallel, expert parallel 2 (at layer 0); no difference has", _NO_TP_ALONE],
    ),
    (
        "qwen3",
        {**_TP, **_SP, **_PP},
        ["sequence", "pipeline"],
        [
            "these together do: tensor parallel 2 with sequence parallel, pipeline parallel 2 (at layer 0)",
            "no difference has tensor parallel 2; tensor parallel 2 with sequence parallel; pipeline parallel 2; data parallelism; "
            "tensor parallel 2, pipeline parallel 2; 6 layouts tried",
        ],
    ),
    (
        "qwen3_moe",
        {**_TP, **_SP, **_PP, **_EP, **_WHOLE_EXPERTS},
        ["expert", "tensor"],
        [
            "these together do: tensor parallel 2 with sequence parallel, expert parallel 2 (at layer 0)",
            "tensor parallel 2 with sequence parallel, pipeline parallel 2",
            _NO_TP_ALONE,
        ],
    ),
]


def _findings(jobs: list[dict[str, Any]], tmp_path: Path) -> list[dict[str, Any]]:
    for family in {job["family"] for job in jobs}:
        save_model(tmp_path / family / "hf", family)
    return measure_on_ranks(_WORKER, {4: [{**job, "folder": str(tmp_path / job["family"])} for job in jobs]}, tmp_path)[4]


@pytest.mark.slow
def test_the_axes_that_carry_the_difference_are_named_with_what_was_tried(tmp_path: Path) -> None:
    answers = _findings([{"family": family, "parallel": parallel, "fault": fault} for family, parallel, fault, _ in _CASES], tmp_path)
    for (_, parallel, _, expected), answer in zip(_CASES, answers, strict=True):
        assert answer["place"].startswith("layer ")
        assert "; a trainer of one process does not: the layout is at fault; " in answer["what"]
        for words in expected:
            assert words in answer["what"], answer["what"]
        # Those of the last layout: upstream makes some thirty per layout, each with threads or a communicator of its own.
        assert answer["num_groups"] < 60
        assert answer["num_builds"] <= 1 + 2 * len(axes_of(ParallelConfig(**parallel))) + 2


@pytest.mark.slow
def test_a_process_whose_weights_or_results_differ_from_its_replicas_is_named(tmp_path: Path) -> None:
    computes = {"family": "qwen3", "parallel": _TP, "fault": ["process"]}
    holds = {"family": "qwen3", "parallel": _TP, "fault": ["weights"]}
    everywhere, alone, held = _findings([computes, {**computes, "parallel": {}}, holds], tmp_path)
    for answer in (everywhere, alone):
        assert "data parallelism (at layer 0 in the data parallel replica of process 3 alone)" in answer["what"]
        assert answer["unequal"] is None
        assert "test the devices" in answer["fix"]
    assert "of the largest value in the data parallel replica of processes 2, 3 alone" in everywhere["what"]
    assert held["unequal"] == ["decoder.layers.mlp.linear_fc1.layer_norm_weight of layer 0", 3, 0, 1]
    assert held["what"].endswith("the same layout built anew from these weights does not: a process held something else, and what it was is gone")
    assert "in the data parallel replica of processes 2, 3 alone" in held["what"]
