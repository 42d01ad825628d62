"""How fast the rollout engines decode, against transformers' own batched `generate`, in one run on one checkpoint.

    python benchmarks/engine_throughput.py CHECKPOINT [--prompts 4] [--samples 8] [--prompt-tokens 256] [--new-tokens 48] [--threads 1] [--batch 64]

Prompts are random token ids of unlike lengths and no token stops a sample, so every engine generates the same number of tokens. Each engine is
warmed up on one prompt. `generate` runs batches of `--batch` samples: all of them at once would spend its time on copying one large cache.
Prints tokens per second of wall time and of CPU time, and the ratio of both to `generate`; on a busy machine read the latter. vLLM takes part
where it can be imported.
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

from pivotrl.config.engines import TransformersEngineConfig, VllmEngineConfig
from pivotrl.rollouts.engine import Engine, GenerationRequest
from pivotrl.rollouts.transformers_engine import TransformersEngine

# Ids below this are special tokens in most vocabularies.
_FIRST_TOKEN = 16
_PAD = 0


@dataclass(frozen=True, slots=True)
class Speed:
    """Generated tokens per second of wall time and of this process's CPU time."""

    per_wall_s: float
    per_cpu_s: float


def main() -> None:
    """Runs every engine once and prints its speed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path)
    for name, default in (("--prompts", 4), ("--samples", 8), ("--prompt-tokens", 256), ("--new-tokens", 48), ("--threads", 1), ("--batch", 64)):
        parser.add_argument(name, type=int, default=default)
    arguments = parser.parse_args()
    transformers_logging.disable_progress_bar()
    torch.set_num_threads(arguments.threads)
    model = AutoModelForCausalLM.from_pretrained(arguments.checkpoint, dtype=torch.float32, local_files_only=True).eval()
    requests = random_requests(arguments, vocab_size=model.config.vocab_size)
    num_rows = arguments.prompts * arguments.samples
    print(f"{num_rows} samples of {arguments.prompts} prompts, {arguments.new_tokens} new tokens each, {arguments.threads} threads, float32")
    generate(model, requests[:1], batch=arguments.batch)
    baseline = measure("transformers generate", lambda: generate(model, requests, batch=arguments.batch), baseline=None)
    ours = TransformersEngine.load(
        arguments.checkpoint, TransformersEngineConfig(type="transformers", batch_size=num_rows), stop_token_ids=(), pad_token_id=_PAD
    )
    measure_engine("pivotrl transformers", ours, requests, baseline=baseline)
    if importlib.util.find_spec("vllm"):
        from pivotrl.rollouts.vllm import VllmEngine

        config = VllmEngineConfig(type="vllm", kv_cache_bytes=1 << 30, max_num_seqs=num_rows)
        vllm = VllmEngine.load(arguments.checkpoint, config, stop_token_ids=(), pad_token_id=_PAD)
        torch.set_num_threads(arguments.threads)
        measure_engine("pivotrl vllm", vllm, requests, baseline=baseline)
    else:
        print("vllm cannot be imported; left out")


def random_requests(arguments: argparse.Namespace, *, vocab_size: int) -> list[GenerationRequest]:
    """Prompts between three quarters of the length asked for and all of it."""
    stream = random.Random(0)
    requests = []
    for number in range(arguments.prompts):
        length = stream.randint(3 * arguments.prompt_tokens // 4, arguments.prompt_tokens)
        prompt = tuple(stream.randrange(_FIRST_TOKEN, vocab_size) for _ in range(length))
        seeds = tuple(number * arguments.samples + index for index in range(arguments.samples))
        requests.append(GenerationRequest(prompt, seeds, 1.0, arguments.new_tokens))
    return requests


def generate(model: torch.nn.Module, requests: Sequence[GenerationRequest], *, batch: int) -> int:
    """transformers' `generate` on the same samples, left-padded, `batch` samples at a time; the number of generated tokens."""
    prompts = [request.prompt_token_ids for request in requests for _ in request.seeds]
    return sum(generate_batch(model, list(some), num_new=requests[0].max_new_tokens) for some in itertools.batched(prompts, batch))


def generate_batch(model: torch.nn.Module, prompts: Sequence[Sequence[int]], *, num_new: int) -> int:
    """One call of `generate`; the number of generated tokens."""
    width = max(map(len, prompts))
    with torch.inference_mode():
        sequences = model.generate(  # pyright: ignore[reportCallIssue]
            input_ids=torch.tensor([[_PAD] * (width - len(prompt)) + list(prompt) for prompt in prompts]),
            attention_mask=torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts]),
            max_new_tokens=num_new,
            min_new_tokens=num_new,
            do_sample=True,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            pad_token_id=_PAD,
        )
    return len(prompts) * (sequences.shape[1] - width)


def measure_engine(name: str, engine: Engine, requests: Sequence[GenerationRequest], *, baseline: Speed) -> None:
    """One line for an engine, which is closed afterwards."""
    engine.generate(warm_up(requests))

    def run() -> int:
        return sum(len(sample.token_ids) for samples in engine.generate(requests) for sample in samples)

    measure(name, run, baseline=baseline)
    engine.close()


def warm_up(requests: Sequence[GenerationRequest]) -> list[GenerationRequest]:
    """One request of another prompt, so that no prefix cache has seen the measured ones."""
    first = requests[0]
    return [replace(first, prompt_token_ids=first.prompt_token_ids[::-1])]


def measure(name: str, run: Callable[[], int], *, baseline: Speed | None) -> Speed:
    """Prints and returns the speed of one run."""
    wall_s, cpu_s = time.perf_counter(), time.process_time()
    num_tokens = run()
    speed = Speed(num_tokens / (time.perf_counter() - wall_s), num_tokens / (time.process_time() - cpu_s))
    ratio = "" if baseline is None else f"  x{speed.per_wall_s / baseline.per_wall_s:.1f} x{speed.per_cpu_s / baseline.per_cpu_s:.1f}"
    print(f"{name:24s} {num_tokens:6d} tokens  {speed.per_wall_s:8.1f} tok/s  {speed.per_cpu_s:8.1f} tok/cpu-s{ratio}", flush=True)
    return speed


if __name__ == "__main__":
    main()
