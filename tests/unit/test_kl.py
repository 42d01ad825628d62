"""KL to pi_0: values, and the one property that matters: the expected gradient of the weighted estimators is the KL's."""

from __future__ import annotations

import pytest
import torch

from pivotrl.objective.kl import KlEstimator, kl_terms

P_LOGITS = [0.3, -1.0, 0.7, 0.1]
Q_LOGITS = [0.0, 0.2, -0.5, 0.4]


def policies() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    logits = torch.tensor(P_LOGITS, dtype=torch.float64, requires_grad=True)
    return logits, torch.log_softmax(logits, 0), torch.log_softmax(torch.tensor(Q_LOGITS, dtype=torch.float64), 0)


def exact_kl_gradient() -> torch.Tensor:
    logits, p, q = policies()
    (gradient,) = torch.autograd.grad((p.exp() * (p - q)).sum(), logits)
    return gradient


@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_expected_value_is_the_kl(estimator: KlEstimator) -> None:
    _, p, q = policies()
    assert (p.exp() * kl_terms(p, q, estimator)).sum().item() == pytest.approx((p.exp() * (p - q)).sum().item(), abs=1e-12)


@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_expected_gradient_with_ratio_is_the_kl_gradient(estimator: KlEstimator) -> None:
    """Every token enumerated with its probability: on-policy, w = p / p.detach()."""
    logits, p, q = policies()
    weighted = p.exp().detach() * torch.exp(p - p.detach()) * kl_terms(p, q, estimator)
    (gradient,) = torch.autograd.grad(weighted.sum(), logits)
    assert torch.allclose(gradient, exact_kl_gradient(), atol=1e-12)


@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_gradient_without_ratio_would_be_wrong(estimator: KlEstimator) -> None:
    """The common form: k1 teaches nothing on average, k3 descends KL(q || p) instead."""
    logits, p, q = policies()
    (gradient,) = torch.autograd.grad((p.exp().detach() * kl_terms(p, q, estimator)).sum(), logits)
    assert (gradient - exact_kl_gradient()).abs().max() > 1e-2
    logits, p, q = policies()
    reverse = torch.zeros(4, dtype=torch.float64) if estimator == "k1" else torch.autograd.grad((q.exp() * (q - p)).sum(), logits)[0]
    assert torch.allclose(gradient, reverse, atol=1e-12)


def test_k3_is_never_negative_and_zero_at_equality() -> None:
    p = torch.linspace(-30, 0, 50)
    q = torch.linspace(0, -30, 50)
    assert (kl_terms(p, q, "k3") >= 0).all()
    assert (kl_terms(p, p, "k3") == 0).all()


@pytest.mark.parametrize("estimator", ["k1", "k3"])
@pytest.mark.parametrize("gap", [500.0, -500.0])
def test_extreme_gaps_stay_finite(estimator: KlEstimator, gap: float) -> None:
    p = torch.tensor([-600.0], requires_grad=True)
    value = kl_terms(p, p.detach() + gap, estimator)
    value.sum().backward()
    assert torch.isfinite(value).all()
    assert p.grad is not None
    assert torch.isfinite(p.grad).all()
