"""vLLM behind the pool, in a process of its own, as `placement.type: processes` runs it: weights by shared memory, and a kill while it samples."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from fakes.killing import kill_at_work
from fakes.tiny_llama import PAD, forward_logprobs, named_weights, save_tiny_llama, tiny_llama

from pivotrl.config.engines import ProcessesPlacement, VllmEngineConfig
from pivotrl.rollouts.engine import GenerationRequest
from pivotrl.rollouts.launchers import LocalLauncher
from pivotrl.rollouts.pool import EnginePool
from pivotrl.weights.push import push
from pivotrl.weights.shared_memory import SharedMemoryStore

# No stop token: every sample goes on to its cap, so that there is work enough to be killed in.
REQUESTS = [GenerationRequest(tuple(range(2 + n, 42 + n)), tuple(range(100 * n, 100 * n + 8)), 0.8, 80) for n in range(4)]
_CONFIG = VllmEngineConfig(type="vllm", kv_cache_bytes=32 << 20, max_num_seqs=8)


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EnginePool]:
    folder = tmp_path_factory.mktemp("vllm_process")
    checkpoint = save_tiny_llama(folder / "hf")
    start = {"engine": _CONFIG.model_dump(mode="json"), "checkpoint": str(checkpoint), "stop_token_ids": [], "pad_token_id": PAD, "num_threads": 1}
    placement = ProcessesPlacement(type="processes", num_replicas=1, bucket_bytes=20_000)
    pool = EnginePool(LocalLauncher(placement, folder / "engines", num_threads=1), SharedMemoryStore(), placement, start)
    yield pool
    pool.close()


@pytest.mark.slow
def test_vllm_killed_while_it_samples_is_rebuilt_with_the_pushed_weights_and_gives_the_same_tokens(pool: EnginePool) -> None:
    model = tiny_llama(seed=1)
    assert push(named_weights(model), pool, 3).num_tensors == len(named_weights(model))
    undisturbed = pool.generate(REQUESTS)
    assert pool.take_cost() == {}
    launcher = pool._launcher
    assert isinstance(launcher, LocalLauncher)
    killer = kill_at_work(launcher.process_id(0), after_s=0.1)
    disturbed = pool.generate(REQUESTS)
    killer.join()
    assert pool.take_cost() == {"rollout/engine_losses/sum": 1.0, "rollout/engine_retries/sum": 1.0}
    for request, samples, expected in zip(REQUESTS, disturbed, undisturbed, strict=True):
        assert [sample.token_ids for sample in samples] == [sample.token_ids for sample in expected]
        for sample in samples[:2]:
            assert sample.policy_version == 3
            logprobs = forward_logprobs(model, request.prompt_token_ids, sample.token_ids, temperature=request.temperature)
            assert sample.logprobs == pytest.approx(logprobs.tolist(), abs=1e-4)
