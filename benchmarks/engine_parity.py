"""Log-probs of the engine that samples against the trainer's for the same tokens, in float32, model by model.

    PYTHONPATH=.:tests python benchmarks/engine_parity.py [CHECKPOINT...] [--tokens 2000] [--families llama,qwen3_moe,nemotron_h]

Tiny random models of each family with what vLLM's CPU kernels need (heads of 32), then the checkpoints named. The engine of a tiny model is
started on other weights and handed the trainer's, as in training; that of a named checkpoint is handed its own. Every token is one that vLLM
sampled at temperature 0.8. Prints the mean, 99th percentile and largest absolute difference; the bar is a largest below 1e-4.
"""

from __future__ import annotations

import argparse
import gc
import random
import tempfile
from pathlib import Path

import torch
from fakes.trainer_batches import save_model  # pyright: ignore[reportMissingImports]

from pivotrl.config.engines import VllmEngineConfig
from pivotrl.config.parallel import MoeConfig
from pivotrl.config.schema import ParallelConfig
from pivotrl.rollouts.engine import GenerationRequest
from pivotrl.rollouts.vllm import VllmEngine
from pivotrl.training.batching import train_batch, train_micro_batches
from pivotrl.types import TrainSample
from pivotrl.weights.push import push

_TEMPERATURE = 0.8
_SAMPLES, _NEW_TOKENS = 4, 32
_BAR = 1e-4
# What vLLM's CPU kernels need of a tiny model: heads of 32, experts of a multiple of 32.
_SETTINGS = {
    "llama": {"hidden_size": 128},
    "qwen3_moe": {"hidden_size": 128, "head_dim": 32},
    "nemotron_h": {"hidden_size": 128, "head_dim": 32},
}


def main() -> None:
    """One line per model."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoints", type=Path, nargs="*")
    parser.add_argument("--tokens", type=int, default=2000)
    parser.add_argument("--families", default=",".join(_SETTINGS))
    arguments = parser.parse_args()
    print(f"{'model':16} {'tokens':>7} {'mean':>9} {'p99':>9} {'max':>9}  bar {_BAR:g}")
    for family in filter(None, arguments.families.split(",")):
        with tempfile.TemporaryDirectory() as directory:
            first, other = (save_model(Path(directory) / str(seed), family, seed=seed, **_SETTINGS[family]) for seed in (0, 1))
            report(family, first, other, arguments.tokens)
    for checkpoint in arguments.checkpoints:
        report(checkpoint.name, checkpoint, checkpoint, arguments.tokens)


def report(name: str, checkpoint: Path, start: Path, num_tokens: int) -> None:
    """Hands the trainer's weights to vLLM, samples there, scores with the trainer, prints the differences."""
    from pivotrl.megatron.trainer import Trainer

    trainer = Trainer.from_hf(checkpoint, optimizer=None, parallel=ParallelConfig(), moe=MoeConfig(), num_steps=1, seed=0, with_reference=False)
    engine = VllmEngine.load(start, VllmEngineConfig(type="vllm", kv_cache_bytes=256 << 20, max_model_len=128), stop_token_ids=(), pad_token_id=0)
    push(trainer.named_tensors(), engine, 1)
    stream, samples = random.Random(1), []
    while sum(len(sample.completion_token_ids) for sample in samples) < num_tokens:
        prompt = tuple(stream.randrange(4, engine._vocab_size) for _ in range(stream.randint(4, 60)))
        request = GenerationRequest(prompt, tuple(stream.getrandbits(60) for _ in range(_SAMPLES)), _TEMPERATURE, _NEW_TOKENS)
        (completions,) = engine.generate([request])
        samples += [TrainSample(f"{len(samples)}", prompt, one.token_ids, 0.0, one.logprobs) for one in completions]
    engine.close()
    del engine
    gc.collect()
    micro_batches = train_micro_batches(train_batch(samples), batching="padded", micro_batch_tokens=2048, skip_zero_variance=False)
    scored = trainer.token_logprobs(micro_batches, temperature=_TEMPERATURE)
    differences = torch.cat(
        [
            (logprobs_B_T - batch.behavior_logprobs_B_T)[batch.action_mask_B_T > 0].abs()
            for logprobs_B_T, batch in zip(scored, micro_batches, strict=True)
            if batch.behavior_logprobs_B_T is not None
        ]
    )
    verdict = "ok" if differences.max() < _BAR else "MISSED"
    p99 = differences.quantile(0.99)
    print(f"{name:16} {len(differences):7d} {differences.mean():9.1e} {p99:9.1e} {differences.max():9.1e}  {verdict}", flush=True)


if __name__ == "__main__":
    main()
