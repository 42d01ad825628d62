"""What a pool makes of engines that fail: which errors cost a rebuild, which stop the run, and who does the work meanwhile."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from fakes.neighbours import REQUESTS, Handing, Neighbour, failing_start, remote, talking, wait_for_arrival

from pivotrl.config.engines import ProcessesPlacement
from pivotrl.errors import UserError
from pivotrl.rollouts import pool as pool_module
from pivotrl.rollouts.engine import EngineError
from pivotrl.rollouts.launchers import LocalLauncher
from pivotrl.rollouts.pool import EnginePool
from pivotrl.rollouts.scripted import ScriptedEngine
from pivotrl.rollouts.wire import PeerLost, hang_up
from pivotrl.weights import broadcast
from pivotrl.weights.broadcast import BroadcastStore
from pivotrl.weights.filesystem import FilesystemStore
from pivotrl.weights.push import push
from pivotrl.weights.shared_memory import SharedMemoryStore


def test_an_engine_that_always_fails_is_an_engine_error_and_never_a_completion(tmp_path: Path) -> None:
    launcher, placement = remote(tmp_path, start_deadline_s=20, max_retries=2)

    def broken() -> None:
        raise EngineError("out of memory")

    for _ in range(3):
        Neighbour(tmp_path / "engines", talking(7, broken))
    pool = EnginePool(launcher, FilesystemStore(tmp_path / "weights"), placement, {})
    with pytest.raises(EngineError, match=r"failed 3 times on 6 prompts; the last time: out of memory"):
        pool.generate(REQUESTS)
    assert pool.take_cost() == {"rollout/engine_losses/sum": 3, "rollout/engine_retries/sum": 2}
    pool.close()


def test_a_deadline_ends_a_replica_that_hangs(tmp_path: Path) -> None:
    launcher, placement = remote(tmp_path, start_deadline_s=20, deadline_s=0.2, max_retries=1)
    over = threading.Event()
    Neighbour(tmp_path / "engines", talking(7, lambda: over.wait(20)))
    pool = EnginePool(launcher, FilesystemStore(tmp_path / "weights"), placement, {})
    Neighbour(tmp_path / "engines", talking(8))
    assert {sample.token_ids[2] for samples in pool.generate(REQUESTS) for sample in samples} == {8}
    over.set()
    pool.close()


OUT_OF_MEMORY = [
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
    RuntimeError("Worker failed with error 'CUDA out of memory'"),
    EngineError("vLLM could not be started: Free memory on device cuda:0 (3.1/79.1 GiB) is less than desired"),
]


@pytest.mark.parametrize("error", OUT_OF_MEMORY, ids=lambda error: type(error).__name__)
def test_memory_that_is_short_for_a_start_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    """What a killed predecessor still holds: the first start fails, the next one finds room."""
    monkeypatch.setattr(pool_module, "_PAUSE_S", 0.0)
    launcher, placement = remote(tmp_path, start_deadline_s=20, max_retries=1)
    Neighbour(tmp_path / "engines", failing_start(error))
    later = threading.Timer(0.5, Neighbour, (tmp_path / "engines", talking(8)))
    later.start()
    pool = EnginePool(launcher, FilesystemStore(tmp_path / "weights"), placement, {})
    assert {sample.token_ids[2] for samples in pool.generate(REQUESTS) for sample in samples} == {8}
    assert pool.take_cost() == {"rollout/engine_losses/sum": 1}
    pool.close()
    later.join()


def test_memory_that_is_short_for_new_weights_costs_a_rebuild(tmp_path: Path) -> None:
    launcher, placement = remote(tmp_path, start_deadline_s=20, max_retries=0)

    def full(start: Mapping[str, Any]) -> ScriptedEngine:
        engine = talking(7)(start)

        def load(named_tensors: Iterable[tuple[str, torch.Tensor]], version: int) -> None:
            raise torch.OutOfMemoryError("CUDA out of memory")

        engine.load_weights = load  # type: ignore[method-assign]
        return engine

    Neighbour(tmp_path / "engines", full)
    pool = EnginePool(launcher, FilesystemStore(tmp_path / "weights"), placement, {})
    Neighbour(tmp_path / "engines", talking(8))
    wait_for_arrival(launcher)
    push([("w", torch.ones(3))], pool, 1)
    assert {(s.token_ids[2], s.policy_version) for samples in pool.generate(REQUESTS) for s in samples} == {(8, 1)}
    pool.close()


def test_what_the_first_engine_refuses_is_the_users_and_what_a_rebuilt_one_refuses_is_not(tmp_path: Path, capfd) -> None:
    refusal = UserError("vLLM refuses it", rule="a rule", fix="a fix")
    launcher, placement = remote(tmp_path / "first", start_deadline_s=20)
    Neighbour(tmp_path / "first" / "engines", failing_start(refusal))
    with pytest.raises(UserError, match="vLLM refuses it"):
        EnginePool(launcher, FilesystemStore(tmp_path / "weights"), placement, {})
    launcher, placement = remote(tmp_path / "later", num_replicas=2, start_deadline_s=20, max_retries=0)
    for name in (7, 8):
        Neighbour(tmp_path / "later" / "engines", talking(name))
    pool = EnginePool(launcher, FilesystemStore(tmp_path / "weights"), placement, {})
    hang_up(pool._replicas[0].arrival.connection)
    with pytest.raises(EngineError):
        pool.generate(REQUESTS)
    Neighbour(tmp_path / "later" / "engines", failing_start(refusal))
    wait_for_arrival(launcher)
    assert len(pool.generate(REQUESTS)) == len(REQUESTS)
    assert "vLLM refuses it" in capfd.readouterr().err
    pool.close()


def test_a_place_that_cannot_start_is_left_alone_for_a_while_and_its_share_is_done_by_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its time comes again: once, not as often as at first."""
    monkeypatch.setattr(pool_module, "_PAUSE_S", 0.0)
    clock = [100.0]
    monkeypatch.setattr(pool_module.time, "monotonic", lambda: clock[0])
    launcher = Handing({0: talking(7), 1: talking(8)})
    placement = ProcessesPlacement(type="processes", num_replicas=2, max_retries=2)
    pool = EnginePool(launcher, SharedMemoryStore(), placement, {})
    launcher.builds[1] = failing_start(EngineError("the GPU is gone"))
    hang_up(pool._replicas[1].arrival.connection)
    for calls in (3, 0, 0):
        launcher.summoned.clear()
        assert {sample.token_ids[2] for samples in pool.generate(REQUESTS) for sample in samples} == {7}
        assert launcher.summoned == [1] * calls
    clock[0] += 61
    launcher.summoned.clear()
    pool.generate(REQUESTS)
    assert launcher.summoned == [1]
    clock[0] += 61
    launcher.builds[1] = talking(8)
    assert {sample.token_ids[2] for samples in pool.generate(REQUESTS) for sample in samples} == {7, 8}
    pool.close()


def test_a_remote_engine_that_cannot_start_and_knocks_again_waits_as_well(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_module, "_PAUSE_S", 0.0)
    launcher, placement = remote(tmp_path, num_replicas=2, start_deadline_s=20, max_retries=1)
    for name in (7, 8):
        Neighbour(tmp_path / "engines", talking(name))
    pool = EnginePool(launcher, FilesystemStore(tmp_path / "weights"), placement, {})
    hang_up(pool._replicas[0].arrival.connection)
    starts: list[object] = []

    def broken(start: Mapping[str, Any]) -> Any:
        starts.append(start)
        raise EngineError("the GPU is gone")

    for _ in range(3):
        Neighbour(tmp_path / "engines", broken)
        wait_for_arrival(launcher)
        assert len(pool.generate(REQUESTS)) == len(REQUESTS)
    assert len(starts) == 1
    pool.close()


def test_a_lost_engine_takes_its_workers_along(tmp_path: Path) -> None:
    """Tensor parallelism has processes of its own, which would hold their GPUs' memory."""
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\nsleep 600 & echo $! > " + str(tmp_path / "worker") + "\nwait\n")
    python.chmod(0o755)
    launcher = LocalLauncher(ProcessesPlacement(type="processes", python=str(python)), tmp_path / "logs", num_threads=1)
    with pytest.raises(PeerLost, match="did not connect within"):
        launcher.summon(0, 2.0)
    state = Path(f"/proc/{(tmp_path / 'worker').read_text().strip()}/stat")
    assert not state.exists() or state.read_text().rpartition(")")[2].split()[0] == "Z"
    launcher.close()


def test_an_engine_that_refuses_a_broadcast_is_heard_at_once_and_the_others_stay_usable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes part to the end: without that the sender would wait for the timeout and name no tensor."""
    monkeypatch.setattr(broadcast, "_TIMEOUT", timedelta(seconds=15))
    launcher, placement = remote(tmp_path, num_replicas=2, start_deadline_s=60, bucket_bytes=1, transfer="nccl")
    refuses = [True]

    def picky(start: Mapping[str, Any]) -> ScriptedEngine:
        engine = talking(7)(start)

        def load(named_tensors: Iterable[tuple[str, torch.Tensor]], version: int) -> None:
            for name, _ in named_tensors:
                if refuses and name == "b":
                    raise ValueError("tensor 'b' does not fit")
            engine._policy_version = version

        monkeypatch.setattr(engine, "load_weights", load)
        return engine

    Neighbour(tmp_path / "engines", picky)
    Neighbour(tmp_path / "engines", talking(8))
    pool = EnginePool(launcher, BroadcastStore(), placement, {})
    weights = [(name, torch.arange(5.0)) for name in "abcde"]
    with pytest.raises(ValueError, match="tensor 'b' does not fit"):
        push(weights, pool, 1)
    refuses.clear()
    push(weights, pool, 2)
    assert {sample.policy_version for samples in pool.generate(REQUESTS) for sample in samples} == {2}
    pool.close()
