"""An interrupted run ends with the same bytes as an undisturbed one, and a checkpoint that cannot be trusted is refused."""

from __future__ import annotations

import json
import os
import pickle
import resource
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from fakes import forks
from fakes.trainer_batches import joined, micro_batches, policy_loss, save_model

from pivotrl.config.schema import MoeConfig, OptimizerConfig, ParallelConfig
from pivotrl.errors import UserError
from pivotrl.megatron import checkpoint
from pivotrl.megatron.trainer import Trainer
from pivotrl.megatron.upstream import filesystem_async

pytestmark = pytest.mark.usefixtures("one_thread")

_HERE = Path(__file__).resolve().parent
_EXTRA = {"data_position": 12, "ledger": ["a", "b"]}


def start_trainer(hf_dir: Path, *, async_save: bool = False) -> Trainer:
    """The trainer of every run in this file."""
    optimizer = OptimizerConfig(lr=3e-3, warmup_steps=2, decay="cosine", weight_decay=0.1)
    parallel = ParallelConfig(async_save=async_save)
    return Trainer.from_hf(hf_dir, optimizer=optimizer, parallel=parallel, moe=MoeConfig(), num_steps=6, seed=0, with_reference=True)


def run_steps(trainer: Trainer, *, last: int) -> list[float]:
    """Steps up to `last`, each on its own data; step 3 has none."""
    losses = []
    while trainer.steps_done < last:
        rows = micro_batches(rows=4, tokens=20, action_tokens=5, seed=trainer.steps_done)
        batches = [] if trainer.steps_done == 3 else [joined(rows[:2]), joined(rows[2:])]
        losses.append(trainer.step(batches, policy_loss, temperature=1.0).loss)
    return losses


@pytest.fixture(scope="module")
def hf_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("hf"), "qwen3", tie_word_embeddings=True)


@pytest.mark.slow
def test_three_steps_and_three_in_a_fresh_process_equal_six(tmp_path: Path, hf_dir: Path) -> None:
    undisturbed = start_trainer(hf_dir)
    losses = run_steps(undisturbed, last=6)
    undisturbed.save_hf(tmp_path / "undisturbed")

    interrupted = start_trainer(hf_dir)
    run_steps(interrupted, last=3)
    interrupted.save_checkpoint(tmp_path / "checkpoints", _EXTRA)
    words = [hf_dir, tmp_path / "checkpoints", tmp_path / "resumed"]
    worker = forks.start(words, program="trainer_resume_worker:main", path=[_HERE])
    assert worker.wait() == 0, worker.printed()

    resumed = json.loads((tmp_path / "resumed" / "answer.json").read_text())
    assert resumed == {"extra": _EXTRA, "losses": losses[3:], "steps_done": 6}
    files = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("undisturbed", "resumed")]
    assert files[0] == files[1]


def _resume(hf_dir: Path, checkpoints_dir: Path) -> Trainer:
    trainer = start_trainer(hf_dir)
    trainer.load_checkpoint(checkpoints_dir)
    return trainer


def _weights(trainer: Trainer) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in trainer.named_tensors()}


def test_a_checkpoint_restores_every_bit_and_leaves_the_reference(tmp_path: Path, hf_dir: Path) -> None:
    trainer = start_trainer(hf_dir)
    rows = micro_batches(rows=2, tokens=20, action_tokens=5)
    initial = trainer.token_logprobs(rows, temperature=1.0)
    run_steps(trainer, last=2)
    trainer.save_checkpoint(tmp_path, _EXTRA)
    resumed = _resume(hf_dir, tmp_path)
    assert all(torch.equal(tensor, _weights(resumed)[name]) for name, tensor in _weights(trainer).items())
    reference = resumed.token_logprobs(rows, temperature=1.0, reference=True)
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(reference, initial, strict=True))
    assert not torch.equal(resumed.token_logprobs(rows, temperature=1.0)[0], initial[0])


def test_upstreams_shared_step_counter_would_change_the_resumed_run(tmp_path: Path, hf_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The repair matters: with it resumed weights are equal, without it they are not."""
    trainer = start_trainer(hf_dir)
    run_steps(trainer, last=2)
    trainer.save_checkpoint(tmp_path, {})
    run_steps(trainer, last=3)
    repaired = _resume(hf_dir, tmp_path)
    run_steps(repaired, last=3)
    assert all(torch.equal(tensor, _weights(repaired)[name]) for name, tensor in _weights(trainer).items())
    monkeypatch.setattr(checkpoint, "separate_step_counters", lambda _optimizer: None)
    shared = _resume(hf_dir, tmp_path)
    run_steps(shared, last=3)
    assert any(not torch.equal(tensor, _weights(shared)[name]) for name, tensor in _weights(trainer).items())


def test_a_checkpoint_before_the_first_step_resumes_like_a_start(tmp_path: Path, hf_dir: Path) -> None:
    trainer = start_trainer(hf_dir)
    trainer.save_checkpoint(tmp_path, {})
    resumed = _resume(hf_dir, tmp_path)
    assert resumed.steps_done == 0
    assert run_steps(resumed, last=2) == run_steps(start_trainer(hf_dir), last=2)


def test_the_newest_two_are_kept_and_unfinished_ones_ignored(tmp_path: Path, hf_dir: Path) -> None:
    trainer = start_trainer(hf_dir)
    for last in (1, 2, 3):
        run_steps(trainer, last=last)
        trainer.save_checkpoint(tmp_path, {"step": last})
    assert [path.name for path in checkpoint.completed_checkpoints(tmp_path)] == ["step_00000002", "step_00000003"]
    (tmp_path / "step_00000003" / "_SUCCESS").unlink()
    assert start_trainer(hf_dir).load_checkpoint(tmp_path) == {"step": 2}


def test_checkpoints_that_cannot_be_trusted_are_refused(tmp_path: Path, hf_dir: Path) -> None:
    with pytest.raises(UserError, match="no complete checkpoint"):
        _resume(hf_dir, tmp_path)
    trainer = start_trainer(hf_dir)
    run_steps(trainer, last=1)
    trainer.save_checkpoint(tmp_path, {})
    other = save_model(tmp_path / "other", "qwen3", tie_word_embeddings=True, seed=5)
    with pytest.raises(UserError, match="started from other weights"):
        _resume(other, tmp_path)
    (data,) = (tmp_path / "step_00000001" / "state").glob("*.distcp")
    data.write_bytes(data.read_bytes()[:-100])
    with pytest.raises(UserError, match="cannot be read"):
        _resume(hf_dir, tmp_path)


@pytest.mark.parametrize("async_save", [False, True])
def test_a_full_disk_leaves_the_checkpoint_before(tmp_path: Path, hf_dir: Path, async_save: bool) -> None:
    trainer = start_trainer(hf_dir, async_save=async_save)

    def save(step: int) -> None:
        run_steps(trainer, last=step)
        trainer.save_checkpoint(tmp_path, {"step": step})
        trainer.finish_saving()

    save(1)
    run_steps(trainer, last=2)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))
    try:
        with pytest.raises(UserError, match="step_00000002 cannot be written"):
            save(2)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert [path.name for path in tmp_path.iterdir()] == ["step_00000001"]
    assert start_trainer(hf_dir).load_checkpoint(tmp_path) == {"step": 1}


def _tensors(state_dir: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in state_dir.iterdir() if file.suffix == ".distcp"}


def test_a_background_save_holds_the_state_of_its_step(tmp_path: Path, hf_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The writer is held back while training goes on: until it has written, the checkpoint before is the newest, and then it has its step's bytes."""
    waiting = start_trainer(hf_dir)
    for last in (1, 2):
        run_steps(waiting, last=last)
        waiting.save_checkpoint(tmp_path / "waited", {"step": last})

    may_write, written_by_upstream = threading.Event(), filesystem_async.FileSystemWriterAsync.write_preloaded_data

    def held_back(*arguments: Any, **named: Any) -> Any:
        may_write.wait()
        return written_by_upstream(*arguments, **named)

    trainer, path = start_trainer(hf_dir, async_save=True), tmp_path / "background"
    run_steps(trainer, last=1)
    trainer.save_checkpoint(path, {"step": 1})
    trainer.finish_saving()
    monkeypatch.setattr(filesystem_async.FileSystemWriterAsync, "write_preloaded_data", held_back)
    run_steps(trainer, last=2)
    trainer.save_checkpoint(path, {"step": 2})
    run_steps(trainer, last=4)
    assert [found.name for found in checkpoint.completed_checkpoints(path)] == ["step_00000001"]
    assert start_trainer(hf_dir).load_checkpoint(path) == {"step": 1}, "a run killed now resumes from the checkpoint before"
    may_write.set()
    trainer.save_checkpoint(path, {"step": 4})
    assert [found.name for found in checkpoint.completed_checkpoints(path)][-1] == "step_00000002", "a save completes the one before"
    trainer.finish_saving()
    assert [found.name for found in checkpoint.completed_checkpoints(path)] == ["step_00000002", "step_00000004"]
    assert _tensors(path / "step_00000002" / "state") == _tensors(tmp_path / "waited" / "step_00000002" / "state")


def test_a_step_completes_a_background_save_that_is_written(tmp_path: Path, hf_dir: Path) -> None:
    trainer = start_trainer(hf_dir, async_save=True)
    trainer.save_checkpoint(tmp_path, {})
    assert trainer._saving is not None
    thread = trainer._saving._write._thread
    assert thread is not None
    thread.join()
    run_steps(trainer, last=1)
    assert [path.name for path in checkpoint.completed_checkpoints(tmp_path)] == ["step_00000000"]


class _Payload:
    """Pickled, it is a call of os.mkdir."""

    def __init__(self, trace: Path) -> None:
        self._trace = trace

    def __reduce__(self) -> tuple[object, ...]:
        return os.mkdir, (str(self._trace),)


def test_a_foreign_checkpoint_is_refused_before_it_can_run(tmp_path: Path, hf_dir: Path) -> None:
    trainer, trace = start_trainer(hf_dir), tmp_path / "trace"
    trainer.save_checkpoint(tmp_path, {})
    (index,) = tmp_path.glob("step_*/state/.metadata")
    index.write_bytes(pickle.dumps(_Payload(trace)))
    record = index.parents[1] / "record.json"
    content = json.loads(record.read_text())
    record.write_text(json.dumps({**content, "file_bytes": {**content["file_bytes"], ".metadata": index.stat().st_size}}))
    with pytest.raises(UserError, match="mkdir, which has no place"):
        _resume(hf_dir, tmp_path)
    assert not trace.exists()
