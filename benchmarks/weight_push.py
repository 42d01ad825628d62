"""What a hand-over of weights to an engine in another process costs through shared memory, part by part, against a plain copy of the bytes.

    python benchmarks/weight_push.py CHECKPOINT [--engine transformers|vllm] [--pushes 3] [--threads 2] [--bucket-bytes N]

Plain copy: the same bytes into memory that was written before, by as many threads, before the first push, the best of three. The pushes after
the first (which makes the segments): transfer = copying into shared memory, timed while the replica hashes and loads what came before; digests
on both sides; load = the engine's own work; probe = 8 tokens sampled by the engine and scored again by a transformers model in this process in
the trainer's place. Bars: transfer at most 3 copies, all of it at most 2 s.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, PreTrainedModel

from pivotrl.config.engines import ProcessesPlacement, TransformersEngineConfig, VllmEngineConfig, WeightSyncConfig
from pivotrl.objective.microbatch import MicroBatch
from pivotrl.rollouts.launchers import LocalLauncher
from pivotrl.rollouts.pool import EnginePool
from pivotrl.training.probe import WeightProbe
from pivotrl.weights.push import push
from pivotrl.weights.shared_memory import SharedMemoryStore

_COPIES, _TOTAL_S = 3.0, 2.0
_BESIDE = "  beside the sender's work"
PARTS = (
    ("plain copy", "plain_s", ""),
    ("transfer", "copy_s", ""),
    ("digest, sender", "digest_s", ""),
    ("digest, replica", "replica_read_s", _BESIDE),
    ("load, replica", "replica_load_s", _BESIDE),
    ("hand-over", "pushed_s", "  all of the above"),
    ("probe, sampling", "sampled_s", ""),
    ("probe, scoring", "scored_s", ""),
    ("all", "all_s", f"  bar {_TOTAL_S:g}"),
)


class Scorer:
    """What the probe asks of a trainer."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        self.seconds = 0.0

    def token_logprobs(self, micro_batches: Sequence[MicroBatch], *, temperature: float, reference: bool) -> list[torch.Tensor]:
        """As `PolicyTrainer.token_logprobs`."""
        del reference
        started_s = time.perf_counter()
        results = []
        for batch in micro_batches:
            with torch.inference_mode():
                scores = torch.log_softmax(self._model(batch.token_ids_B_T).logits.float() / temperature, dim=-1)
            picked = scores[:, :-1].gather(2, batch.token_ids_B_T[:, 1:, None])[..., 0]
            results.append(torch.nn.functional.pad(picked, (1, 0)) * batch.action_mask_B_T)
        self.seconds += time.perf_counter() - started_s
        return results


def main() -> None:
    """Pushes several times and prints the best."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--engine", choices=("transformers", "vllm"), default="vllm")
    parser.add_argument("--pushes", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--bucket-bytes", type=int, default=ProcessesPlacement(type="processes").bucket_bytes)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    weights = {name: tensor.clone() for file in sorted(arguments.checkpoint.glob("*.safetensors")) for name, tensor in load_file(file).items()}
    model = AutoModelForCausalLM.from_pretrained(arguments.checkpoint, dtype=torch.float32, local_files_only=True).eval()
    config = (
        VllmEngineConfig(type="vllm", kv_cache_bytes=512 << 20)
        if arguments.engine == "vllm"
        else TransformersEngineConfig(type="transformers", batch_size=8)
    )
    start = {
        "engine": config.model_dump(mode="json"),
        "checkpoint": str(arguments.checkpoint.resolve()),
        "stop_token_ids": [],
        "pad_token_id": 0,
        "num_threads": arguments.threads,
    }
    placement = ProcessesPlacement(type="processes", bucket_bytes=arguments.bucket_bytes)
    copy_s = plain_copy_s(weights)
    probe = WeightProbe(range(20, 60), WeightSyncConfig(), temperature=1.0, seed=0)
    with tempfile.TemporaryDirectory() as directory:
        store = SharedMemoryStore()
        pool = EnginePool(LocalLauncher(placement, Path(directory), num_threads=arguments.threads), store, placement, start)
        rows = []
        for version in range(arguments.pushes + 1):
            started_s = time.perf_counter()
            report = push(weights.items(), pool, version)
            pushed_s = time.perf_counter() - started_s
            scorer = Scorer(model)
            difference = probe.check(pool, scorer)  # type: ignore[arg-type]
            all_s = time.perf_counter() - started_s
            probe_s = {"sampled_s": all_s - pushed_s - scorer.seconds, "scored_s": scorer.seconds}
            rows.append({**pool.last_push, **probe_s, "copy_s": store.copy_s, "pushed_s": pushed_s, "all_s": all_s})
        pool.close()
    # The first one makes the segments and is the engine's first generation.
    rows = rows[1:]
    print(
        f"{report.num_tensors} tensors, {report.num_bytes / 1e6:.0f} MB, engine {arguments.engine}, {arguments.threads} threads, {len(rows)} pushes"
    )
    print(f"{'':22s}  best   median, s")
    for label, part, note in PARTS:
        values = [copy_s] if part == "plain_s" else [row[part] for row in rows]
        best, median = min(values), statistics.median(values)
        ratio = f"  x{best / copy_s:.2f}, x{median / copy_s:.2f} of a plain copy; bar x{_COPIES:g}" if part == "copy_s" else ""
        print(f"{label:20s} {best:7.3f} {median:7.3f}{ratio}{note}")
    print(f"log-probs of the probe differ by {difference:.1e} in the mean")


def plain_copy_s(weights: dict[str, torch.Tensor]) -> float:
    """Seconds to copy all bytes once, the best of three."""
    targets = {name: tensor.clone() for name, tensor in weights.items()}
    seconds = []
    for _ in range(3):
        started_s = time.perf_counter()
        for name, tensor in weights.items():
            targets[name].copy_(tensor)
        seconds.append(time.perf_counter() - started_s)
    return min(seconds)


if __name__ == "__main__":
    main()
