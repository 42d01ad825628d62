"""The parity gate names the axis of a layout that carries a difference: a fault of one axis is injected into every layout that has it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from fakes.ranks import measure_on_ranks
from fakes.trainer_batches import save_model

from pivotrl.config.schema import ParallelConfig
from pivotrl.training.parity_axes import axes_alone

_WORKER = Path(__file__).with_name("parity_axes_worker.py")
_TP: dict[str, Any] = {"tensor_model_parallel_size": 2}
_PP: dict[str, Any] = {"pipeline_model_parallel_size": 2}
_CP: dict[str, Any] = {"context_parallel_size": 2}
_EP: dict[str, Any] = {"expert_model_parallel_size": 2}
_SP: dict[str, Any] = {"sequence_parallel": True}
_CASES: list[tuple[str, dict[str, Any], list[str], str]] = [
    ("qwen3", {**_TP, **_PP}, ["tensor"], "the axis that differs alone is tensor parallel 2 (at layer 0); no difference has pipeline parallel 2"),
    ("qwen3", {**_TP, **_PP}, ["pipeline"], "the axis that differs alone is pipeline parallel 2 (at layer 1); no difference has tensor parallel 2"),
    ("qwen3", {**_TP, **_PP}, ["tensor", "pipeline"], "no axis differs alone, their combination does"),
    ("qwen3", {**_TP, **_CP}, ["context"], "the axis that differs alone is context parallel 2 (at layer 0); no difference has tensor parallel 2"),
    ("qwen3_moe", {**_PP, **_EP}, ["expert"], "the axis that differs alone is expert parallel 2 (at layer 0); no difference has pipeline parallel 2"),
    (
        "qwen3_moe",
        {**_TP, **_SP, **_EP},
        ["expert", "tensor"],
        "no axis that could be tried alone differs; not tried: tensor parallel 2 (parallel.sequence_parallel is false",
    ),
]


@pytest.mark.slow
def test_the_axis_that_carries_the_difference_is_named(tmp_path: Path) -> None:
    for family in {case[0] for case in _CASES}:
        save_model(tmp_path / family / "hf", family)
    jobs = [{"folder": str(tmp_path / family), "parallel": parallel, "fault": fault} for family, parallel, fault, _ in _CASES]
    answers = measure_on_ranks(_WORKER, {4: jobs}, tmp_path)[4]
    for (_, _, _, expected), answer in zip(_CASES, answers, strict=True):
        assert answer["place"].startswith("layer ")
        assert f"a trainer of one process does not: the layout is at fault; {expected}" in answer["what"]


def test_every_axis_of_a_layout_stands_alone_and_all_else_is_the_recipes() -> None:
    parallel = ParallelConfig(
        **_TP, **_SP, **_PP, **_CP, **_EP, virtual_pipeline_model_parallel_size=3, expert_tensor_parallel_size=4, recompute="full"
    )
    axes = axes_alone(parallel)
    assert len(axes) == 7
    assert all(layout.recompute == "full" for layout in axes.values())
    assert axes["tensor parallel 2"] == ParallelConfig(tensor_model_parallel_size=2, expert_tensor_parallel_size=1, recompute="full")
    assert axes["expert tensor parallel 4"] == ParallelConfig(expert_tensor_parallel_size=4, recompute="full")
    assert axes["pipeline parallel 2 with 3 chunks per stage"] == ParallelConfig(**_PP, virtual_pipeline_model_parallel_size=3, recompute="full")
