"""Group advantages: from the rewards of one state's G actions to one number per action, in plain Python floats.

Pure; called by training/sources.py once per group. The caller leaves out rollouts that do not count (infra verdicts, excluded
truncations) before it calls: what is passed is the group. Masked rollouts are passed, so they shape mean and std; their own
loss weight is 0 elsewhere. Suffix: G = counted rollouts of one group. Notation below: k of G rewards are 1, p = k/G.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Literal

STD_EPS = 1e-6
"""eps of A_i = (r_i - mean) / (std + eps). It only guards the division: groups of zero variance never reach it, and against
the smallest std of a 0/1 group (0.13 at G = 64) it moves an advantage by less than 1e-5 relative."""

type AdvantageName = Literal["mean_std", "leave_one_out", "no_std", "leave_one_out_std"]


def has_zero_variance(rewards_G: Sequence[float]) -> bool:
    """Whether all rewards are the same number, so that every advantage is 0 (Proposition 3.1).

    Exact comparison: a threshold on a computed std would depend on rounding (``pstdev([0.1] * 3)`` need not be 0).

    >>> has_zero_variance([0.1, 0.1, 0.1]), has_zero_variance([0.0, 1e-12])
    (True, False)
    """
    return all(reward == rewards_G[0] for reward in rewards_G)


def group_advantages(rewards_G: Sequence[float], method: AdvantageName) -> tuple[float, ...]:
    """Advantages of one group, in the order of its rewards; exactly 0.0 everywhere where the group has zero variance.

    Raises:
        ValueError: for a group of fewer than two rewards, which has nothing to compare.
    """
    if len(rewards_G) < 2:
        raise ValueError(f"a group of {len(rewards_G)} rewards has no advantages; a group needs at least 2")
    if has_zero_variance(rewards_G):
        return (0.0,) * len(rewards_G)
    return _METHODS[method](rewards_G)


def mean_std(rewards_G: Sequence[float]) -> tuple[float, ...]:
    """A_i = (r_i - mean(r)) / (std(r) + eps), the paper's, with the population std (divisor G, as in Eq. 4).

    For 0/1 rewards a success gets sqrt((1 - p)/p) and a failure -sqrt(p/(1 - p)): both fall as k grows.
    """
    mean = math.fsum(rewards_G) / len(rewards_G)
    std = math.sqrt(math.fsum((reward - mean) ** 2 for reward in rewards_G) / len(rewards_G))
    return tuple((reward - mean) / (std + STD_EPS) for reward in rewards_G)


def no_std(rewards_G: Sequence[float]) -> tuple[float, ...]:
    """A_i = r_i - mean(r): the paper's without the division (Dr. GRPO, arXiv 2503.20783)."""
    mean = math.fsum(rewards_G) / len(rewards_G)
    return tuple(reward - mean for reward in rewards_G)


def leave_one_out(rewards_G: Sequence[float]) -> tuple[float, ...]:
    """A_i = r_i - mean(r_j, j != i): unbiased baseline (RLOO, arXiv 2402.14740); equals G/(G - 1) times `no_std`."""
    total, others = math.fsum(rewards_G), len(rewards_G) - 1
    return tuple(reward - (total - reward) / others for reward in rewards_G)


def leave_one_out_std(rewards_G: Sequence[float]) -> tuple[float, ...]:
    """A_i = (r_i - m_i) / (s_i + eps), m_i and s_i the mean and sample std of the others; undivided where s_i = 0.

    The incumbent's (NeMo-RL, leave-one-out baseline with normalized rewards), kept by name for comparison, not as advice.
    It is not monotone: a lone success among 16 sees sixteen minus one equal failures, so s_i = 0 and it gets 1.00, while two
    successes get 3.61 each and three 2.46. A rarer success should teach more, not less. Nor do the advantages of a group
    sum to 0.
    """
    return tuple(_against_others(reward, [*rewards_G[:index], *rewards_G[index + 1 :]]) for index, reward in enumerate(rewards_G))


def _against_others(reward: float, others: Sequence[float]) -> float:
    mean = math.fsum(others) / len(others)
    if has_zero_variance(others):
        return reward - mean
    std = math.sqrt(math.fsum((other - mean) ** 2 for other in others) / (len(others) - 1))
    return (reward - mean) / (std + STD_EPS)


_METHODS: Mapping[AdvantageName, Callable[[Sequence[float]], tuple[float, ...]]] = {
    "mean_std": mean_std,
    "leave_one_out": leave_one_out,
    "no_std": no_std,
    "leave_one_out_std": leave_one_out_std,
}
