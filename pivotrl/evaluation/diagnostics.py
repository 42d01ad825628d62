"""What the theory says about pivots and about a trained policy, measured on a run (docs/theory.md): three numbers with n and interval.

Pure but for `score_actions`, which asks a trainer for log-probs. Called by verbs/diagnostics.py. Suffixes: N = actions, T = tokens of one action.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pivotrl.pivots.statistics import Interval, cluster_bootstrap_interval

if TYPE_CHECKING:
    from pivotrl.training.protocols import PolicyTrainer

# A rank correlation of two actions is 1 or -1 by chance.
_MIN_ACTIONS = 3


@dataclass(frozen=True, slots=True)
class ScoredAction:
    """One whole action in one state, never cut.

    >>> ScoredAction("turn-1", "task-1", (5, 6), (7, 1), True).is_accepted
    True
    """

    prompt_id: str
    """Actions of one state share it."""
    cluster: Hashable
    """What is resampled together: the trajectory of the state, or the prompt."""
    prompt_token_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    is_accepted: bool
    """Whether the action is in M(s); of no meaning for answers out of domain."""


def expected_signal(pass_rates: Iterable[tuple[float, Hashable]], *, seed: int) -> Interval:
    """Mean of sqrt(mu (1 - mu)) over turns: by Theorem 3.2 the natural gradient's size at pi_0, up to 1 / beta^2.

    Args:
        pass_rates: mu of a 0/1 reward, with the cluster (trajectory) of its turn.
    """
    rows = [(math.sqrt(mu * (1 - mu)), cluster) for mu, cluster in pass_rates]
    return cluster_bootstrap_interval([signal for signal, _ in rows], [cluster for _, cluster in rows], seed=seed)


def score_actions(
    trainer: PolicyTrainer, actions_N: Sequence[ScoredAction], *, temperature: float, micro_batch_tokens: int
) -> list[tuple[float, ...]]:
    """Log-probs of every action's tokens under the trainer's policy at a temperature, in the order of the actions."""
    from pivotrl.training.scoring import completion_logprobs

    completed_N = [(action.prompt_token_ids, action.token_ids) for action in actions_N]
    return completion_logprobs(trainer, completed_N, temperature=temperature, micro_batch_tokens=micro_batch_tokens)


def order_preservation(
    actions_N: Sequence[ScoredAction], before_N: Sequence[tuple[float, ...]], after_N: Sequence[tuple[float, ...]], *, seed: int
) -> dict[str, Any]:
    """Spearman's correlation of log pi_0 and log pi over the distinct sampled actions of a state, outside M and inside it.

    Theorem 3.3: at the optimum it is 1 on either side. A state counts where at least three distinct actions lie on that side.

    Returns:
        ``outside`` and ``inside``: mean over states with n = states and interval, and ``num_actions`` outside.
    """
    states: dict[str, dict[tuple[int, ...], tuple[bool, float, float]]] = {}
    cluster_of: dict[str, Hashable] = {}
    for action, before_T, after_T in zip(actions_N, before_N, after_N, strict=True):
        states.setdefault(action.prompt_id, {})[action.token_ids] = (action.is_accepted, math.fsum(before_T), math.fsum(after_T))
        cluster_of[action.prompt_id] = action.cluster
    found: dict[str, Any] = {"num_actions": sum(not accepted for state in states.values() for accepted, _, _ in state.values())}
    for name, wanted in (("outside", False), ("inside", True)):
        sides = {prompt: [pair for accepted, *pair in state.values() if accepted is wanted] for prompt, state in states.items()}
        kept = {prompt: pairs for prompt, pairs in sides.items() if len(pairs) >= _MIN_ACTIONS}
        correlations = [(_rank_correlation(pairs), cluster_of[prompt]) for prompt, pairs in kept.items()]
        known = [(value, cluster) for value, cluster in correlations if not math.isnan(value)]
        found[name] = cluster_bootstrap_interval([value for value, _ in known], [cluster for _, cluster in known], seed=seed).as_dict()
    return found


def _rank_correlation(pairs: Sequence[Sequence[float]]) -> float:
    """Spearman's, NaN where one side is constant."""
    from scipy.stats import spearmanr

    result: Any = spearmanr([before for before, _ in pairs], [after for _, after in pairs])
    return float(result.statistic)


def kl_to_reference(
    answers_N: Sequence[ScoredAction], policy_N: Sequence[tuple[float, ...]], reference_N: Sequence[tuple[float, ...]], *, seed: int
) -> dict[str, Any]:
    """KL(pi || pi_0) of a whole answer in nats, from answers that pi sampled; intervals resample prompts.

    ``k1`` is the mean of log pi - log pi_0 and may be below 0 by chance; ``k3`` sums exp(d) - d - 1 over tokens, d = log pi_0 - log pi, which has
    the same mean and never is. An answer cut at its cap is its first tokens.
    """
    clusters = [answer.cluster for answer in answers_N]
    gaps_N = [
        [low - high for high, low in zip(policy_T, reference_T, strict=True)] for policy_T, reference_T in zip(policy_N, reference_N, strict=True)
    ]
    k1 = [-math.fsum(gaps_T) for gaps_T in gaps_N]
    k3 = [math.fsum(math.expm1(gap) - gap for gap in gaps_T) for gaps_T in gaps_N]
    intervals = {name: cluster_bootstrap_interval(values, clusters, seed=seed).as_dict() for name, values in (("k1", k1), ("k3", k3))}
    return {**intervals, "num_prompts": len(set(clusters)), "num_tokens": sum(map(len, gaps_N))}
