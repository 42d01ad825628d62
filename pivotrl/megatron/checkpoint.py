"""Training checkpoints: model and optimizer through megatron-core's dist_checkpointing, everything else as JSON beside them.

A run's checkpoint directory holds ``step_00000012`` and the like, each complete or absent, the newest two kept. The optimizer is
stored in upstream's fully reshardable form, so that another parallel layout can load it. Loading restores the state bit for bit, which
takes three repairs of what upstream (0.19.2) does with torch's AdamW; each is named where it is made.
"""

from __future__ import annotations

import queue
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from pivotrl.errors import UserError
from pivotrl.megatron.directories import atomic_directory, is_complete
from pivotrl.megatron.model import LanguageModel
from pivotrl.megatron.upstream import (
    PLATFORM,
    CheckpointingException,
    MegatronOptimizer,
    dist_checkpointing,
    filesystem_async,
    parallel_state,
)
from pivotrl.rundir import read_json, write_json

KEPT = 2
_STEP_PREFIX = "step_"
_STATE = "state"
_RECORD = "record.json"
_OPTIMIZER_FORMAT = {
    "distrib_optim_sharding_type": "fully_reshardable",
    "chained_optim_avoid_prefix": True,
    # How shards are gathered for saving: through gloo, or through the device's own backend. The stored form is the same.
    "distrib_optim_fully_reshardable_mem_efficient": not PLATFORM.is_gpu,
}


@dataclass(frozen=True, slots=True)
class CheckpointRecord:
    """What a checkpoint holds beside tensors; JSON-ready."""

    steps_done: int
    """Optimizer steps taken, skipped ones included."""
    initial_weights_id: str
    """Content hash of the Hugging Face checkpoint the run started from: the reference policy is loaded from there, not from here."""
    extra: Mapping[str, Any]
    """The caller's own position (data, metrics, ledger)."""


def completed_checkpoints(root: Path) -> list[Path]:
    """Complete checkpoints below `root`, oldest first; empty where there is none or no such directory."""
    return sorted(path for path in root.glob(f"{_STEP_PREFIX}*") if is_complete(path))


def save(root: Path, record: CheckpointRecord, *, model: Sequence[LanguageModel], optimizer: MegatronOptimizer) -> Path:
    """Writes the checkpoint of step `record.steps_done`, then removes all but the newest two.

    Returns:
        The new checkpoint's directory.
    """
    path = root / f"{_STEP_PREFIX}{record.steps_done:08d}"
    fill_empty_optimizer_state(optimizer)
    with atomic_directory(path) as temporary:
        (temporary / _STATE).mkdir()
        state = _sharded_state(model, optimizer, is_loading=False)
        # Upstream starts a process to carry the writer's results, which matters only for a writer in another process. Here the writer is a
        # thread, and a process would outlive a killed run.
        filesystem_async._results_queue = queue.Queue()
        dist_checkpointing.save(state, str(temporary / _STATE), content_metadata=_OPTIMIZER_FORMAT, verify_integrity=True)
        write_json(
            temporary / _RECORD,
            {"steps_done": record.steps_done, "initial_weights_id": record.initial_weights_id, "extra": record.extra},
        )
    for outdated in completed_checkpoints(root)[:-KEPT]:
        shutil.rmtree(outdated)
    return path


def load(root: Path, *, model: Sequence[LanguageModel], optimizer: MegatronOptimizer, initial_weights_id: str) -> CheckpointRecord:
    """Restores model and optimizer from the newest complete checkpoint below `root`.

    Args:
        initial_weights_id: content hash of the checkpoint this trainer was built from.

    Raises:
        UserError: where there is no complete checkpoint, its files changed since they were written, or it belongs to a run that started
            from other weights.
    """
    checkpoints = completed_checkpoints(root)
    if not checkpoints:
        raise UserError(f"{root} holds no complete checkpoint", rule="resuming needs one", fix="start the stage without resuming")
    path = checkpoints[-1]
    record = CheckpointRecord(**read_json(path / _RECORD))
    if record.initial_weights_id != initial_weights_id:
        raise UserError(
            f"{path} belongs to a run that started from other weights",
            rule="the reference policy and the checkpoint must come from the same initial checkpoint",
            fix="give the initial checkpoint the run was started with, or start anew in another run directory",
        )
    fill_empty_optimizer_state(optimizer)
    sharded_state = _sharded_state(model, optimizer, is_loading=True)
    try:
        state: Any = dist_checkpointing.load(sharded_state, str(path / _STATE), verify_integrity=True)
    except CheckpointingException as error:
        raise UserError(
            f"{path} cannot be read: {error}", rule="a checkpoint is read whole", fix="remove it to resume from the one before"
        ) from error
    for index, chunk in enumerate(model):
        chunk.load_state_dict(state[f"model{index}"])
    optimizer.load_state_dict(state["optimizer"])
    separate_step_counters(optimizer)
    return record


def fill_empty_optimizer_state(optimizer: MegatronOptimizer) -> None:
    """Gives torch's AdamW the state it only creates in its first step: zero moments, zero steps.

    Upstream can neither save nor load an optimizer that has not stepped (it asserts that all parameters agree on one step), and its own
    remedy for loading takes a real step on zero gradients, which decays the weights.
    """
    for adam in _torch_adams(optimizer):
        for group in adam.param_groups:
            for parameter in group["params"]:
                if not adam.state[parameter]:
                    moments = {name: torch.zeros_like(parameter, dtype=torch.float32) for name in ("exp_avg", "exp_avg_sq")}
                    adam.state[parameter] = {"step": torch.tensor(0.0), **moments}


def separate_step_counters(optimizer: MegatronOptimizer) -> None:
    """Gives every parameter its own step counter after a load.

    Upstream's load hands one tensor to all parameters of torch's AdamW; each increments it, so that the bias correction of the first
    resumed step is computed for a step count as high as the number of parameters, silently.
    """
    for adam in _torch_adams(optimizer):
        for state in adam.state.values():
            state["step"] = state["step"].clone()


def _torch_adams(optimizer: MegatronOptimizer) -> Iterator[torch.optim.Optimizer]:
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        if isinstance(part.optimizer, torch.optim.Adam | torch.optim.AdamW):
            yield part.optimizer


def _sharded_state(model: Sequence[LanguageModel], optimizer: MegatronOptimizer, *, is_loading: bool) -> dict[str, Any]:
    metadata = {**_OPTIMIZER_FORMAT, "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True)}
    # The names are this process's own: what identifies a tensor in the files is its place in the whole model.
    chunks = {f"model{index}": chunk.sharded_state_dict(metadata=metadata) for index, chunk in enumerate(model)}
    return {**chunks, "optimizer": optimizer.sharded_state_dict(chunks, is_loading=is_loading, metadata=metadata)}
