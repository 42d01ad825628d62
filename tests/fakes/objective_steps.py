"""Random optimizer steps as plain numbers, laid out both for the oracle and as micro-batches, and a config to go with them."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from pivotrl.config.schema import TrainConfig
from pivotrl.objective.microbatch import LossFunction, MicroBatch
from pivotrl.objective.oracle import OracleAction, OracleSettings


def train_config(**changes: object) -> TrainConfig:
    """A valid `train` section; `changes` replaces whole keys."""
    base: dict[str, object] = {
        "num_steps": 4,
        "pivots_per_step": 2,
        "group_size": 4,
        "advantage": "mean_std",
        "aggregation": "action",
        "clip": {"low": 0.2, "high": 0.28},
        "kl": {"beta": 0.0},
        "optimizer": {"lr": 0.1},
        "micro_batch_tokens": 64,
        "checkpoint_every": 2,
    }
    return TrainConfig.model_validate({**base, **changes})


def oracle_settings(config: TrainConfig) -> OracleSettings:
    return OracleSettings(config.clip.low, config.clip.high, config.kl.beta, config.kl.estimator, config.aggregation)


@dataclass(frozen=True, slots=True)
class StepAction:
    """One action of a random step with everything a micro-batch row needs."""

    oracle: OracleAction
    behavior_logprobs_T: tuple[float, ...]
    entropies_T: tuple[float, ...]
    prompt_len: int


def random_step(seed: int, *, off_policy: bool, weights: Sequence[float] = (1.0, 1.0, 0.0)) -> list[StepAction]:
    """3 to 9 actions of 1 to 7 tokens; off-policy ratios reach well outside the clip range on both sides."""
    rng = random.Random(seed)
    actions: list[StepAction] = []
    for _ in range(rng.randint(3, 9)):
        num_tokens = rng.randint(1, 7)
        logprobs = tuple(-3 * rng.random() for _ in range(num_tokens))
        shift = lambda scale, row=logprobs: tuple(x + rng.gauss(0, scale) for x in row)  # noqa: E731
        old = shift(0.4) if off_policy else logprobs
        case = OracleAction(logprobs, old, shift(0.5), rng.gauss(0, 1.5), rng.choice(weights))
        actions.append(StepAction(case, shift(0.01), tuple(2 * rng.random() for _ in range(num_tokens)), rng.randint(1, 5)))
    return actions


@dataclass(frozen=True, slots=True)
class Laid:
    """A micro-batch with the leaf tensor of its log-probs, in which the gradient is read."""

    batch: MicroBatch
    logprobs_B_T: torch.Tensor
    entropies_B_T: torch.Tensor


def lay_out(actions: Sequence[StepAction], *, step: Sequence[StepAction], off_policy: bool, extra_padding: int = 0, garbage: float = 0.0) -> Laid:
    """`actions` as one micro-batch of the step; positions outside the action hold `garbage` in every float tensor (float64)."""
    width = max(a.prompt_len + len(a.oracle.logprobs_T) for a in actions) + extra_padding

    def grid(rows: Sequence[tuple[float, ...]], fill: float) -> torch.Tensor:
        out = torch.full((len(actions), width), fill, dtype=torch.float64)
        for i, (a, row) in enumerate(zip(actions, rows, strict=True)):
            out[i, a.prompt_len : a.prompt_len + len(row)] = torch.tensor(row, dtype=torch.float64)
        return out

    vector = lambda values: torch.tensor(values, dtype=torch.float64)  # noqa: E731
    batch = MicroBatch(
        token_ids_B_T=torch.zeros((len(actions), width), dtype=torch.int64),
        lengths_B=torch.tensor([a.prompt_len + len(a.oracle.logprobs_T) for a in actions]),
        action_mask_B_T=grid([(1.0,) * len(a.oracle.logprobs_T) for a in actions], 0.0),
        advantages_B=vector([a.oracle.advantage for a in actions]),
        loss_weights_B=vector([a.oracle.weight for a in actions]),
        behavior_logprobs_B_T=grid([a.behavior_logprobs_T for a in actions], garbage),
        old_logprobs_B_T=grid([a.oracle.old_logprobs_T for a in actions], garbage) if off_policy else None,
        reference_logprobs_B_T=grid([a.oracle.reference_logprobs_T or () for a in actions], garbage),
        num_actions=len(step),
        num_action_tokens=sum(len(a.oracle.logprobs_T) for a in step),
    )
    logprobs = grid([a.oracle.logprobs_T for a in actions], garbage).requires_grad_()
    return Laid(batch, logprobs, grid([a.entropies_T for a in actions], garbage))


def loss_and_gradients(laid: Sequence[Laid], actions: Sequence[Sequence[StepAction]], loss: LossFunction) -> tuple[float, list[list[float]]]:
    """Sum of the micro-batches' losses and d loss / d log-prob per action token, in the order of `actions`."""
    total, gradients = 0.0, []
    for one, rows in zip(laid, actions, strict=True):
        terms = loss(one.logprobs_B_T, one.entropies_B_T, one.batch)
        terms.loss.backward()
        total += terms.loss.item()
        assert one.logprobs_B_T.grad is not None
        for i, a in enumerate(rows):
            gradients.append(one.logprobs_B_T.grad[i, a.prompt_len : a.prompt_len + len(a.oracle.logprobs_T)].tolist())
    return total, gradients
