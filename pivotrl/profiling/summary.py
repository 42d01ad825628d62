"""The headline numbers of a profile directory, read from its Parquet files alone, so that a resumed stage states the same ones."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pivotrl.identity import derive_seed
from pivotrl.pivots.dataset import PROFILES, ROLLOUTS, exact_moments
from pivotrl.pivots.parquet import read_rows
from pivotrl.pivots.statistics import ClusteredMean
from pivotrl.types import FinishReason, ParseOutcome, Split, VerdictKind

_PROFILE_COLUMNS = ("candidate_id", "task_id", "split", "rewards", "num_samples", "successes", "quarantine_reason", "num_prompt_tokens")
_ROLLOUT_COLUMNS = ("candidate_id", "verdict", "finish_reason", "parse", "num_tokens")


def summarize(profile_dir: Path, *, run_seed: int, provenance: Mapping[str, Any], min_samples: int | None = None) -> dict[str, Any]:
    """Counts, cost and rates of a merged profile, JSON-ready.

    Rates carry n and a 95 % interval resampled by task. `prompt_tokens` counts a candidate's prompt once, as an engine with
    a prefix cache does; `turns` counts every completion, resampled ones included.

    Args:
        min_samples: with adaptive K, the samples that every candidate got: the mean is taken over these, since the mean of a
            sequence that was stopped by its own outcome is biased.
    """
    counts, quarantine, prompt_tokens_of, task_of = Counter[str](), Counter[str](), dict[str, int](), dict[str, str]()
    pass_rate = ClusteredMean()
    for row in read_rows(profile_dir / PROFILES, _PROFILE_COLUMNS):
        counts["num_candidates"] += 1
        counts["num_held_out"] += row["split"] == Split.HELD_OUT
        prompt_tokens_of[row["candidate_id"]] = row["num_prompt_tokens"]
        task_of[row["candidate_id"]] = row["task_id"]
        if row["quarantine_reason"] is not None:
            counts["num_quarantined"] += 1
            quarantine[row["quarantine_reason"]] += 1
            continue
        counts["num_profiled"] += 1
        counts["num_profiled_held_out"] += row["split"] == Split.HELD_OUT
        counts["num_counted_samples"] += row["num_samples"]
        counts["num_successes"] += row["successes"]
        mean, _ = exact_moments(tuple(row["rewards"][:min_samples]))
        assert mean is not None
        pass_rate.add(row["task_id"], mean)
    cost, rates = _rollout_figures(profile_dir, prompt_tokens_of, task_of, run_seed)
    names = ("num_candidates", "num_held_out", "num_profiled", "num_profiled_held_out", "num_quarantined", "num_counted_samples", "num_successes")
    return {
        **{name: counts[name] for name in names},
        "quarantine": dict(quarantine.most_common()),
        "mean_reward": pass_rate.interval(seed=derive_seed(run_seed, "profile", "summary", "mean_reward")).as_dict(),
        **rates,
        "cost": cost,
        "provenance": dict(provenance),
    }


def _rollout_figures(profile_dir: Path, prompt_tokens_of: Mapping[str, int], task_of: Mapping[str, str], run_seed: int) -> tuple[dict, dict]:
    """Cost in turns and tokens; shares of malformed, absent and truncated among judged samples, of infra among all."""
    shares = {name: ClusteredMean() for name in ("malformed", "absent", "truncated", "infra")}
    sampled: set[str] = set()
    turns = completion_tokens = 0
    for row in read_rows(profile_dir / ROLLOUTS, _ROLLOUT_COLUMNS):
        turns += 1
        completion_tokens += row["num_tokens"]
        sampled.add(row["candidate_id"])
        task = task_of[row["candidate_id"]]
        is_infra = row["verdict"] == VerdictKind.INFRA
        shares["infra"].add(task, is_infra)
        if not is_infra:
            shares["malformed"].add(task, row["parse"] == ParseOutcome.MALFORMED)
            shares["absent"].add(task, row["parse"] == ParseOutcome.ABSENT)
            shares["truncated"].add(task, row["finish_reason"] == FinishReason.LENGTH)
    cost = {"turns": turns, "prompt_tokens": sum(prompt_tokens_of[one] for one in sampled), "completion_tokens": completion_tokens}
    rates = {f"{name}_frac": share.share_interval(seed=derive_seed(run_seed, "profile", "summary", name)).as_dict() for name, share in shares.items()}
    return cost, rates
