"""The objective once more, in plain Python floats and loops: what the tests compare the tensor code with.

Independent on purpose: shares one constant (STD_EPS) but no code, no tensor library and no padding with the rest of objective/,
and is written from the equations, slowly. Never called in training.
Suffixes: G = rewards of one group, N = actions of the step, T = tokens of one action.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from pivotrl.objective.advantages import STD_EPS


@dataclass(frozen=True, slots=True)
class OracleAction:
    """One action of the step.

    >>> OracleAction((-1.0, -2.0), (-1.0, -2.0), None, advantage=0.5, weight=1.0).advantage
    0.5
    """

    logprobs_T: tuple[float, ...]
    old_logprobs_T: tuple[float, ...]
    """Log-probs of the policy that sampled; equal to `logprobs_T` where the step is exactly on-policy."""
    reference_logprobs_T: tuple[float, ...] | None
    advantage: float
    weight: float
    engine_logprobs_T: tuple[float, ...] = ()
    """As the engine that sampled reported them; needed under a correction only."""


@dataclass(frozen=True, slots=True)
class OracleCorrection:
    """Importance weights from engine to trainer: `low` and `high` mask, `cap` truncates; None leaves either out.

    >>> OracleCorrection("token", cap=2.0, low=None, high=None).cap
    2.0
    """

    level: str
    cap: float | None
    low: float | None
    high: float | None


@dataclass(frozen=True, slots=True)
class OracleSettings:
    """What Eq. 7 leaves open.

    >>> OracleSettings(0.2, 0.28, 0.0, "k3", "action").clip_high
    0.28
    """

    clip_low: float
    clip_high: float
    beta: float
    estimator: str
    aggregation: str
    correction: OracleCorrection | None = None


def advantages(rewards_G: Sequence[float], method: str) -> list[float]:
    """The four advantages by name, from their definitions."""
    n = len(rewards_G)
    mean = sum(rewards_G) / n
    if all(r == rewards_G[0] for r in rewards_G):
        return [0.0] * n
    if method == "no_std":
        return [r - mean for r in rewards_G]
    if method == "mean_std":
        variance = 0.0
        for r in rewards_G:
            variance += (r - mean) * (r - mean) / n
        return [(r - mean) / (math.sqrt(variance) + STD_EPS) for r in rewards_G]
    result: list[float] = []
    for i, r in enumerate(rewards_G):
        others = [rewards_G[j] for j in range(n) if j != i]
        baseline = sum(others) / (n - 1)
        scale = 1.0
        if method == "leave_one_out_std" and max(others) > min(others):
            scale = math.sqrt(sum((other - baseline) ** 2 for other in others) / (n - 2)) + STD_EPS
        result.append((r - baseline) / scale)
    return result


def token_loss(logprob: float, old: float, reference: float | None, advantage: float, settings: OracleSettings) -> float:
    """-(min(w A, clip(w) A) - beta w kl) of one token."""
    w = math.exp(logprob - old)
    if w > 1 + settings.clip_high:
        inside = 1 + settings.clip_high
    elif w < 1 - settings.clip_low:
        inside = 1 - settings.clip_low
    else:
        inside = w
    gain = min(w * advantage, inside * advantage)
    if settings.beta == 0 or reference is None:
        return -gain
    difference = logprob - reference
    kl = difference if settings.estimator == "k1" else math.exp(-difference) + difference - 1
    return -(gain - settings.beta * w * kl)


def importance_weights(action: OracleAction, correction: OracleCorrection) -> list[float]:
    """One weight per token of one action, from pi_old / pi_engine by multiplying probabilities."""
    ratios = [math.exp(old) / math.exp(engine) for old, engine in zip(action.old_logprobs_T, action.engine_logprobs_T, strict=True)]
    if correction.level != "token":
        product = 1.0
        for ratio in ratios:
            product *= ratio
        ratios = [product if correction.level == "sequence" else product ** (1 / len(ratios))] * len(ratios)
    weights: list[float] = []
    for ratio in ratios:
        is_outside = (correction.low is not None and ratio < correction.low) or (correction.high is not None and ratio > correction.high)
        weights.append(0.0 if is_outside else ratio if correction.cap is None else min(ratio, correction.cap))
    return weights


def grpo_loss(actions_N: Sequence[OracleAction], settings: OracleSettings, *, num_actions: int, num_action_tokens: int) -> float:
    """The loss of a whole step: -(Eq. 7), divided by the denominator of the named aggregation."""
    total = 0.0
    for action in actions_N:
        sum_tokens = 0.0
        weights = [1.0] * len(action.logprobs_T) if settings.correction is None else importance_weights(action, settings.correction)
        for t, logprob in enumerate(action.logprobs_T):
            reference = None if action.reference_logprobs_T is None else action.reference_logprobs_T[t]
            sum_tokens += weights[t] * token_loss(logprob, action.old_logprobs_T[t], reference, action.advantage, settings)
        if settings.aggregation == "action":
            total += action.weight * sum_tokens / len(action.logprobs_T) / num_actions
        else:
            total += action.weight * sum_tokens / num_action_tokens
    return total


def nll_loss(logprobs_N: Sequence[Sequence[float]]) -> float:
    """Eq. 1 over all expert tokens of a step."""
    return -sum(sum(logprobs) for logprobs in logprobs_N) / sum(len(logprobs) for logprobs in logprobs_N)
