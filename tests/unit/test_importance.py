"""Importance weights from engine to trainer: values and gradients against the plain-Python oracle, by hand, in any layout, counted."""

from __future__ import annotations

import dataclasses
import math
import random

import pytest
import torch
from fakes.objective_steps import StepAction, lay_out, loss_and_gradients, oracle_settings, random_step, train_config
from pydantic import ValidationError

from pivotrl.config.schema import TrainConfig
from pivotrl.objective import oracle
from pivotrl.objective.grpo import make_grpo_loss
from pivotrl.objective.importance import correction_weights
from pivotrl.training.metrics import objective_metrics

LEVELS = ("token", "sequence", "geometric")
CORRECTIONS = [
    *({"type": "truncated", "level": level, "cap": 1.2} for level in LEVELS),
    *({"type": "masked", "level": level, "low": 0.7, "high": 1.4} for level in LEVELS),
]
ids = [f"{c['type']}-{c['level']}" for c in CORRECTIONS]


def corrected(correction: dict[str, object], **changes: object) -> TrainConfig:
    return train_config(correction=correction, **changes)


def step_under_an_engine(seed: int, *, off_policy: bool) -> list[StepAction]:
    """A random step whose engine log-probs lie far enough from the trainer's for every cap and both ends of every window to be met."""
    rng = random.Random(seed)
    actions = []
    for action in random_step(seed, off_policy=off_policy):
        engine = tuple(old + rng.gauss(0, 0.4) for old in action.oracle.old_logprobs_T)
        actions.append(dataclasses.replace(action, oracle=dataclasses.replace(action.oracle, engine_logprobs_T=engine), behavior_logprobs_T=engine))
    return actions


def oracle_value(step: list[StepAction], config: TrainConfig) -> float:
    correction = config.correction
    assert correction is not None
    bounds = {name: getattr(correction, name, None) for name in ("cap", "low", "high")}
    settings = dataclasses.replace(oracle_settings(config), correction=oracle.OracleCorrection(correction.level, **bounds))
    tokens = sum(len(a.oracle.logprobs_T) for a in step)
    return oracle.grpo_loss([a.oracle for a in step], settings, num_actions=len(step), num_action_tokens=tokens)


def oracle_gradient(step: list[StepAction], config: TrainConfig, i: int, t: int, h: float = 1e-6) -> float:
    """By finite differences in the current log-prob alone: the weight, made of old and engine log-probs, is held constant."""

    def moved(by: float) -> float:
        row = tuple(x + by * (j == t) for j, x in enumerate(step[i].oracle.logprobs_T))
        changed = dataclasses.replace(step[i], oracle=dataclasses.replace(step[i].oracle, logprobs_T=row))
        return oracle_value([*step[:i], changed, *step[i + 1 :]], config)

    return (moved(h) - moved(-h)) / (2 * h)


@pytest.mark.parametrize("correction", CORRECTIONS, ids=ids)
@pytest.mark.parametrize("off_policy", [False, True])
@pytest.mark.parametrize("aggregation", ["action", "token"])
def test_value_and_gradient_equal_the_oracle(correction: dict[str, object], off_policy: bool, aggregation: str) -> None:
    config = corrected(correction, aggregation=aggregation, kl={"beta": 0.3})
    for seed in range(6):
        step = step_under_an_engine(seed, off_policy=off_policy)
        value, gradients = loss_and_gradients([lay_out(step, step=step, off_policy=off_policy)], [step], make_grpo_loss(config))
        assert value == pytest.approx(oracle_value(step, config), abs=1e-9)
        for i, row in enumerate(gradients):
            for t, gradient in enumerate(row):
                assert gradient == pytest.approx(oracle_gradient(step, config, i, t), abs=1e-6)


@pytest.mark.parametrize("correction", CORRECTIONS, ids=ids)
def test_every_other_correction_and_none_differ(correction: dict[str, object]) -> None:
    """The random steps tell the six apart, so the test above can fail."""
    config = corrected(correction)
    others = [corrected(other) for other in CORRECTIONS if other != correction]
    steps = [step_under_an_engine(seed, off_policy=True) for seed in range(6)]
    for other in others:
        assert max(abs(oracle_value(step, config) - oracle_value(step, other)) for step in steps) > 1e-2
    plain = [oracle.grpo_loss([a.oracle for a in s], oracle_settings(config), num_actions=len(s), num_action_tokens=1) for s in steps]
    assert max(abs(oracle_value(step, config) - value) for step, value in zip(steps, plain, strict=True)) > 1e-2


def test_weights_by_hand() -> None:
    """Ratios 2, 1/2 and 3 of one action: product 3, geometric mean 3 ** (1/3); the second column pair is padding with garbage."""
    old = torch.tensor([[math.nan, math.log(0.8), math.log(0.2), math.log(0.6), math.nan]])
    engine = torch.tensor([[7.0, math.log(0.4), math.log(0.4), math.log(0.2), -7.0]])
    mask = torch.tensor([[0.0, 1.0, 1.0, 1.0, 0.0]])

    def weights(**correction: object) -> list[float]:
        config = corrected(correction).correction
        assert config is not None
        return correction_weights(old, engine, mask, config).weights_B_T[0].tolist()

    assert weights(type="truncated", level="token", cap=2.5) == pytest.approx([1, 2, 0.5, 2.5, 1])
    assert weights(type="truncated", level="sequence", cap=2.5) == pytest.approx([1, 2.5, 2.5, 2.5, 1])
    assert weights(type="truncated", level="geometric", cap=2.5) == pytest.approx([1, *[3 ** (1 / 3)] * 3, 1])
    assert weights(type="masked", level="token", low=0.6, high=2.5) == pytest.approx([1, 2, 0, 0, 1])
    assert weights(type="masked", level="token", low=0.0, high=2.5) == pytest.approx([1, 2, 0.5, 0, 1])
    assert weights(type="masked", level="sequence", low=0.5, high=2.0) == pytest.approx([1, 0, 0, 0, 1])


@pytest.mark.parametrize("correction", CORRECTIONS, ids=ids)
def test_split_order_and_padding_do_not_reach_it(correction: dict[str, object]) -> None:
    step = step_under_an_engine(3, off_policy=False)
    loss = make_grpo_loss(corrected(correction))
    value, gradients = loss_and_gradients([lay_out(step, step=step, off_policy=False)], [step], loss)
    reverse = [[action] for action in reversed(step)]
    laid = [lay_out(part, step=step, off_policy=False, extra_padding=3, garbage=math.nan) for part in reverse]
    other_value, other = loss_and_gradients(laid, reverse, loss)
    assert other_value == pytest.approx(value, abs=1e-12)
    assert [pytest.approx(row, abs=1e-12) for row in reversed(other)] == gradients


def test_metrics_equal_loops() -> None:
    step = step_under_an_engine(5, off_policy=True)

    @dataclasses.dataclass
    class Result:
        sums: dict[str, float]
        loss: float = 0.0
        grad_norm: float = 0.0
        lr: float = 0.0
        measures: dict[str, float] = dataclasses.field(default_factory=dict)

    def metrics(correction: dict[str, object]) -> dict[str, float]:
        laid = lay_out(step, step=step, off_policy=True, garbage=math.nan)
        sums = make_grpo_loss(corrected(correction))(laid.logprobs_B_T, laid.entropies_B_T, laid.batch).sums
        return objective_metrics([Result({name: value.item() for name, value in sums.items()})])

    pairs = [p for a in step if a.oracle.weight for p in zip(a.oracle.old_logprobs_T, a.oracle.engine_logprobs_T, strict=True)]
    ratios = [math.exp(old - engine) for old, engine in pairs]
    truncated, masked = metrics(CORRECTIONS[0]), metrics(CORRECTIONS[3])
    assert truncated["objective/engine_ratio/mean"] == pytest.approx(sum(ratios) / len(ratios))
    assert truncated["objective/engine_ratio/max"] == pytest.approx(max(ratios))
    assert truncated["objective/kl_engine/mean"] == pytest.approx(sum(r - 1 - math.log(r) for r in ratios) / len(ratios))
    assert truncated["objective/logprob_mismatch/mean"] == pytest.approx(sum(abs(math.log(r)) for r in ratios) / len(ratios))
    assert truncated["objective/correction_truncated/frac"] == pytest.approx(sum(r > 1.2 for r in ratios) / len(ratios))
    assert truncated["objective/correction_masked/frac"] == masked["objective/correction_truncated/frac"] == 0
    assert masked["objective/correction_masked/frac"] == pytest.approx(sum(r < 0.7 or r > 1.4 for r in ratios) / len(ratios))
    assert 0 < masked["objective/correction_masked/frac"] < 1


def test_what_is_refused() -> None:
    step = random_step(1, off_policy=False)
    laid = lay_out(step, step=step, off_policy=False)
    with pytest.raises(ValueError, match="log-probs of the engine"):
        make_grpo_loss(corrected(CORRECTIONS[0]))(laid.logprobs_B_T, laid.entropies_B_T, dataclasses.replace(laid.batch, behavior_logprobs_B_T=None))
    with pytest.raises(ValidationError, match="must be below high"):
        corrected({"type": "masked", "low": 2.0, "high": 1.0})
    with pytest.raises(ValidationError, match="cap"):
        corrected({"type": "truncated"})
