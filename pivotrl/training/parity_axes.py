"""Which axis of the trainer's layout, or which axes together, make it differ: smaller layouts are tried on the processes that are there.

Called by training/parity_layers.py once the trainer differs from transformers and one process alone does not, or cannot be asked. First the
layout itself, built anew; then each axis alone, and none, a replica on every process; then, where none differs alone, axes are left out one by
one while what is left still differs, so that every axis of what remains is needed. With a axes that is at most 2 a + 2 layouts, and none is
tried twice. The processes that a layout leaves over are data parallel replicas, all of which are read, so a layout fits wherever the recipe's
does, unless a process has too little memory for what it then holds. The trainer gives up its model for it: the run ends anyway.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from pivotrl.config.schema import ParallelConfig
from pivotrl.training.protocols import PolicyTrainer

if TYPE_CHECKING:
    from pivotrl.megatron.layer_outputs import LayerOutputs

ONE_PROCESS = "no model parallelism"
_DATA = "data parallelism"
_NONE: Mapping[str, object] = {
    "tensor_model_parallel_size": 1,
    "sequence_parallel": False,
    "pipeline_model_parallel_size": 1,
    "virtual_pipeline_model_parallel_size": None,
    "context_parallel_size": 1,
    "expert_model_parallel_size": 1,
    "expert_tensor_parallel_size": None,
}
_TP, _PP, _ETP = "tensor_model_parallel_size", "pipeline_model_parallel_size", "expert_tensor_parallel_size"
# A variant of an axis stands behind the axis that it needs.
_VARIANTS = {"sequence_parallel": _TP, "virtual_pipeline_model_parallel_size": _PP}
_WORDS = {
    _TP: "tensor parallel {}",
    "sequence_parallel": "sequence parallel",
    _PP: "pipeline parallel {}",
    "virtual_pipeline_model_parallel_size": "{} chunks per stage",
    "context_parallel_size": "context parallel {}",
    "expert_model_parallel_size": "expert parallel {}",
    _ETP: "expert tensor parallel {}",
}


def axes_of(parallel: ParallelConfig) -> tuple[str, ...]:
    """The keys of `parallel` that spread the model, a variant behind the axis that it needs.

    >>> axes_of(ParallelConfig(tensor_model_parallel_size=2, sequence_parallel=True, expert_tensor_parallel_size=1))
    ('tensor_model_parallel_size', 'sequence_parallel')
    """
    values = {key: getattr(parallel, key) for key in _WORDS}
    return tuple(key for key, value in values.items() if value is True or (value or 1) > 1)


def layout_of(parallel: ParallelConfig, axes: Collection[str]) -> ParallelConfig:
    """The recipe's layout with these of its axes alone, and all other settings of it."""
    kept = {key: getattr(parallel, key) for key in axes}
    if _TP in axes and parallel.expert_tensor_parallel_size is not None:
        # Where the recipe does not say how each expert is divided, it is as the other matrices are.
        kept.setdefault(_ETP, 1)
    return parallel.model_copy(update={**_NONE, **kept})


def layout_words(parallel: ParallelConfig, axes: Collection[str] | None = None) -> str:
    """The layout, or these axes of it, for a message.

    >>> layout_words(ParallelConfig(tensor_model_parallel_size=2, sequence_parallel=True, context_parallel_size=2)), layout_words(ParallelConfig())
    ('tensor parallel 2 with sequence parallel, context parallel 2', 'no model parallelism')
    """
    words: dict[str, str] = {}
    for key in axes_of(parallel) if axes is None else axes:
        said = _WORDS[key].format(getattr(parallel, key))
        owner = _VARIANTS.get(key, key)
        words[owner] = f"{words[owner]} with {said}" if owner in words else said
    return ", ".join(words.values()) or ONE_PROCESS


@dataclass(slots=True)
class _Search:
    """Layouts tried so far, by their axes: the place where each differs, None where it does not."""

    trainer: PolicyTrainer
    parallel: ParallelConfig
    hf_dir: Path
    token_ids: Sequence[int]
    place_of: Callable[[LayerOutputs], str | None]
    places: dict[tuple[str, ...], str | None] = field(default_factory=dict)
    untried: dict[tuple[str, ...], str] = field(default_factory=dict)

    def differs(self, axes: tuple[str, ...]) -> bool:
        """Tries a layout of these axes; False as well where no process can build it."""
        if axes not in self.places and axes not in self.untried:
            outputs = self.trainer.outputs_in_layout(self.hf_dir, layout_of(self.parallel, axes), self.token_ids)
            if isinstance(outputs, str):
                self.untried[axes] = outputs
            else:
                self.places[axes] = self.place_of(outputs)
        return self.places.get(axes) is not None

    def words(self, axes: tuple[str, ...]) -> str:
        return layout_words(self.parallel, axes) if axes else _DATA

    def at_fault(self, axes: tuple[str, ...]) -> str:
        return f"{self.words(axes)} (at {self.places[axes]})"

    def ruled_out(self) -> str:
        """What was tried beside: layouts that do not differ, those that could not be built, and how many were."""
        right = [self.words(axes) for axes, place in self.places.items() if place is None]
        said = f"; no difference has {'; '.join(right)}" if right else ""
        untried = [f"{self.words(axes)} ({reason})" for axes, reason in self.untried.items()]
        said += f"; not tried: {'; '.join(untried)}" if untried else ""
        return f"{said}; {len(self.places)} {'layout' if len(self.places) == 1 else 'layouts'} tried"


def axis_at_fault(
    trainer: PolicyTrainer,
    parallel: ParallelConfig,
    hf_dir: Path,
    token_ids: Sequence[int],
    place_of: Callable[[LayerOutputs], str | None],
) -> str:
    """Says in words which axis or combination of axes differs, and what was tried; the trainer has no model afterwards.

    Args:
        hf_dir: the trainer's weights, where every process can read them.
        place_of: the first place of given outputs that differs from transformers' outputs; None where none does.
    """
    axes = axes_of(parallel)
    search = _Search(trainer, parallel, hf_dir, token_ids, place_of)
    if not search.differs(axes) and axes in search.places:
        return "the same layout built anew from these weights does not: a process held something else, and what it was is gone"
    alone: list[tuple[str, ...]] = [*((_VARIANTS[key], key) if key in _VARIANTS else (key,) for key in axes), ()]
    wrong = [each for each in dict.fromkeys(alone) if search.differs(each)]
    if wrong:
        verb = "the axis that differs alone is" if len(wrong) == 1 else "the axes that differ alone are"
        return f"{verb} {', '.join(map(search.at_fault, wrong))}{search.ruled_out()}"
    needed = _needed(search, axes)
    if needed == axes and axes not in search.places:
        return f"no axis that could be tried differs{search.ruled_out()}"
    return f"no axis differs alone, these together do: {search.at_fault(needed)}{search.ruled_out()}"


def _needed(search: _Search, axes: tuple[str, ...]) -> tuple[str, ...]:
    """Axes that differ together, from which none could be left out: without it there is no difference, or no such layout."""
    needed = axes
    for key in reversed(axes):
        fewer = tuple(other for other in needed if other != key and _VARIANTS.get(other) != key)
        if fewer and search.differs(fewer):
            needed = fewer
    return needed
