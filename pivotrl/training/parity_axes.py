"""Which axis of the trainer's layout makes it differ: each axis is tried alone, on the processes that are there.

Called by training/parity_layers.py once the trainer differs from transformers and one process alone does not, or cannot be asked. The
processes that an axis leaves over are data parallel, so an axis alone fits wherever the layout fits, unless a process has too little memory
for what it then holds. The trainer gives up its model for it: the run ends anyway.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch

from pivotrl.config.schema import ParallelConfig
from pivotrl.training.protocols import PolicyTrainer

ONE_PROCESS = "no model parallelism"
_ALONE: Mapping[str, object] = {
    "tensor_model_parallel_size": 1,
    "sequence_parallel": False,
    "pipeline_model_parallel_size": 1,
    "virtual_pipeline_model_parallel_size": None,
    "context_parallel_size": 1,
    "expert_model_parallel_size": 1,
    "expert_tensor_parallel_size": None,
}


def axes_alone(parallel: ParallelConfig) -> dict[str, ParallelConfig]:
    """Layouts with one axis of `parallel` each, by the axis in words; a variant of an axis stands behind its plain form.

    >>> list(axes_alone(ParallelConfig(tensor_model_parallel_size=2, sequence_parallel=True, context_parallel_size=4)))
    ['tensor parallel 2', 'tensor parallel 2 with sequence parallel', 'context parallel 4']
    >>> axes_alone(ParallelConfig())
    {}
    """
    tp, pp, vpp = parallel.tensor_model_parallel_size, parallel.pipeline_model_parallel_size, parallel.virtual_pipeline_model_parallel_size
    cp, ep, etp = parallel.context_parallel_size, parallel.expert_model_parallel_size, parallel.expert_tensor_parallel_size
    tensor, pipeline = {"tensor_model_parallel_size": tp}, {"pipeline_model_parallel_size": pp}
    # Where the recipe does not say how each expert is divided, it is as the other matrices are.
    tensor |= {} if etp is None else {"expert_tensor_parallel_size": 1}
    axes: list[tuple[str, Mapping[str, object], bool]] = [
        (f"tensor parallel {tp}", tensor, tp > 1),
        (f"tensor parallel {tp} with sequence parallel", {**tensor, "sequence_parallel": True}, tp > 1 and parallel.sequence_parallel),
        (f"pipeline parallel {pp}", pipeline, pp > 1),
        (f"pipeline parallel {pp} with {vpp} chunks per stage", {**pipeline, "virtual_pipeline_model_parallel_size": vpp}, vpp is not None),
        (f"context parallel {cp}", {"context_parallel_size": cp}, cp > 1),
        (f"expert parallel {ep}", {"expert_model_parallel_size": ep}, ep > 1),
        (f"expert tensor parallel {etp}", {"expert_tensor_parallel_size": etp}, etp is not None and etp > 1),
    ]
    return {words: parallel.model_copy(update={**_ALONE, **keys}) for words, keys, is_used in axes if is_used}


def layout_words(parallel: ParallelConfig) -> str:
    """The layout for a message.

    >>> layout_words(ParallelConfig(pipeline_model_parallel_size=2, context_parallel_size=2)), layout_words(ParallelConfig())
    ('pipeline parallel 2, context parallel 2', 'no model parallelism')
    """
    axes = list(axes_alone(parallel))
    return ", ".join(words for words in axes if not any(other != words and other.startswith(f"{words} with") for other in axes)) or ONE_PROCESS


def axis_at_fault(
    trainer: PolicyTrainer,
    parallel: ParallelConfig,
    hf_dir: Path,
    token_ids: Sequence[int],
    place_of: Callable[[Mapping[str, torch.Tensor]], str | None],
) -> str:
    """Tries every axis of `parallel` alone and says in words which one differs; the trainer has no model afterwards.

    Args:
        hf_dir: the trainer's weights, where every process can read them.
        place_of: the first place of given outputs that differs from transformers' outputs; None where none does.
    """
    axes = axes_alone(parallel)
    if len(axes) == 1:
        return f"its only axis is {next(iter(axes))}"
    wrong: list[str] = []
    right: list[str] = []
    untried: list[str] = []
    for words, layout in axes.items():
        outputs = trainer.outputs_in_layout(hf_dir, layout, token_ids)
        if isinstance(outputs, str):
            untried.append(f"{words} ({outputs})")
        elif place := place_of(outputs):
            wrong.append(f"{words} (at {place})")
        else:
            right.append(words)
    if wrong:
        said = f"the axis that differs alone is {', '.join(wrong)}" if len(wrong) == 1 else f"the axes that differ alone are {', '.join(wrong)}"
    else:
        said = "no axis that could be tried alone differs" if untried else "no axis differs alone, their combination does"
    if right and wrong:
        said += f"; no difference has {', '.join(right)}"
    return f"{said}; not tried: {', '.join(untried)}" if untried else said
