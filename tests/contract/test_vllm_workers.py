"""vLLM of two worker processes: weights reach both by broadcast or by file, and a bit that flips on the way is refused by name.

On a CPU, over gloo, where GPUs have NCCL. What vLLM's workers do is also run by threads of this process without vLLM, which can be disturbed.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from fakes.neighbours import Neighbour, remote, wait_for_arrival
from fakes.tiny_llama import PAD, forward_logprobs, named_weights, save_tiny_llama, tiny_llama, tiny_mixture
from safetensors.torch import load_file

from pivotrl.config.engines import ProcessesPlacement, VllmEngineConfig
from pivotrl.rollouts.engine import EngineError, GenerationRequest
from pivotrl.rollouts.launchers import LocalLauncher
from pivotrl.rollouts.pool import EnginePool
from pivotrl.rollouts.vllm_workers import WeightReceiver, relay
from pivotrl.rollouts.wire import hang_up
from pivotrl.types import Completion, FinishReason
from pivotrl.weights import broadcast
from pivotrl.weights.broadcast import BroadcastStore
from pivotrl.weights.buckets import Bucket
from pivotrl.weights.digest import LANES, digest_like, start
from pivotrl.weights.manifest import TensorRecord, TensorSpec, WeightCensus
from pivotrl.weights.push import push
from pivotrl.weights.shared_memory import SharedMemoryStore

REQUESTS = [GenerationRequest(tuple(range(2 + n, 42 + n)), (100 * n, 100 * n + 1), 0.8, 24) for n in range(3)]
WEIGHTS = [("a", torch.arange(9.0)), ("b", torch.arange(5.0)), ("c", torch.ones(3, 2))]
CENSUS = WeightCensus({name: TensorSpec(tuple(tensor.shape), torch.float32) for name, tensor in WEIGHTS}, {})


class Worker(WeightReceiver):
    """vLLM's worker as far as new weights go: keeps what it is given."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.held: dict[str, torch.Tensor] = {}
        self.fail: Callable[[str], object] = lambda name: None
        self.reload_weights = self._keep

    def _keep(self, weights_iterator: Iterator[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in weights_iterator:
            self.fail(name)
            self.held[name] = tensor.clone()


class Shared:
    """An engine of several `Worker`s, in threads."""

    def __init__(self, num_workers: int = 2) -> None:
        self.workers = [Worker(rank) for rank in range(num_workers)]
        self.policy_version = 0
        self._digests: Mapping[str, str] = {}

    @property
    def num_receivers(self) -> int:
        return len(self.workers)

    def generate(self, requests: Sequence[GenerationRequest]) -> list[tuple[Completion, ...]]:
        one = Completion((1,), (0.0,), FinishReason.STOP, self.policy_version)
        return [tuple(one for _ in request.seeds) for request in requests]

    def weight_census(self) -> WeightCensus:
        return CENSUS

    def load_weights(self, named_tensors: object, version: int) -> None:
        raise AssertionError("the weights went through the engine's process")

    def receive_weights(self, messages: Iterator[Mapping[str, Any]], invitation: Mapping[str, Any], version: int) -> Mapping[str, float]:
        received = relay(messages, self._call, invitation, CENSUS, num_workers=len(self.workers))
        self.policy_version, self._digests = version, received.digests
        return {"read_s": received.read_s, "load_s": received.load_s}

    def weight_digests(self) -> Mapping[str, str]:
        return self._digests

    def close(self) -> None: ...

    def _call(self, method: str, args: Sequence[Any]) -> list[Any]:
        replies: list[Any] = [None] * len(self.workers)

        def answer(worker: Worker) -> None:
            replies[worker.rank] = getattr(worker, method)(*args)

        threads = [threading.Thread(target=answer, args=(worker,), daemon=True) for worker in self.workers]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return replies


@pytest.fixture
def engines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[EnginePool, list[Shared]]]:
    """Two engines of two workers and a third that waits, one tensor per bucket, digests as of a sender with a GPU."""
    monkeypatch.setattr(broadcast, "_TIMEOUT", timedelta(seconds=60))
    monkeypatch.setattr("pivotrl.weights.manifest.start", lambda tensor: start(tensor, like=LANES))
    launcher, placement = remote(tmp_path, num_replicas=2, start_deadline_s=60, bucket_bytes=8, transfer="nccl", max_retries=0)
    engines = [Shared() for _ in range(3)]
    for engine in engines[:2]:
        Neighbour(tmp_path / "engines", lambda start, engine=engine: engine)
    pool = EnginePool(launcher, BroadcastStore(), placement, {})
    yield pool, engines
    pool.close()


def assert_all_hold(engines: Sequence[Shared], weights: Sequence[tuple[str, torch.Tensor]], version: int) -> None:
    for engine in engines:
        assert engine.policy_version == version
        assert engine.weight_digests() == {name: digest_like(tensor, LANES) for name, tensor in weights}
        for worker in engine.workers:
            assert worker.held.keys() == dict(weights).keys()
            assert all(torch.equal(worker.held[name], tensor) for name, tensor in weights)


def test_every_worker_of_every_engine_takes_part(engines: tuple[EnginePool, list[Shared]]) -> None:
    pool, (first, second, _) = engines
    for version in (1, 2):
        weights = [(name, tensor + version) for name, tensor in WEIGHTS]
        push(weights, pool, version)
        assert_all_hold([first, second], weights, version)


def test_a_flipped_bit_is_refused_by_name_at_once_and_the_next_hand_over_is_sound(
    engines: tuple[EnginePool, list[Shared]], monkeypatch: pytest.MonkeyPatch
) -> None:
    pool, (first, second, _) = engines
    put = BroadcastStore.put

    def put_spoiled(store: BroadcastStore, tensors: Sequence[tuple[TensorRecord, torch.Tensor]]) -> Bucket:
        bucket = put(store, tensors)
        if bucket.records[0].name == "b":
            store._bytes[7] ^= 4
        return bucket

    with monkeypatch.context() as spoiling:
        spoiling.setattr(BroadcastStore, "put", put_spoiled)
        with pytest.raises(ValueError, match="'b' arrived with other bytes than were sent"):
            push(WEIGHTS, pool, 1)
    with pytest.raises(RuntimeError, match="partial weights"):
        pool.generate(REQUESTS)
    push(WEIGHTS, pool, 2)
    assert_all_hold([first, second], WEIGHTS, 2)


def test_one_worker_that_fails_is_told_and_the_others_are_not_kept_waiting(engines: tuple[EnginePool, list[Shared]]) -> None:
    pool, (first, second, _) = engines

    def fail(name: str) -> None:
        raise RuntimeError("out of memory")

    second.workers[1].fail = fail
    push(WEIGHTS, pool, 1)
    assert pool.take_cost() == {"rollout/engine_losses/sum": 1.0}
    assert_all_hold([first], WEIGHTS, 1)
    assert all(torch.equal(second.workers[0].held[name], tensor) for name, tensor in WEIGHTS)


def test_an_engine_that_is_lost_lets_the_others_go_on_and_another_takes_its_place_in_the_next_hand_over(
    engines: tuple[EnginePool, list[Shared]], tmp_path: Path
) -> None:
    pool, (first, second, third) = engines
    push(WEIGHTS, pool, 1)
    lost = pool._replicas[0]
    hang_up(lost.arrival.connection)
    with pytest.raises(EngineError):
        pool.generate(REQUESTS)
    weights = [(name, tensor * 3) for name, tensor in WEIGHTS]
    push(weights, pool, 2)
    (living,) = [engine for engine in (first, second) if engine.policy_version == 2]
    assert_all_hold([living], weights, 2)
    Neighbour(tmp_path / "engines", lambda start: third)
    wait_for_arrival(pool._launcher)  # type: ignore[arg-type]
    push(WEIGHTS, pool, 3)
    assert_all_hold([living, third], WEIGHTS, 3)


def test_a_sender_that_gives_up_leaves_no_worker_behind(engines: tuple[EnginePool, list[Shared]]) -> None:
    pool, (first, second, _) = engines

    def broken() -> Iterator[tuple[str, torch.Tensor]]:
        yield from WEIGHTS[:2]
        raise KeyError("c")

    with pytest.raises(KeyError):
        push(broken(), pool, 1)
    push(WEIGHTS, pool, 2)
    assert_all_hold([first, second], WEIGHTS, 2)


def mixture(seed: int) -> Any:
    """Each worker's half of an expert is 32 wide: narrower ones vLLM pads on a CPU, and refuses to reload."""
    return tiny_mixture(seed=seed, expert_width=64)


def mixture_weights(directory: Path, seed: int) -> list[tuple[str, torch.Tensor]]:
    mixture(seed).save_pretrained(directory)
    return list(load_file(directory / "model.safetensors").items())


def largest_error(results: Sequence[Sequence[Completion]], model: Any) -> float:
    """Of log-probs, against the plain forward pass."""
    errors = [0.0]
    for request, samples in zip(REQUESTS, results, strict=True):
        for sample in samples:
            expected = forward_logprobs(model, request.prompt_token_ids, sample.token_ids, temperature=request.temperature)
            errors.append((torch.tensor(sample.logprobs) - expected).abs().max().item())
    return max(errors)


def start_message(checkpoint: Path) -> dict[str, Any]:
    config = VllmEngineConfig(type="vllm", kv_cache_bytes=32 << 20, max_num_seqs=8, tensor_parallel_size=2)
    return {"engine": config.model_dump(mode="json"), "checkpoint": str(checkpoint), "stop_token_ids": [], "pad_token_id": PAD, "num_threads": 1}


@pytest.mark.slow
def test_vllm_with_two_workers_samples_from_broadcast_weights_and_refuses_a_flipped_bit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A mixture: its experts are divided over the workers, as those of large models are."""
    monkeypatch.setattr("pivotrl.weights.manifest.start", lambda tensor: start(tensor, like=LANES))
    placement = ProcessesPlacement(type="processes", transfer="nccl", devices=("",), bucket_bytes=20_000)
    mixture(0).save_pretrained(tmp_path / "start")
    updates = {seed: mixture_weights(tmp_path / str(seed), seed) for seed in (1, 2)}
    store = BroadcastStore()
    pool = EnginePool(LocalLauncher(placement, tmp_path / "engines", num_threads=1), store, placement, start_message(tmp_path / "start"))
    assert largest_error(pool.generate(REQUESTS), mixture(0)) < 1e-4
    for seed, weights in updates.items():
        push(weights, pool, seed)
        assert largest_error(pool.generate(REQUESTS), mixture(seed)) < 1e-4
    put = store.put

    def put_spoiled(tensors: Sequence[tuple[TensorRecord, torch.Tensor]]) -> Bucket:
        bucket = put(tensors)
        if any(record.name == "model.layers.1.mlp.experts.3.down_proj.weight" for record in bucket.records):
            place = [record.name for record in bucket.records].index("model.layers.1.mlp.experts.3.down_proj.weight")
            store._bytes[bucket.offsets[place] + 5] ^= 1
        return bucket

    monkeypatch.setattr(store, "put", put_spoiled)
    with pytest.raises(ValueError, match=r"'model.layers.1.mlp.experts.3.down_proj.weight' arrived with other bytes than were sent"):
        push(updates[1], pool, 3)
    pool.close()


@pytest.mark.slow
def test_vllm_with_two_workers_samples_from_weights_of_shared_memory(tmp_path: Path) -> None:
    """Through files, the way of the other transfers; the head is tied, so each worker's packed copy must be the new one."""
    placement = ProcessesPlacement(type="processes", bucket_bytes=20_000)
    launcher = LocalLauncher(placement, tmp_path / "engines", num_threads=1)
    pool = EnginePool(launcher, SharedMemoryStore(), placement, start_message(save_tiny_llama(tmp_path / "start")))
    assert largest_error(pool.generate(REQUESTS), tiny_llama()) < 1e-4
    for seed in (1, 2):
        push(named_weights(tiny_llama(seed=seed)), pool, seed)
        assert largest_error(pool.generate(REQUESTS), tiny_llama(seed=seed)) < 1e-4
    pool.close()
