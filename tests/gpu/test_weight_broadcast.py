"""Weights from one GPU to an engine on one or two others over NCCL: all arrive, and the engine samples from them. No GPU has run this yet."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from fakes.tiny_llama import PAD, STOP, forward_logprobs, named_weights, save_tiny_llama, tiny_llama

from pivotrl.config.engines import ProcessesPlacement, VllmEngineConfig
from pivotrl.rollouts.engine import GenerationRequest
from pivotrl.rollouts.launchers import LocalLauncher
from pivotrl.rollouts.pool import EnginePool
from pivotrl.weights.broadcast import BroadcastStore
from pivotrl.weights.push import push


@pytest.mark.multi_gpu
@pytest.mark.parametrize("num_workers", [1, 2])
def test_weights_are_broadcast_to_an_engine_on_other_gpus(tmp_path: Path, num_workers: int) -> None:
    if torch.cuda.device_count() <= num_workers:
        pytest.skip(f"NCCL gives one GPU to one process: needs {1 + num_workers}")
    checkpoint = save_tiny_llama(tmp_path / "model")
    placement = ProcessesPlacement(
        type="processes", devices=(",".join(str(1 + worker) for worker in range(num_workers)),), transfer="nccl", bucket_bytes=20_000
    )
    config = VllmEngineConfig(type="vllm", kv_cache_bytes=32 << 20, max_num_seqs=8, tensor_parallel_size=num_workers)
    start = {
        "engine": config.model_dump(mode="json"),
        "checkpoint": str(checkpoint),
        "stop_token_ids": [STOP],
        "pad_token_id": PAD,
        "num_threads": 1,
    }
    pool = EnginePool(LocalLauncher(placement, tmp_path / "engines", num_threads=1), BroadcastStore(), placement, start)
    model = tiny_llama(seed=1)
    push(((name, tensor.cuda()) for name, tensor in named_weights(model)), pool, 1)
    prompt = tuple(range(5, 30))
    ((sample,),) = pool.generate([GenerationRequest(prompt, (3,), 0.8, 24)])
    expected = forward_logprobs(model, prompt, sample.token_ids, temperature=0.8)
    assert sample.logprobs == pytest.approx(expected.tolist(), abs=1e-2)
    pool.close()
