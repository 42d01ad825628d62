"""Eq. 7 as tensors against the plain-Python oracle: values, gradients by finite differences, metrics, and wrong formulas told apart."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence

import pytest
import torch
from fakes.objective_steps import StepAction, lay_out, loss_and_gradients, oracle_settings, random_step, train_config

from pivotrl.config.schema import TrainConfig
from pivotrl.objective import oracle
from pivotrl.objective.grpo import make_grpo_loss

SEEDS = range(12)
CONFIGS = [
    train_config(aggregation=aggregation, kl={"beta": beta, "estimator": estimator})
    for aggregation in ("action", "token")
    for beta, estimator in ((0.0, "k3"), (0.3, "k1"), (0.3, "k3"))
]
ids = [f"{c.aggregation}-{c.kl.beta}-{c.kl.estimator}" for c in CONFIGS]


def oracle_value(step: Sequence[StepAction], config: TrainConfig) -> float:
    tokens = sum(len(a.oracle.logprobs_T) for a in step)
    return oracle.grpo_loss([a.oracle for a in step], oracle_settings(config), num_actions=len(step), num_action_tokens=tokens)


def oracle_gradient(step: Sequence[StepAction], config: TrainConfig, i: int, t: int, h: float = 1e-6) -> float:
    def moved(by: float) -> float:
        action = step[i].oracle
        row = tuple(x + by * (j == t) for j, x in enumerate(action.logprobs_T))
        changed = dataclasses.replace(step[i], oracle=dataclasses.replace(action, logprobs_T=row))
        return oracle_value([*step[:i], changed, *step[i + 1 :]], config)

    return (moved(h) - moved(-h)) / (2 * h)


@pytest.mark.parametrize("config", CONFIGS, ids=ids)
@pytest.mark.parametrize("off_policy", [False, True])
def test_value_and_gradient_equal_oracle(config: TrainConfig, off_policy: bool) -> None:
    """To 1e-6, for random steps whose ratios lie inside and outside the clip range, with masked actions among them."""
    for seed in SEEDS:
        step = random_step(seed, off_policy=off_policy)
        value, gradients = loss_and_gradients([lay_out(step, step=step, off_policy=off_policy)], [step], make_grpo_loss(config))
        assert value == pytest.approx(oracle_value(step, config), abs=1e-6)
        for i, row in enumerate(gradients):
            for t, gradient in enumerate(row):
                assert gradient == pytest.approx(oracle_gradient(step, config, i, t), abs=1e-6)


def _swapped_clip(step: list[StepAction], config: TrainConfig) -> float:
    return oracle_value(step, config.model_copy(update={"clip": config.clip.model_copy(update={"low": 0.28, "high": 0.2})}))


def _kl_to_old(step: list[StepAction], config: TrainConfig) -> float:
    wrong = [dataclasses.replace(a, oracle=dataclasses.replace(a.oracle, reference_logprobs_T=a.oracle.old_logprobs_T)) for a in step]
    return oracle_value(wrong, config)


def _mean_of_micro_batches(step: list[StepAction], config: TrainConfig) -> float:
    parts = [step[:1], step[1:]]
    return sum(oracle_value(part, config) for part in parts) / len(parts)


def _unmasked_denominator(step: list[StepAction], config: TrainConfig) -> float:
    kept = [a for a in step if a.oracle.weight]
    return oracle_value(kept, config) if kept else 0.0


def _per_sequence_sum(step: list[StepAction], config: TrainConfig) -> float:
    """Sum over the action's tokens instead of their mean (aggregation `action`), mean of means (aggregation `token`)."""
    other = config.model_copy(update={"aggregation": "token" if config.aggregation == "action" else "action"})
    return oracle_value(step, other)


def _ratio_without_minimum(step: list[StepAction], config: TrainConfig) -> float:
    total = 0.0
    for a in step:
        gains = [math.exp(p - o) * a.oracle.advantage for p, o in zip(a.oracle.logprobs_T, a.oracle.old_logprobs_T, strict=True)]
        total -= a.oracle.weight * sum(gains) / len(gains) / len(step)
    return total


@pytest.mark.parametrize(
    ("wrong", "beta"),
    [
        (_swapped_clip, 0.0),
        (_kl_to_old, 0.3),
        (_mean_of_micro_batches, 0.0),
        (_unmasked_denominator, 0.0),
        (_per_sequence_sum, 0.0),
        (_ratio_without_minimum, 0.0),
    ],
)
@pytest.mark.parametrize("aggregation", ["action", "token"])
def test_wrong_formulas_differ(wrong: Callable[[list[StepAction], TrainConfig], float], beta: float, aggregation: str) -> None:
    """The random steps are sharp enough: each formula somebody has shipped is off by far more than the 1e-6 above."""
    config = train_config(aggregation=aggregation, kl={"beta": beta})
    errors = []
    for seed in SEEDS:
        step = random_step(seed, off_policy=True)
        value, _ = loss_and_gradients([lay_out(step, step=step, off_policy=True)], [step], make_grpo_loss(config))
        errors.append(abs(value - wrong(step, config)))
    assert max(errors) > 1e-2


def test_on_policy_gradient_is_the_policy_gradient() -> None:
    """With old = None the ratio is 1 and d loss / d log p = -A / (T_i N): nothing is clipped, and the value is -mean A."""
    step = random_step(3, off_policy=False, weights=(1.0,))
    value, gradients = loss_and_gradients([lay_out(step, step=step, off_policy=False)], [step], make_grpo_loss(train_config()))
    assert value == pytest.approx(-sum(a.oracle.advantage for a in step) / len(step))
    for a, row in zip(step, gradients, strict=True):
        assert row == pytest.approx([-a.oracle.advantage / len(row) / len(step)] * len(row))


def test_metric_sums_equal_loops() -> None:
    step = random_step(5, off_policy=True)
    config = train_config(kl={"beta": 0.1, "estimator": "k1"})
    laid = lay_out(step, step=step, off_policy=True, garbage=math.nan)
    sums = make_grpo_loss(config)(laid.logprobs_B_T, laid.entropies_B_T, laid.batch).sums
    tokens = clipped = 0
    entropy, kl, mismatch = [], [], []
    for a in step:
        if a.oracle.weight == 0:
            continue
        rows = zip(
            a.oracle.logprobs_T, a.oracle.old_logprobs_T, a.oracle.reference_logprobs_T or (), a.behavior_logprobs_T, a.entropies_T, strict=True
        )
        for p, old, reference, behavior, h in rows:
            w, advantage = math.exp(p - old), a.oracle.advantage
            tokens += 1
            clipped += min(max(w, 0.8), 1.28) * advantage < w * advantage
            entropy.append(h)
            kl.append(w * (p - reference))
            mismatch.append(old - behavior)
    assert clipped > 0
    expected = {
        "tokens": tokens,
        "ratio_clipped": clipped,
        "entropy": sum(entropy),
        "kl_reference": sum(kl),
        "logprob_mismatch": sum(map(abs, mismatch)),
        "logprob_mismatch/max": max(map(abs, mismatch)),
        "engine_ratio": sum(map(math.exp, mismatch)),
        "engine_ratio/max": math.exp(max(mismatch)),
        "kl_engine": sum(math.exp(d) - d - 1 for d in mismatch),
    }
    assert {name: value.item() for name, value in sums.items()} == pytest.approx(expected)
    assert not any(value.requires_grad for value in sums.values())


@pytest.mark.parametrize("advantage", [1.0, -1.0])
@pytest.mark.parametrize("log_ratio", [1000.0, -1000.0])
def test_extreme_ratios_stay_finite(advantage: float, log_ratio: float) -> None:
    case = oracle.OracleAction((-1.0 if log_ratio > 0 else -1001.0,), (-1001.0 if log_ratio > 0 else -1.0,), (-1.0,), advantage, 1.0)
    step = [StepAction(case, (-1.0,), (0.5,), 1)]
    config = train_config(kl={"beta": 0.1})
    value, gradients = loss_and_gradients([lay_out(step, step=step, off_policy=True)], [step], make_grpo_loss(config))
    assert math.isfinite(value)
    assert all(math.isfinite(g) for row in gradients for g in row)


def test_beta_without_reference_is_an_error() -> None:
    step = random_step(1, off_policy=False)
    laid = lay_out(step, step=step, off_policy=False)
    batch = dataclasses.replace(laid.batch, reference_logprobs_B_T=None)
    with pytest.raises(ValueError, match="reference log-probs"):
        make_grpo_loss(train_config(kl={"beta": 0.1}))(laid.logprobs_B_T, laid.entropies_B_T, batch)


def test_shape_and_first_column_are_checked() -> None:
    step = random_step(1, off_policy=False)
    laid = lay_out(step, step=step, off_policy=False)
    loss = make_grpo_loss(train_config())
    with pytest.raises(ValueError, match="logprobs_B_T has shape"):
        loss(laid.logprobs_B_T[:, 1:], laid.entropies_B_T, laid.batch)
    with pytest.raises(ValueError, match="column 0"):
        loss(laid.logprobs_B_T, laid.entropies_B_T, dataclasses.replace(laid.batch, action_mask_B_T=torch.ones_like(laid.batch.action_mask_B_T)))
