"""Engines in processes of their own: what a kill, a deadline and a failure cost, what weights survive, who may connect.

A tiny transformers engine behind the pool; the oracle is the same engine in this process. The engine contract itself runs over the pool in
test_engine_contract.py.
"""

from __future__ import annotations

import os
import signal
import stat
import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace
from datetime import timedelta
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client
from pathlib import Path
from typing import Any

import orjson
import pytest
import torch
from fakes.killing import kill_at_work
from fakes.neighbours import REQUESTS, Neighbour, remote, talking, wait_for_arrival
from fakes.tiny_llama import PAD, STOP, named_weights, save_tiny_llama, tiny_llama

from pivotrl.config.engines import ProcessesPlacement, RemotePlacement, TransformersEngineConfig
from pivotrl.errors import InfraLimitError, UserError
from pivotrl.rollouts.engine import EngineError, GenerationRequest
from pivotrl.rollouts.launchers import ADDRESS, KEY, LocalLauncher, RemoteLauncher
from pivotrl.rollouts.pool import EnginePool
from pivotrl.rollouts.transformers_engine import TransformersEngine
from pivotrl.rollouts.wire import PeerLost, completion_rows, completions_of, hang_up, knock, reached_at, request_rows, requests_of
from pivotrl.types import Completion, FinishReason, RoutedExperts
from pivotrl.verbs.engine import run_engine
from pivotrl.weights import broadcast
from pivotrl.weights.broadcast import BroadcastStore
from pivotrl.weights.buckets import Bucket
from pivotrl.weights.filesystem import FilesystemStore
from pivotrl.weights.manifest import TensorRecord, tensor_record
from pivotrl.weights.push import push
from pivotrl.weights.shared_memory import SharedMemoryStore

CONFIG = TransformersEngineConfig(type="transformers", batch_size=8)


def start_message(checkpoint: Path) -> dict[str, Any]:
    return {
        "engine": CONFIG.model_dump(mode="json"),
        "checkpoint": str(checkpoint),
        "stop_token_ids": [STOP],
        "pad_token_id": PAD,
        "num_threads": 1,
    }


def tokens(results: Sequence[Sequence[Completion]]) -> list[list[tuple[int, ...]]]:
    return [[sample.token_ids for sample in samples] for samples in results]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_llama(tmp_path_factory.mktemp("tiny_llama"))


@pytest.fixture(scope="module")
def oracle(checkpoint: Path) -> TransformersEngine:
    return TransformersEngine.load(checkpoint, CONFIG, stop_token_ids=(STOP,), pad_token_id=PAD)


@pytest.fixture(scope="module")
def pool(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EnginePool]:
    """Two replicas, weights through shared memory in buckets so small that one hand-over takes many."""
    placement = ProcessesPlacement(type="processes", num_replicas=2, bucket_bytes=20_000)
    launcher = LocalLauncher(placement, tmp_path_factory.mktemp("engines"), num_threads=1)
    pool = EnginePool(launcher, SharedMemoryStore(), placement, start_message(checkpoint))
    yield pool
    pool.close()


def kill(pool: EnginePool, place: int) -> int:
    pid = pool._launcher.process_id(place)  # type: ignore[attr-defined]
    os.kill(pid, signal.SIGKILL)
    return pid


def test_tokens_do_not_depend_on_replicas_and_a_kill_changes_nothing(pool: EnginePool, oracle: TransformersEngine, capfd) -> None:
    """Killed before the first weights were pushed (profile) and after (train), idle and at work; digests and log-probs are those of one engine."""
    expected = tokens(oracle.generate(REQUESTS))
    assert tokens(pool.generate(REQUESTS)) == tokens(pool.generate(REQUESTS)) == expected
    assert pool.weight_digests() == oracle.weight_digests()
    pid = kill(pool, 0)
    assert tokens(pool.generate(REQUESTS)) == expected
    assert f"(process {pid} on" in capfd.readouterr().err
    assert pool.take_cost() == {"rollout/engine_losses/sum": 1.0, "rollout/engine_retries/sum": 1.0}
    assert pool.take_cost() == {}

    weights = named_weights(tiny_llama(seed=1))
    for engine in (pool, oracle):
        assert push(weights, engine, 5).num_tensors == len(weights)
    expected = oracle.generate(REQUESTS)
    longer = [replace(request, max_new_tokens=100) for request in REQUESTS]
    killer = kill_at_work(pool._launcher.process_id(1), after_s=0.03)  # type: ignore[attr-defined]
    results = pool.generate(longer)
    killer.join()
    assert pool.take_cost() == {"rollout/engine_losses/sum": 1.0, "rollout/engine_retries/sum": 1.0}
    assert tokens(results) == tokens(oracle.generate(longer))
    kill(pool, 0)
    again = pool.generate(REQUESTS)
    assert tokens(again) == tokens(expected)
    for samples, same in zip(again, expected, strict=True):
        for sample, one in zip(samples, same, strict=True):
            assert sample.logprobs == pytest.approx(one.logprobs, abs=1e-5)
            assert sample.policy_version == 5
    assert pool.weight_digests() == oracle.weight_digests()


def test_a_replica_killed_during_a_hand_over_is_rebuilt_from_it(pool: EnginePool, oracle: TransformersEngine) -> None:
    weights = named_weights(tiny_llama(seed=2))

    def deadly() -> Iterator[tuple[str, torch.Tensor]]:
        for index, pair in enumerate(weights):
            if index == 7:
                kill(pool, 1)
            yield pair

    push(deadly(), pool, 6)
    push(weights, oracle, 6)
    assert tokens(pool.generate(REQUESTS)) == tokens(oracle.generate(REQUESTS))
    assert pool.policy_version == 6


def test_bytes_that_change_between_the_processes_stop_the_hand_over(pool: EnginePool, oracle: TransformersEngine) -> None:
    weights = named_weights(tiny_llama(seed=3))
    store = pool._store

    class Spoiled(SharedMemoryStore):
        def put(self, tensors: Sequence[tuple[TensorRecord, torch.Tensor]]) -> Bucket:
            return super().put([(record, tensor + 1 if record.name == "model.norm.weight" else tensor) for record, tensor in tensors])

    pool._store = Spoiled()
    with pytest.raises(ValueError, match=r"'model.norm.weight' arrived with other bytes than were sent"):
        push(weights, pool, 7)
    with pytest.raises(RuntimeError, match="partial weights"):
        pool.generate(REQUESTS)
    pool._store.close()
    pool._store = store
    for engine in (pool, oracle):
        push(weights, engine, 8)
    assert tokens(pool.generate(REQUESTS)) == tokens(oracle.generate(REQUESTS))


def test_an_engine_keeps_its_memory_unless_the_user_says_otherwise(pool: EnginePool) -> None:
    environment = Path(f"/proc/{pool._launcher.process_id(0)}/environ").read_bytes().split(b"\0")  # type: ignore[attr-defined]
    (tunables,) = [value for value in environment if value.startswith(b"GLIBC_TUNABLES=")]
    assert os.environ.get("GLIBC_TUNABLES", "glibc.malloc.mmap_max=0").encode() in tunables


def test_weights_are_broadcast_and_a_lost_replica_comes_back_with_the_next_hand_over(
    tmp_path: Path, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over gloo, where a GPU has NCCL: two engines in threads, small buckets; one leaves, a third one comes, and the group is made anew."""
    monkeypatch.setattr(broadcast, "_TIMEOUT", timedelta(seconds=60))
    launcher, placement = remote(tmp_path, num_replicas=2, start_deadline_s=60, bucket_bytes=20_000, transfer="nccl", max_retries=0)
    # Loaded one after the other: transformers' loading is not made for threads.
    engines = [TransformersEngine.load(checkpoint, CONFIG, stop_token_ids=(STOP,), pad_token_id=PAD) for _ in range(3)]
    unused = list(engines)
    for _ in range(2):
        Neighbour(tmp_path / "engines", lambda start: unused.pop())
    pool = EnginePool(launcher, BroadcastStore(), placement, {})
    for version in (1, 2):
        model = tiny_llama(seed=version)
        push(named_weights(model), pool, version)
        assert pool.weight_digests() == engines[1].weight_digests() == engines[2].weight_digests()
    hang_up(pool._replicas[0].arrival.connection)
    with pytest.raises(EngineError):
        pool.generate(REQUESTS)
    Neighbour(tmp_path / "engines", lambda start: unused.pop())
    wait_for_arrival(launcher)
    assert {sample.policy_version for samples in pool.generate(REQUESTS) for sample in samples} == {2}
    assert len(unused) == 1, "an engine was built although nothing could give it the weights"
    push(named_weights(tiny_llama(seed=3)), pool, 3)
    assert engines[0].policy_version == 3
    assert engines[0].weight_digests() == pool.weight_digests()
    assert len(pool._replicas) == 2
    assert {sample.policy_version for samples in pool.generate(REQUESTS) for sample in samples} == {3}
    pool.close()


def test_shared_memory_is_freed(checkpoint: Path) -> None:
    store = SharedMemoryStore()
    store.begin(1)
    tensor = torch.arange(3.0)
    bucket = store.put([(tensor_record("w", tensor), tensor)])
    assert (Path("/dev/shm") / bucket.location).exists()
    store.close()
    assert not (Path("/dev/shm") / bucket.location).exists()


def test_remote_engines_share_prompts_and_one_that_fails_is_replaced_by_one_that_lives(tmp_path: Path) -> None:
    launcher, placement = remote(tmp_path, num_replicas=2, start_deadline_s=20, max_retries=1)
    Neighbour(tmp_path / "engines", talking(7))
    Neighbour(tmp_path / "engines", talking(8))
    pool = EnginePool(launcher, FilesystemStore(tmp_path / "weights"), placement, {})
    first = pool.generate(REQUESTS)
    answered_by = {r.prompt_token_ids: {sample.token_ids[2] for sample in samples} for r, samples in zip(REQUESTS, first, strict=True)}
    assert all(len(names) == 1 for names in answered_by.values())
    assert {name for names in answered_by.values() for name in names} == {7, 8}
    again = pool.generate(list(reversed(REQUESTS)))
    assert [{s.token_ids[2] for s in samples} for samples in again] == [answered_by[r.prompt_token_ids] for r in reversed(REQUESTS)]
    push([("w", torch.ones(3))], pool, 4)
    assert {sample.policy_version for samples in pool.generate(REQUESTS) for sample in samples} == {4}
    lost = min(pool._replicas)
    hang_up(pool._replicas[lost].arrival.connection)
    (living,) = {sample.token_ids[2] for samples in pool.generate(REQUESTS) for sample in samples}
    assert living in (7, 8)
    assert list((tmp_path / "weights").iterdir())
    pool.close()
    assert not list((tmp_path / "weights").iterdir())


def test_messages_carry_every_bit_of_requests_and_completions() -> None:
    awkward = [-0.0, -5e-324, -1.7976931348623157e308, -0.1, -1 / 3]
    routes = [RoutedExperts(1, 2, 2, prompt, bytes(range(248, 256)) * 2) for prompt in (bytes(range(8)), bytes(range(8)), bytes(4))]
    first, second, third = (Completion((1, 2, 3, 4, 5), tuple(awkward), FinishReason.LENGTH, 7, one) for one in routes)
    results = [(first, second, Completion((1,), (-0.5,), FinishReason.STOP, 7), third), (Completion((), (), FinishReason.STOP, 0),)]
    back = completions_of(orjson.loads(orjson.dumps(completion_rows(results))))
    assert back == results
    assert [str(value) for value in back[0][0].logprobs] == [str(value) for value in awkward]
    requests = [GenerationRequest((1, 2), (0, 2**62 - 1), 0.0, 9), *REQUESTS]
    assert requests_of(orjson.loads(orjson.dumps(request_rows(requests)))) == requests


def test_an_engine_is_told_the_address_under_which_it_came(tmp_path: Path) -> None:
    """Not the machine's name, which another machine need not know."""
    placement = RemotePlacement(type="remote", listen="0.0.0.0:0")
    launcher = RemoteLauncher(placement, tmp_path)
    port = int((tmp_path / ADDRESS).read_text().rpartition(":")[2])
    for address in ("127.0.0.1", "127.0.0.3"):
        knock((address, port), (tmp_path / KEY).read_bytes(), name="")
        assert reached_at(launcher.summon(0, 30).connection) == address
    launcher.close()


def test_nobody_comes(tmp_path: Path) -> None:
    launcher, placement = remote(tmp_path, start_deadline_s=0.1)
    with pytest.raises(InfraLimitError, match="no engine connected within"):
        EnginePool(launcher, FilesystemStore(tmp_path / "weights"), placement, {})


def test_the_key_is_private_and_a_stranger_reaches_nothing(tmp_path: Path) -> None:
    launcher, _ = remote(tmp_path)
    key_file = tmp_path / "engines" / KEY
    assert stat.S_IMODE(key_file.stat().st_mode) == 0o600
    address = launcher._door.address
    with pytest.raises((AuthenticationError, EOFError, OSError)):
        Client(address, authkey=b"guess")
    Client(address).send_bytes(b"no key at all")
    with pytest.raises(PeerLost):
        launcher.summon(0, 0.2)
    knock(address, key_file.read_bytes(), name="").close()
    assert launcher.summon(0, 10).name == ""
    launcher.close()


def test_the_verb_serves_a_run_and_leaves_when_nobody_is_there(tmp_path: Path, checkpoint: Path, oracle: TransformersEngine) -> None:
    launcher, placement = remote(tmp_path, start_deadline_s=30)
    engine = threading.Thread(target=run_engine, args=(tmp_path, CONFIG), kwargs={"connect": None, "patience_s": 3.0}, daemon=True)
    engine.start()
    pool = EnginePool(launcher, FilesystemStore(tmp_path / "weights"), placement, start_message(checkpoint))
    push(named_weights(tiny_llama(seed=3)), pool, 1)
    push(named_weights(tiny_llama(seed=3)), oracle, 1)
    assert tokens(pool.generate(REQUESTS)) == tokens(oracle.generate(REQUESTS))
    pool.close()
    engine.join(30)
    assert not engine.is_alive()
    with pytest.raises(UserError, match=r"no trainer of .* was found within 1 s"):
        run_engine(tmp_path, CONFIG, connect=None, patience_s=1.0)
