"""Training checkpoints: model and optimizer through megatron-core's dist_checkpointing, everything else as JSON beside them.

A run's checkpoint directory holds ``step_00000012`` and the like, each complete or absent, the newest two kept. Saving and loading are
collective: every process writes and reads its part, the first one makes the directory and marks it complete. The optimizer is stored in
upstream's fully reshardable form, so that another parallel layout can load it. Loading restores the state bit for bit, which takes three
repairs of what upstream (0.19.2) does with torch's AdamW; each is named where it is made. Nothing foreign is unpickled (`untrusted`).
Files are written in the background (`background_write`); the caller says whether it waits for them.
"""

from __future__ import annotations

import pickle
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from pivotrl.errors import UserError
from pivotrl.megatron.background_write import BackgroundWrite
from pivotrl.megatron.directories import KEPT, atomic_directory, is_complete, temporary_path
from pivotrl.megatron.model import LanguageModel
from pivotrl.megatron.untrusted import check_index, weights_only
from pivotrl.megatron.upstream import (
    PLATFORM,
    CheckpointingException,
    MegatronOptimizer,
    dist_checkpointing,
    parallel_state,
)
from pivotrl.rundir import read_json, write_json

_STEP_PREFIX = "step_"
_STATE = "state"
_RECORD = "record.json"
_NAMES_SHOWN = 3
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
    has_expert_optimizer: bool
    """Whether the experts' parameters had an optimizer of their own, as upstream gives them where expert_model_parallel_size > 1."""
    layout: Mapping[str, int | bool | str]
    """The processes that wrote it, by axis (`parallel.running_layout`): for people and tests, read in any layout."""
    file_bytes: Mapping[str, int]
    """Size of every file of the state, by name: what a truncated or half-copied checkpoint is told by without reading terabytes."""


def completed_checkpoints(root: Path) -> list[Path]:
    """Complete checkpoints below `root`, oldest first; empty where there is none or no such directory."""
    return sorted(path for path in root.glob(f"{_STEP_PREFIX}*") if is_complete(path))


class Saving:
    """The checkpoint of step `record.steps_done` below `root`: staged once this is built, complete after `complete`.

    Until then what lies below `root` is as it was: a run that ends in between resumes from the checkpoint before.
    """

    def __init__(self, root: Path, record: CheckpointRecord, *, model: Sequence[LanguageModel], optimizer: MegatronOptimizer) -> None:
        """Collective. Model and optimizer may change as soon as it returns.

        Raises:
            UserError: where a process cannot write.
        """
        self._root, self._record = root, record
        self._path = root / f"{_STEP_PREFIX}{record.steps_done:08d}"
        fill_empty_optimizer_state(optimizer)
        state = _sharded_state(model, optimizer, is_loading=False)
        with _explained(self._path), ExitStack() as stack:
            self._temporary = stack.enter_context(_shared_directory(self._path))
            self._write = BackgroundWrite(state, self._temporary / _STATE, content_metadata=_OPTIMIZER_FORMAT)
            self._directory = stack.pop_all()

    def is_written(self) -> bool:
        """Whether `complete` would wait for no file; collective."""
        return self._write.is_written()

    def complete(self) -> None:
        """Waits for the files, makes the checkpoint appear, then removes all but the newest two; collective, to be called once.

        Raises:
            UserError: where a process could not write, for example on a full disk; earlier checkpoints are untouched.
        """
        with _explained(self._path), self._directory:
            self._write.finish()
            if dist.get_rank() == 0:
                write_json(self._temporary / _RECORD, asdict(replace(self._record, file_bytes=_file_bytes(self._temporary / _STATE))))
        if dist.get_rank() == 0:
            for outdated in completed_checkpoints(self._root)[:-KEPT]:
                shutil.rmtree(outdated)


@contextmanager
def _explained(path: Path) -> Iterator[None]:
    try:
        yield
    except (CheckpointException, OSError) as error:
        raise UserError(
            f"{path} cannot be written: {_one_line(error)}",
            rule="a checkpoint appears whole or not at all; those before it are untouched",
            fix="make room or correct the path's permissions; the same command resumes",
        ) from error


def load(
    root: Path, *, model: Sequence[LanguageModel], optimizer: MegatronOptimizer, initial_weights_id: str, resume: Literal["full", "weights"]
) -> CheckpointRecord:
    """Restores model and optimizer from the newest complete checkpoint below `root`, in whatever layout it was written.

    Args:
        initial_weights_id: content hash of the checkpoint this trainer was built from.
        resume: `weights` leaves the optimizer as it is, its moments at 0.

    Raises:
        UserError: where there is no complete checkpoint, its files changed since they were written, hold what no checkpoint holds, or
            belong to a run that started from other weights, or the optimizer's state cannot be moved to this layout.
    """
    checkpoints = completed_checkpoints(root)
    if not checkpoints:
        raise UserError(f"{root} holds no complete checkpoint", rule="resuming needs one", fix="start the stage without resuming")
    path = checkpoints[-1]
    record = _read_record(path)
    if record.initial_weights_id != initial_weights_id:
        raise UserError(
            f"{path} belongs to a run that started from other weights",
            rule="the reference policy and the checkpoint must come from the same initial checkpoint",
            fix="give the initial checkpoint the run was started with, or start anew in another run directory",
        )
    if resume == "full" and record.has_expert_optimizer != has_expert_optimizer():
        before, here = ("> 1", "1") if record.has_expert_optimizer else ("1", "> 1")
        raise UserError(
            f"{path} was written with parallel.expert_model_parallel_size {before} and it is {here} here",
            rule="beyond 1 the experts' optimizer state is stored apart, and upstream moves it neither there nor back",
            fix="resume in the old layout, or set parallel.resume to weights: all is kept but Adam's moments, which start at 0",
        )
    fill_empty_optimizer_state(optimizer)
    state = _load_state(_sharded_state(model, optimizer if resume == "full" else None, is_loading=True), path, record)
    for index, chunk in enumerate(model):
        chunk.load_state_dict(state[f"model{index}"])
    if resume == "weights":
        optimizer.reload_model_params()
    else:
        optimizer.load_state_dict(state["optimizer"])
        separate_step_counters(optimizer)
    return record


def has_expert_optimizer() -> bool:
    """Whether upstream, in the current layout, makes an optimizer of its own for experts."""
    return parallel_state.get_expert_model_parallel_world_size() > 1


def _read_record(path: Path) -> CheckpointRecord:
    try:
        return CheckpointRecord(**{"layout": {}, **read_json(path / _RECORD)})
    except (OSError, ValueError, TypeError) as error:
        raise _unreadable(path, error) from error


def _load_state(sharded_state: dict[str, Any], path: Path, record: CheckpointRecord) -> Any:
    try:
        found = _file_bytes(path / _STATE)
        if found != record.file_bytes:
            changed = sorted(name for name in found.keys() | record.file_bytes.keys() if found.get(name) != record.file_bytes.get(name))
            raise _unreadable(path, ValueError(f"files changed since they were written: {', '.join(changed[:_NAMES_SHOWN])}"))
        check_index(path / _STATE)
        with weights_only():
            return dist_checkpointing.load(sharded_state, str(path / _STATE))
    except (CheckpointingException, CheckpointException, pickle.UnpicklingError, OSError) as error:
        raise _unreadable(path, error) from error


def _file_bytes(state_dir: Path) -> dict[str, int]:
    return {file.name: file.stat().st_size for file in sorted(state_dir.iterdir())}


def _unreadable(path: Path, error: BaseException) -> UserError:
    return UserError(f"{path} cannot be read: {_one_line(error)}", rule="a checkpoint is read whole", fix="remove it to resume from the one before")


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__


@contextmanager
def _shared_directory(path: Path) -> Iterator[Path]:
    """`atomic_directory` for a directory that all processes write into: the first makes and completes it while the others wait."""
    if dist.get_rank() == 0:
        with atomic_directory(path) as temporary:
            (temporary / _STATE).mkdir()
            dist.barrier()
            yield temporary
    else:
        dist.barrier()
        yield temporary_path(path)
    dist.barrier()


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


def _sharded_state(model: Sequence[LanguageModel], optimizer: MegatronOptimizer | None, *, is_loading: bool) -> dict[str, Any]:
    metadata = {**_OPTIMIZER_FORMAT, "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True)}
    # The names are this process's own: what identifies a tensor in the files is its place in the whole model.
    chunks = {f"model{index}": chunk.sharded_state_dict(metadata=metadata) for index, chunk in enumerate(model)}
    if optimizer is None:
        return chunks
    return {**chunks, "optimizer": optimizer.sharded_state_dict(chunks, is_loading=is_loading, metadata=metadata)}
