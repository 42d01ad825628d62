"""Layer by layer: the trainer's model against transformers on the weights that the trainer exports, for one sequence of tokens.

Whatever the trainer's layout, the export is the whole model, so what differs is the layout or the model's code, and where it differs first
is its place. Where both agree everywhere, the engine is the one that differs. Called by training/parity.py once a check has failed; loads a
second copy of the model. Suffixes: T = tokens of the sequence, H = hidden size.
"""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.utils import logging

from pivotrl.config.schema import ParallelConfig
from pivotrl.megatron.layer_outputs import LayerOutputs
from pivotrl.megatron.processes import num_processes
from pivotrl.training.batching import train_batch, train_micro_batches
from pivotrl.training.parity_axes import axis_at_fault, layout_words
from pivotrl.training.parity_child import place_in_one_process
from pivotrl.training.parity_findings import ENGINE, ActionScores, Finding, Limits
from pivotrl.training.protocols import PolicyTrainer
from pivotrl.types import TrainSample
from pivotrl.weights.transformers_model import load_transformers

# Of the largest value of an output: sums in another order, layer after layer.
_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 5e-2}
# Settings of a mixture that no weight holds: what a router or expert layer calls them, and what they are when forgotten.
_FORGOTTEN: Mapping[str, Callable[[Any], Any]] = {"routed_scaling_factor": lambda _value: 1.0, "norm_topk_prob": lambda value: not value}

_REPLICA_FIX = "test the devices and nodes of those processes; the same command goes on from the last checkpoint"


def layers_finding(
    trainer: PolicyTrainer, samples: Sequence[TrainSample], folder: Path, *, temperature: float, limits: Limits, parallel: ParallelConfig
) -> Finding:
    """The first of embedding, layers, final norm and head that differs; the engine where none does.

    Args:
        samples: the actions of the check, with the engine's log-probs; the longest one goes through both models.
        folder: a scratch directory with the trainer's export as hf/.
        parallel: the trainer's layout; where it has an axis, a trainer of one process and smaller layouts are asked as well.
    """
    layout = layout_words(parallel)
    model, tolerance = load_model(folder / "hf")
    longest = max(samples, key=lambda sample: len(sample.prompt_token_ids) + len(sample.completion_token_ids))
    token_ids = (*longest.prompt_token_ids, *longest.completion_token_ids)
    if difference := first_difference(trainer.layer_outputs(token_ids), model, token_ids, tolerance):
        what = f"the trainer ({layout}) and transformers give different outputs from the same weights, here first: by {difference.size:.2g} "
        what += f"of the largest value{difference.whose}"
        if num_processes() > 1:
            what += _layout_fault(trainer, model, folder, token_ids, tolerance=tolerance, parallel=parallel)
        fix = "compare the settings of that layer with config.json, and train in the layout of one process meanwhile"
        return Finding(difference.place, what, _REPLICA_FIX if difference.processes else fix)
    batches = train_micro_batches(train_batch([longest]), batching="padded", micro_batch_tokens=1, skip_zero_variance=False)
    expected_T = _logprobs(model, longest, temperature)
    for replica, logprobs in enumerate(trainer.replica_logprobs(batches, temperature=temperature)):
        head = float((logprobs[0][0, len(longest.prompt_token_ids) :].cpu() - expected_T).abs().max())
        if not head <= max(limits.largest, tolerance):
            whose = f", data parallel replica {replica}" if replica else ""
            what = f"the trainer ({layout}{whose}) and transformers agree up to the final norm and give log-probs that differ by {head:.2g}"
            return Finding("head", what, "compare vocab_size and tie_word_embeddings of the checkpoint's config.json with its tensors")
    return _engine_finding(model, samples, temperature, limits)


def _layout_fault(
    trainer: PolicyTrainer, model: PreTrainedModel, folder: Path, token_ids: Sequence[int], *, tolerance: float, parallel: ParallelConfig
) -> str:
    """Whether the layout is at fault, and which axis of it."""

    def place_of(ours: LayerOutputs) -> str | None:
        difference = first_difference(ours, model, token_ids, tolerance)
        return f"{difference.place}{difference.whose}" if difference else None

    try:
        alone = place_in_one_process(folder, token_ids)
    except subprocess.CalledProcessError as error:
        said = f"; a trainer of one process could not be asked (it ended with {error.returncode})"
    else:
        if alone:
            return f"; a trainer of one process differs at {alone} too"
        said = "; a trainer of one process does not: the layout is at fault"
    return f"{said}; {axis_at_fault(trainer, parallel, folder / 'hf', token_ids, place_of)}"


def load_model(hf_dir: Path) -> tuple[PreTrainedModel, float]:
    """The export in float32, and how far its outputs may lie from those of a trainer in the export's number format."""
    logging.disable_progress_bar()
    model = load_transformers(hf_dir, dtype="auto")
    tolerance = _TOLERANCE.get(model.dtype, _TOLERANCE[torch.bfloat16])
    return model.float(), tolerance


@dataclass(frozen=True, slots=True)
class Difference:
    """The first place where the trainer's outputs are not transformers'.

    >>> Difference("layer 1", 0.5, (2, 3)).whose
    ' in the data parallel replica of processes 2, 3 alone'
    """

    place: str
    size: float
    """Share of the largest value."""
    processes: tuple[int, ...] = ()
    """Those of the data parallel replica that differs where the first one does not."""

    @property
    def whose(self) -> str:
        """For a message."""
        if not self.processes:
            return ""
        noun = "process" if len(self.processes) == 1 else "processes"
        return f" in the data parallel replica of {noun} {', '.join(map(str, self.processes))} alone"


def first_difference(ours: LayerOutputs, model: PreTrainedModel, token_ids: Sequence[int], tolerance: float) -> Difference | None:
    """Where outputs differ first by more than `tolerance` of the largest value, in any data parallel replica."""
    for place, theirs_T_H in transformers_outputs(model, token_ids).items():
        difference = float((ours.outputs[place] - theirs_T_H).abs().max() / theirs_T_H.abs().max())
        if not difference <= tolerance:
            return Difference(place, difference)
        for replica in ours.replicas:
            if not replica.differences[place] <= tolerance:
                return Difference(place, replica.differences[place], replica.processes)
    return None


def transformers_outputs(model: PreTrainedModel, token_ids: Sequence[int]) -> dict[str, torch.Tensor]:
    """Outputs float32 [T, H] under the names of `PolicyTrainer.layer_outputs`, in the order of the model."""
    base: Any = model.base_model
    embedding: Any = model.get_input_embeddings()
    norm = next(module for name, module in base.named_children() if name in ("norm", "norm_f"))
    places = [("embedding", embedding), *((f"layer {i}", layer) for i, layer in enumerate(base.layers)), ("final norm", norm)]
    seen: dict[str, torch.Tensor] = {}

    def keep(place: str) -> Callable[..., None]:
        def hook(_module: object, _arguments: object, output: Any) -> None:
            seen[place] = (output[0] if isinstance(output, tuple) else output)[0].float()

        return hook

    handles = [module.register_forward_hook(keep(place)) for place, module in places]
    with torch.no_grad():
        model(torch.tensor([list(token_ids)]))
    for handle in handles:
        handle.remove()
    return {place: seen[place] for place, _ in places}


def _engine_finding(model: PreTrainedModel, samples: Sequence[TrainSample], temperature: float, limits: Limits) -> Finding:
    """The trainer is right; perhaps the engine computes another, known model."""
    for name, forget in _FORGOTTEN.items():
        owners: list[Any] = [module for module in model.modules() if name in vars(module)]
        if not owners:
            continue
        before = getattr(owners[0], name)
        with _forgotten(owners, name, forget):
            scores = [ActionScores(torch.tensor(s.behavior_logprobs_T), _logprobs(model, s, temperature)) for s in samples]
        if limits.hold(scores):
            what = f"wrong expert scale: its log-probs are those of the model with {name} {forget(before)} in place of {before}"
            return Finding(ENGINE, what, "look at how the engine reads that setting of config.json")
    what = "the trainer equals transformers in every layer on the exported weights, so the engine computes something else"
    return Finding(ENGINE, what, "compare the engine's number format, version and kernels; a packed copy of a weight may be stale")


@contextmanager
def _forgotten(owners: Sequence[Any], name: str, forget: Callable[[Any], Any]) -> Iterator[None]:
    values = [getattr(owner, name) for owner in owners]
    for owner, value in zip(owners, values, strict=True):
        setattr(owner, name, forget(value))
    try:
        yield
    finally:
        for owner, value in zip(owners, values, strict=True):
            setattr(owner, name, value)


def _logprobs(model: PreTrainedModel, sample: TrainSample, temperature: float) -> torch.Tensor:
    """float32 [completion tokens]."""
    ids = torch.tensor([[*sample.prompt_token_ids, *sample.completion_token_ids]])
    with torch.no_grad():
        logprobs_T_V = (model(ids).logits[0].float() / temperature).log_softmax(-1)
    first = len(sample.prompt_token_ids)
    return logprobs_T_V[first - 1 : -1].gather(1, ids[0, first:, None])[:, 0]
