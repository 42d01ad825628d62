"""The registry of metric names: `<stage>/<noun>[/<facet>]/<reduction>`, one meaning each.

Bottom tier: every layer emits through `check_name`, so an unregistered name fails where it is first used. The reduction is
the last part of the name and says how values of one step were combined.
"""

from __future__ import annotations

from dataclasses import dataclass

STAGES = ("data", "profile", "select", "rollout", "objective", "optim", "sync", "eval", "time", "perf")
REDUCTIONS = ("mean", "max", "min", "sum", "std", "frac", "count")


@dataclass(frozen=True, slots=True)
class MetricSpec:
    """One registered metric."""

    name: str
    meaning: str
    is_timing: bool = False
    """Figures of the clock, and of what an answer cost that may come from a cache, go to timing.json and timing.jsonl, never to files that
    must be equal after a resume."""


_REGISTRY: dict[str, MetricSpec] = {}


def register(name: str, meaning: str, *, is_timing: bool = False) -> MetricSpec:
    """Adds a name to the registry.

    Args:
        is_timing: for a figure that a resumed run may not repeat, such as what a judge cost; names of time and rates are timing anyway.

    Raises:
        ValueError: for a name outside the grammar or one registered twice.
    """
    parts = name.split("/")
    if not 3 <= len(parts) <= 4 or parts[0] not in STAGES or parts[-1] not in REDUCTIONS:
        raise ValueError(f"metric name {name!r} is not <stage>/<noun>[/<facet>]/<reduction> with stage in {STAGES} and reduction in {REDUCTIONS}")
    if name in _REGISTRY:
        raise ValueError(f"metric name {name!r} is registered twice")
    is_clock = (parts[0] in ("time", "perf") and "_per_s" in name) or parts[0] == "time"
    _REGISTRY[name] = MetricSpec(name, meaning, is_timing or is_clock)
    return _REGISTRY[name]


def check_name(name: str) -> MetricSpec:
    """The spec of a registered name.

    Raises:
        KeyError: for a name nobody registered.
    """
    if name not in _REGISTRY:
        raise KeyError(f"metric {name!r} is not registered; add it to pivotrl/metrics.py with its meaning")
    return _REGISTRY[name]


def registered() -> tuple[MetricSpec, ...]:
    """All specs in order of registration; docs/metrics.md is generated from this."""
    return tuple(_REGISTRY.values())


_CORE = {
    "data/non_finite/count": "Metric values of the step that were NaN or infinite; they are stored as null",
    "rollout/reward/mean": "Mean reward of the step's counted rollouts",
    "rollout/reward/std": "Mean over groups of the within-group reward std (population); the paper's Figure 3",
    "rollout/group_zero_variance/frac": "Share of groups whose counted rewards are all equal, so that they teach nothing",
    "rollout/group_dropped/count": "Groups with fewer than two counted rollouts, which leave the loss and its denominator",
    "rollout/episode_turns/mean": "Mean number of assistant turns of an episode, in end-to-end RL",
    "rollout/truncated/frac": "Share of rollouts cut at max_new_tokens; in end-to-end RL of turns, as the next two and response tokens",
    "rollout/malformed/frac": "Share of rollouts whose action was begun but cannot be read",
    "rollout/absent/frac": "Share of rollouts with no action in the format: plain messages",
    "rollout/verifier_error/frac": "Share of verdicts that were the infrastructure's fault",
    "rollout/response_tokens/mean": "Mean number of generated tokens of a rollout",
    "rollout/response_tokens/sum": "Generated tokens of the step",
    "rollout/prompt_tokens/sum": "Prompt tokens of the step, each group's prompt counted once",
    "rollout/wasted_tokens/sum": "Generated tokens of zero-variance groups",
    "objective/loss/mean": "Loss of the step, divided by the step's one global denominator",
    "objective/kl_reference/mean": "Estimated KL(policy || reference) per action token",
    "objective/ratio_clipped/frac": "Share of action tokens where the clipped branch was the smaller one",
    "objective/logprob_mismatch/mean": "Mean absolute log-prob difference, trainer against engine, per action token",
    "objective/logprob_mismatch/max": "Largest absolute log-prob difference, trainer against engine",
    "objective/engine_ratio/mean": "Mean of pi_trainer / pi_engine over action tokens; 1 on average where both are the same policy",
    "objective/engine_ratio/max": "Largest pi_trainer / pi_engine of an action token, before any correction",
    "objective/kl_engine/mean": "Estimated KL(engine || trainer) per action token (k3, never negative)",
    "objective/correction_truncated/frac": "Share of action tokens whose importance weight was cut to train.correction.cap",
    "objective/correction_masked/frac": "Share of action tokens whose importance weight was masked to 0; above token level, of whole actions",
    "objective/entropy/mean": "Mean entropy of the policy at action tokens, nats",
    "optim/grad_norm/mean": "Global gradient norm before clipping",
    "optim/lr/mean": "Learning rate of the step",
    "optim/parameter_drift/mean": "Distance of the weights from the reference's over the reference's norm, 2-norm; at checkpoints",
    "optim/expert_load/max": "Tokens of the busiest expert over its layer's mean, largest layer",
    "optim/expert_load/min": "Tokens of the idlest expert over its layer's mean, smallest layer",
    "optim/expert_unused/frac": "Share of experts that no token of the step was routed to",
    "optim/routes_replayed/frac": "Share of routers' choices in the last update that are replayed ones (moe.router_replay)",
    "sync/parity_difference/mean": "Parity check: mean |log-prob of the trainer - of the engine| over its sampled tokens",
    "sync/parity_difference/p99/max": "Parity check: largest difference among the 99 % of tokens that agree best",
    "sync/parity_difference/max": "Parity check: largest difference",
    "sync/parity_ratio/mean": "Parity check: mean pi_trainer / pi_engine; 1 on average where both are the same policy",
    "sync/parity_ratio/p99/max": "Parity check: 99th percentile of the ratio",
    "sync/parity_ratio/max": "Parity check: largest ratio",
    "sync/policy_age_steps/max": "Largest age of the policy that sampled, in optimizer steps",
    "perf/env_turns/sum": "Assistant turns sampled so far, the cost axis against end-to-end RL",
    "perf/rollout_tokens_per_s/mean": "Generated tokens per second of wall time",
    "perf/train_tokens_per_s/mean": "Tokens put through forward and backward per second of wall time, padding and repeated prefixes left out",
    "perf/train_flops_per_s/mean": "Operations the model requires for them, recomputation left out, per second",
    "time/rollout_s/sum": "Wall time spent generating and scoring, seconds",
    "time/train_s/sum": "Wall time spent in forward, backward and update, seconds",
    "time/sync_s/sum": "Wall time spent handing weights to the engine, seconds",
    "eval/held_out_reward/mean": "Mean reward on held-out pivots, same sampling as training",
    "eval/world_success/mean": "Share of the world's test episodes that end in success (train.curve)",
}
for _name, _meaning in _CORE.items():
    register(_name, _meaning)

_JUDGE = {
    "rollout/judge_requests/sum": "Requests to the judge, retries included",
    "rollout/judge_failures/sum": "Requests to the judge that gave no answer",
    "rollout/judge_cache_hits/sum": "Opinions taken from the cache instead of the judge",
    "rollout/judge_prompt_tokens/sum": "Prompt tokens of the judge, as its endpoint counts them",
    "rollout/judge_completion_tokens/sum": "Tokens that the judge generated, as its endpoint counts them",
    "time/judge_s/sum": "Summed duration of the requests to the judge, which overlap, seconds",
}
for _name, _meaning in _JUDGE.items():
    register(_name, _meaning, is_timing=True)
_ENGINES = {
    "rollout/engine_losses/sum": "Engine processes that died, missed their deadline or failed, and were ended",
    "rollout/engine_retries/sum": "Times a batch of requests was given to an engine again",
    "rollout/environment_retries/sum": "Times an episode of an environment was played again after its server failed",
    "rollout/unclaimed_turns/sum": "Turns sampled for an environment's agents that no result claims: of episodes that failed, or of other roles",
}
for _name, _meaning in _ENGINES.items():
    register(_name, _meaning, is_timing=True)
_OF_MACHINE = {
    "perf/model_flops_utilisation/frac": "The same over the stated peak of all training processes (parallel.peak_tflops)",
    "perf/memory_peak_bytes/max": "Most memory process 0 has held so far: tensors on a GPU, resident memory on a CPU",
}
for _name, _meaning in _OF_MACHINE.items():
    register(_name, _meaning, is_timing=True)
