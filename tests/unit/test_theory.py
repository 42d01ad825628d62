"""The paper's three statements, checked numerically: Proposition 3.1, Theorem 3.2 and Theorem 3.3 (docs/theory.md).

Derivatives here are finite differences in float64 and minima are found by scipy, so that nothing rests on the formula under test.
"""

from __future__ import annotations

import math
from typing import Any, get_args

import numpy as np
import numpy.typing as npt
import pytest
import torch
from fakes.objective_steps import train_config
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import minimize
from scipy.stats import spearmanr

from pivotrl.objective.advantages import AdvantageName, group_advantages
from pivotrl.objective.grpo import make_grpo_loss
from pivotrl.objective.kl import KlEstimator
from pivotrl.objective.microbatch import MicroBatch

type Vector = npt.NDArray[np.float64]

METHODS: tuple[AdvantageName, ...] = get_args(AdvantageName.__value__)
ESTIMATORS: tuple[KlEstimator, ...] = get_args(KlEstimator.__value__)
H = 1e-5


def softmax(logits: Vector) -> Vector:
    weights = np.exp(logits - logits.max())
    return weights / weights.sum()


def tilted(reference: Vector, rewards: Vector, beta: float) -> Vector:
    """pi_beta, proportional to pi_0 exp(r / beta)."""
    return softmax(np.log(reference) + rewards / beta)


def slope(of, at: Vector) -> Vector:
    """Central differences of a scalar or vector function, one row per coordinate."""
    steps = np.eye(len(at)) * H
    return np.array([(np.asarray(of(at + step)) - np.asarray(of(at - step))) / (2 * H) for step in steps])


def random_case(seed: int, *, num_actions: int = 6) -> tuple[Vector, Vector]:
    """A reference policy and 0/1 rewards with both values."""
    generator = np.random.default_rng(seed)
    rewards = np.array([1.0, 0.0, *generator.integers(0, 2, num_actions - 2)])
    return softmax(generator.normal(0, 1.5, num_actions)), rewards


@settings(max_examples=60)
@given(size=st.integers(2, 32), reward=st.floats(-3, 3, allow_nan=False), method=st.sampled_from(METHODS))
def test_prop_3_1_equal_rewards_teach_nothing(size: int, reward: float, method: AdvantageName) -> None:
    """Identical rewards in a group: every advantage is exactly 0, whatever their common value and the estimator."""
    assert group_advantages([reward] * size, method) == (0.0,) * size


@pytest.mark.parametrize("method", METHODS)
def test_prop_3_1_has_a_converse_for_binary_rewards(method: AdvantageName) -> None:
    """One reward that differs and the group teaches: its advantage is positive, or negative where it is the failure."""
    for size in range(2, 17):
        for successes in range(1, size):
            advantages = group_advantages([1.0] * successes + [0.0] * (size - successes), method)
            assert min(advantages[:successes]) > 0 > max(advantages[successes:])


@pytest.mark.parametrize("method", METHODS)
def test_prop_3_1_the_gradient_is_zero(method: AdvantageName) -> None:
    logits = torch.tensor([0.3, -1.0, 0.8], dtype=torch.float64, requires_grad=True)
    for rewards, is_zero in (([1.0] * 3, True), ([1.0, 0.0, 0.0], False)):
        (gradient,) = torch.autograd.grad(_loss(logits, group_advantages(rewards, method), beta=0.0, weights=[1.0] * 3), logits)
        assert bool((gradient == 0).all()) is is_zero


def _natural_gradient_norm(policy: Vector, rewards: Vector) -> float:
    """Fisher norm of F^+ grad J at a softmax policy, J = E[r]; F and grad J from finite differences of log pi and of J."""
    logits = np.log(policy)
    scores_P_A = slope(lambda at: np.log(softmax(at)), logits)
    fisher = (scores_P_A * policy) @ scores_P_A.T
    gradient = slope(lambda at: softmax(at) @ rewards, logits)
    natural = np.linalg.pinv(fisher, rcond=1e-8) @ gradient
    return math.sqrt(natural @ fisher @ natural)


@pytest.mark.parametrize("beta", [0.2, 0.5, 1.0, 3.0])
@pytest.mark.parametrize("seed", range(4))
def test_thm_3_2_natural_gradient_is_the_std_of_the_reward(seed: int, beta: float) -> None:
    """Along pi_beta: (1 / beta^2) |natural gradient|_F = sqrt(Var r) / beta^2, not Var r / beta^2; graded rewards too."""
    reference, rewards = random_case(seed)
    for values in (rewards, np.random.default_rng(seed).normal(0, 1, len(rewards))):
        policy = tilted(reference, values, beta)
        variance = policy @ values**2 - (policy @ values) ** 2
        found = _natural_gradient_norm(policy, values) / beta**2
        assert found == pytest.approx(math.sqrt(variance) / beta**2, rel=1e-5)
        assert abs(found - variance / beta**2) > 1e-3 * found


@pytest.mark.parametrize("beta", [0.2, 0.5, 1.0, 3.0])
def test_thm_3_2_is_the_speed_of_the_path(beta: float) -> None:
    """The same number is how fast pi_beta moves when beta does: the Fisher norm of d log pi_beta / d beta, by central differences."""
    for seed in range(4):
        reference, rewards = random_case(seed)
        policy, step = tilted(reference, rewards, beta), 1e-4 * beta
        velocity = (np.log(tilted(reference, rewards, beta + step)) - np.log(tilted(reference, rewards, beta - step))) / (2 * step)
        success = policy @ rewards
        assert math.sqrt(policy @ velocity**2) == pytest.approx(math.sqrt(success * (1 - success)) / beta**2, rel=1e-5)


def closed_form(reference: Vector, accepted: Vector, beta: float) -> tuple[float, Vector]:
    """q = rho e^(1/beta) / (rho e^(1/beta) + 1 - rho) on M, and pi_0 rescaled inside M and outside."""
    rho = float(reference @ accepted)
    q = rho * math.exp(1 / beta) / (rho * math.exp(1 / beta) + 1 - rho)
    return q, np.where(accepted == 1, reference * q / rho, reference * (1 - q) / (1 - rho))


@pytest.mark.parametrize("beta", [0.3, 1.0, 2.5])
@pytest.mark.parametrize("seed", range(3))
def test_thm_3_3_closed_form_is_the_minimum(seed: int, beta: float) -> None:
    """scipy minimises E[-r] + beta KL(pi || pi_0) over logits: mass on M, ratios inside M and outside, and order are the theorem's."""
    reference, accepted = random_case(seed, num_actions=8)

    def objective(logits: Vector) -> float:
        policy = softmax(logits)
        return float(-(policy @ accepted) + beta * (policy @ (np.log(policy) - np.log(reference))))

    found = minimize(objective, np.zeros(len(reference)), method="BFGS", jac="3-point", options={"gtol": 1e-9})
    policy = softmax(found.x)
    q, expected = closed_form(reference, accepted, beta)
    assert policy @ accepted == pytest.approx(q, abs=1e-6)
    np.testing.assert_allclose(policy, expected, atol=1e-6)
    assert objective(np.log(expected)) <= found.fun + 1e-12
    for side in (accepted == 1, accepted == 0):
        np.testing.assert_allclose(policy[side] / policy[side].sum(), reference[side] / reference[side].sum(), atol=1e-6)
        if side.sum() > 1:
            correlation: Any = spearmanr(policy[side], reference[side])
            assert correlation.statistic == pytest.approx(1.0)


def test_thm_3_3_order_is_not_preserved_across_m() -> None:
    """An accepted action overtakes a likelier one outside M: only within the two sides is the order kept."""
    reference, accepted = np.array([0.6, 0.3, 0.1]), np.array([0.0, 0.0, 1.0])
    _, policy = closed_form(reference, accepted, 0.3)
    assert policy[2] > policy[0] > policy[1]


def _loss(logits: torch.Tensor, advantages, *, beta: float, weights, reference: Vector | None = None, estimator: KlEstimator = "k3") -> torch.Tensor:
    """The product's objective on one-token actions, action a being token a; every action counts `weights[a]` times."""
    logprobs, total = torch.log_softmax(logits, 0), torch.zeros((), dtype=torch.float64)
    loss = make_grpo_loss(train_config(kl={"beta": beta, "estimator": estimator}))
    for action, (advantage, weight) in enumerate(zip(advantages, weights, strict=True)):
        row = torch.stack([torch.zeros((), dtype=torch.float64), logprobs[action]]).unsqueeze(0)
        known = None if reference is None else torch.tensor([[0.0, math.log(reference[action])]], dtype=torch.float64)
        batch = MicroBatch(
            token_ids_B_T=torch.tensor([[0, action]]),
            lengths_B=torch.tensor([2]),
            action_mask_B_T=torch.tensor([[0.0, 1.0]], dtype=torch.float64),
            advantages_B=torch.tensor([float(advantage)], dtype=torch.float64),
            loss_weights_B=torch.ones(1, dtype=torch.float64),
            behavior_logprobs_B_T=None,
            old_logprobs_B_T=None,
            reference_logprobs_B_T=known,
            num_actions=1,
            num_action_tokens=1,
        )
        total = total + float(weight) * loss(row, torch.zeros_like(row), batch).loss
    return total


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_thm_3_3_closed_form_is_the_fixed_point_of_our_loss(estimator: KlEstimator) -> None:
    """Every action enumerated with its probability, advantages r - E[r]: the expected gradient is 0 at the closed form and nowhere near pi_0."""
    for seed, beta in ((0, 0.4), (1, 1.0), (2, 2.0)):
        reference, accepted = random_case(seed)
        _, optimum = closed_form(reference, accepted, beta)
        sizes = []
        for policy in (optimum, reference):
            logits = torch.tensor(np.log(policy), requires_grad=True)
            advantages = accepted - policy @ accepted
            loss = _loss(logits, advantages, beta=beta, weights=policy, reference=reference, estimator=estimator)
            sizes.append(torch.autograd.grad(loss, logits)[0].abs().max().item())
        assert sizes[0] < 1e-12
        assert sizes[1] > 1e-2
