"""How far a bfloat16 engine and the float32 trainer of a tiny mixture are apart, with and without replay of the engine's routes.

    PYTHONPATH=.:tests python benchmarks/router_replay.py [--steps 4] [--models 3]

A `train` stage of random models of each family (32 experts, 4 chosen) on the transformers engine, several models per family, same seeds in
both runs; the first round is sampled by the same weights and has the same tokens. Prints, over the steps, the mean and largest absolute log-prob
difference of a sampled token and the estimate of KL(engine || trainer), as `objective/logprob_mismatch` and `objective/kl_engine` log them, and what
replay leaves of each.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from statistics import fmean
from typing import Literal

import torch
from fakes.tiny_run import run_tiny, save_tiny, tiny_config  # pyright: ignore[reportMissingImports]

from pivotrl.config.engines import TransformersEngineConfig
from pivotrl.config.schema import MoeConfig, SamplingConfig
from pivotrl.rundir import read_jsonl

_FAMILIES = {
    "qwen3_moe": {"num_experts": 32, "num_experts_per_tok": 4, "num_hidden_layers": 4, "norm_topk_prob": True},
    "nemotron_3": {"n_routed_experts": 32, "num_experts_per_tok": 4, "hybrid_override_pattern": "ME*EME"},
}
_ENGINE = TransformersEngineConfig(type="transformers", batch_size=64, dtype="bfloat16", enable_return_routed_experts=True)
_SAMPLING = SamplingConfig(temperature=1.0, max_new_tokens=32, truncated="mask")
_METRICS = {"mean |d|": "objective/logprob_mismatch/mean", "max |d|": "objective/logprob_mismatch/max", "KL": "objective/kl_engine/mean"}

type _Replay = Literal["none", "rollout"]


def main() -> None:
    """Prints a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--models", type=int, default=3)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    print(f"{'family':12} {'router_replay':13} {'replayed':>8} " + " ".join(f"{name:>9}" for name in _METRICS))
    for family in _FAMILIES:
        modes: tuple[_Replay, ...] = ("none", "rollout")
        found = {replay: [_measured(family, seed, replay, arguments.steps) for seed in range(arguments.models)] for replay in modes}
        means = {replay: [fmean(values) for values in zip(*rows, strict=True)] for replay, rows in found.items()}
        for replay, (coverage, *values) in means.items():
            print(f"{family:12} {replay:13} {coverage:8.3f} " + " ".join(f"{value:9.2e}" for value in values))
        left = [after / before for before, after in zip(means["none"][1:], means["rollout"][1:], strict=True)]
        print(f"{family:12} {'left':13} {'':8} " + " ".join(f"{share:9.2f}" for share in left), flush=True)


def _measured(family: str, seed: int, replay: _Replay, num_steps: int) -> list[float]:
    """Coverage and the metrics of one run, means over its steps."""
    with tempfile.TemporaryDirectory() as folder:
        hf_dir = save_tiny(Path(folder) / "hf", family, seed=seed, **_FAMILIES[family])
        train = tiny_config(num_steps=num_steps, group_size=16, micro_batch_tokens=512, checkpoint_every=num_steps, optimizer={"lr": 1e-3})
        run_tiny(Path(folder) / "train", hf_dir, train, engine=_ENGINE, moe=MoeConfig(router_replay=replay), sampling=_SAMPLING)
        rows = [row for row in read_jsonl(Path(folder) / "train" / "metrics.jsonl") if "objective/loss/mean" in row]
    coverage = fmean(row.get("optim/routes_replayed/frac", 0.0) for row in rows)
    return [coverage, *(fmean(row[name] for row in rows) for name in _METRICS.values())]


if __name__ == "__main__":
    main()
