"""The search for the axes at fault, on a trainer that only says whether a layout would differ: any set of axes is found, in few layouts."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from itertools import combinations
from pathlib import Path
from typing import Any, cast

import pytest

from pivotrl.config.schema import ParallelConfig
from pivotrl.training.parity_axes import axes_of, axis_at_fault, layout_of, layout_words
from pivotrl.training.protocols import PolicyTrainer

ALL = ParallelConfig(
    tensor_model_parallel_size=2,
    sequence_parallel=True,
    pipeline_model_parallel_size=2,
    virtual_pipeline_model_parallel_size=2,
    context_parallel_size=2,
    expert_model_parallel_size=2,
    expert_tensor_parallel_size=2,
)
NEEDS = {"sequence_parallel": "tensor_model_parallel_size", "virtual_pipeline_model_parallel_size": "pipeline_model_parallel_size"}


class Layouts:
    """A trainer whose outputs are the axes of the layout that it was asked for."""

    def __init__(self, refused: Callable[[set[str]], bool] = lambda axes: False) -> None:
        self.refused = refused
        self.tried: list[frozenset[str]] = []

    def outputs_in_layout(self, checkpoint_dir: Path, parallel: ParallelConfig, token_ids: Sequence[int]) -> Any:
        axes = set(axes_of(parallel))
        if self.refused(axes):
            return "out of memory"
        self.tried.append(frozenset(axes))
        return axes


def search(layouts: Layouts, needed: set[str], parallel: ParallelConfig = ALL) -> str:
    place_of: Any = lambda axes: "layer 0" if needed <= axes else None  # noqa: E731
    return axis_at_fault(cast(PolicyTrainer, layouts), parallel, Path(), (1, 2), place_of)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_any_axes_that_are_needed_together_are_named_and_nothing_else(size: int) -> None:
    for chosen in combinations(axes_of(ALL), size):
        layouts, needed = Layouts(), set(chosen)
        said = search(layouts, needed)
        whole = needed | {NEEDS[one] for one in needed if one in NEEDS}
        named = layout_words(ALL, [key for key in axes_of(ALL) if key in whole])
        # An axis with its own variant stands alone as well; the variant's layout is then among those that differ alone.
        is_alone = len(whole - NEEDS.keys()) == 1 and len(whole & NEEDS.keys()) <= 1
        start = "alone (is|are) " if is_alone else "no axis differs alone, these together do: "
        assert re.search(f"{start}{re.escape(named)} \\(at layer 0\\)", said), (chosen, said)
        assert len(set(layouts.tried)) == len(layouts.tried) <= 2 * len(axes_of(ALL)) + 2
        assert said.endswith(f"{len(layouts.tried)} layouts tried")


def test_two_axes_need_four_layouts_at_most() -> None:
    parallel = ParallelConfig(tensor_model_parallel_size=2, pipeline_model_parallel_size=4)
    layouts = Layouts()
    said = search(layouts, {"tensor_model_parallel_size", "pipeline_model_parallel_size"}, parallel)
    assert said == (
        "no axis differs alone, these together do: tensor parallel 2, pipeline parallel 4 (at layer 0); no difference has tensor parallel 2; "
        "pipeline parallel 4; data parallelism; 4 layouts tried"
    )


def test_a_layout_that_no_process_can_build_is_said_and_its_axis_kept() -> None:
    layouts = Layouts(refused=lambda axes: "context_parallel_size" not in axes)
    said = search(layouts, {"tensor_model_parallel_size"})
    assert "these together do: tensor parallel 2, context parallel 2 (at layer 0)" in said
    assert "; not tried: tensor parallel 2 (out of memory); " in said
    assert "data parallelism (out of memory)" in said


def test_a_layout_that_is_right_once_it_is_built_anew_ends_the_search() -> None:
    layouts = Layouts()
    place_of: Any = lambda axes: None  # noqa: E731
    said = axis_at_fault(cast(PolicyTrainer, layouts), ALL, Path(), (1, 2), place_of)
    assert said.startswith("the same layout built anew from these weights does not")
    assert len(layouts.tried) == 1


def test_layouts_of_some_axes_keep_all_else_of_the_recipes() -> None:
    parallel = ALL.model_copy(update={"recompute": "full", "expert_tensor_parallel_size": 4})
    assert len(axes_of(parallel)) == 7
    assert layout_of(parallel, axes_of(parallel)) == parallel
    assert layout_of(parallel, ()) == ParallelConfig(recompute="full")
    assert layout_of(parallel, ("tensor_model_parallel_size",)) == ParallelConfig(
        tensor_model_parallel_size=2, expert_tensor_parallel_size=1, recompute="full"
    )
    assert layout_of(parallel, ("expert_tensor_parallel_size",)) == ParallelConfig(expert_tensor_parallel_size=4, recompute="full")
    assert layout_words(parallel) == (
        "tensor parallel 2 with sequence parallel, pipeline parallel 2 with 2 chunks per stage, context parallel 2, expert parallel 2, "
        "expert tensor parallel 4"
    )
