"""The numbers of one step under their registered names (pivotrl/metrics.py): from the loss's sums, and from the clock.

Shares are formed here, once per step, from sums over the whole step: never means of micro-batch means.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from pivotrl.training.protocols import StepData, StepResult

# Trainer's measures of one update that are metrics as they are.
_MEASURES = {
    "memory_peak_bytes/max": "perf/memory_peak_bytes/max",
    "expert_load/max": "optim/expert_load/max",
    "expert_load/min": "optim/expert_load/min",
    "expert_unused": "optim/expert_unused/frac",
    "routes_replayed": "optim/routes_replayed/frac",
}


def objective_metrics(results: Sequence[StepResult]) -> dict[str, float]:
    """Metrics of the one or several optimizer steps taken on one batch of rollouts.

    Loss and gradient norm are means over the updates, per-token metrics are over all updates' tokens, the learning rate is
    the last. The mismatch to the engine and the correction are the first update's: all updates see the same old log-probs.
    """
    first = results[0].sums
    tokens = math.fsum(result.sums["tokens"] for result in results)
    metrics = {
        "objective/loss/mean": math.fsum(result.loss for result in results) / len(results),
        "optim/grad_norm/mean": math.fsum(result.grad_norm for result in results) / len(results),
        "optim/lr/mean": results[-1].lr,
    }
    measures = results[-1].measures
    metrics.update({name: measures[key] for key, name in _MEASURES.items() if key in measures})
    # A step whose samples all have weight 0 forwards one of them but has no token that carries loss.
    if tokens > 0:
        for name, key in (("kl_reference/mean", "kl_reference"), ("ratio_clipped/frac", "ratio_clipped"), ("entropy/mean", "entropy")):
            if key in first:
                metrics[f"objective/{name}"] = math.fsum(result.sums[key] for result in results) / tokens
        metrics.update(_engine_metrics(first))
    return metrics


def _engine_metrics(sums: Mapping[str, float]) -> dict[str, float]:
    """How far trainer and engine are apart, and what the correction did about it."""
    metrics = {}
    for key in ("logprob_mismatch", "engine_ratio", "kl_engine"):
        if key in sums:
            metrics[f"objective/{key}/mean"] = sums[key] / sums["tokens"]
        if f"{key}/max" in sums:
            metrics[f"objective/{key}/max"] = sums[f"{key}/max"]
    for key in ("correction_truncated", "correction_masked"):
        if key in sums:
            metrics[f"objective/{key}/frac"] = sums[key] / sums["tokens"]
    return metrics


class Stopwatch:
    """Wall time of one step by span; its metrics are timing metrics and stay out of files that must be equal after a resume."""

    def __init__(self) -> None:
        self._spans_s: dict[str, float] = {}

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        """Times its body as `time/<name>_s/sum`."""
        started_s = time.monotonic()
        yield
        self._spans_s[name] = time.monotonic() - started_s

    def metrics(self, data: StepData, results: Sequence[StepResult]) -> dict[str, float]:
        """The spans, the rate of generation where the step generated, and the trainer's rate and, where a peak is stated, utilisation."""
        metrics = {f"time/{name}_s/sum": seconds for name, seconds in self._spans_s.items()}
        if "rollout/response_tokens/sum" in data.metrics and self._spans_s["rollout"] > 0:
            metrics["perf/rollout_tokens_per_s/mean"] = data.metrics["rollout/response_tokens/sum"] / self._spans_s["rollout"]
        tokens, flops = (math.fsum(result.measures.get(key, 0.0) for result in results) for key in ("work_tokens", "work_flops"))
        if tokens > 0 and self._spans_s["train"] > 0:
            metrics["perf/train_tokens_per_s/mean"] = tokens / self._spans_s["train"]
            metrics["perf/train_flops_per_s/mean"] = flops / self._spans_s["train"]
            if "peak_flops" in results[0].measures:
                metrics["perf/model_flops_utilisation/frac"] = flops / self._spans_s["train"] / results[0].measures["peak_flops"]
        return metrics
