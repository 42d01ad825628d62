"""Explanations of a disagreement, each against a case made by hand: it names the place, and says nothing where it does not explain all."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch

from pivotrl.megatron.copies import UnequalCopy
from pivotrl.training.parity import ParityStatistics
from pivotrl.training.parity_findings import (
    ActionScores,
    Limits,
    copies_finding,
    shift_finding,
    temperature_finding,
    unlike_replica,
    weights_finding,
)
from pivotrl.weights.digest import tensor_digest

LIMITS = Limits(1e-3)


def tensors() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    names = ["embed.weight", *(f"layers.{i}.mlp.experts.{e}.up.weight" for i in range(2) for e in range(3)), "norm.weight"]
    return {name: torch.randn(4, 4, generator=generator) for name in names}


def weights(held: dict[str, torch.Tensor], *, engine_version: int = 3) -> str | None:
    digests = {name: tensor_digest(tensor) for name, tensor in held.items()}
    finding = weights_finding(tensors().items(), digests, engine_version=engine_version, trainer_version=3)
    return finding.what if finding else None


def test_weights() -> None:
    assert weights(tensors()) is None
    stale = {name: tensor + 1 for name, tensor in tensors().items()}
    assert str(weights(stale)).startswith("stale weights: 8 of 8 tensors differ, first 'embed.weight'")
    one = {**tensors(), "norm.weight": tensors()["norm.weight"] + 1e-6}
    assert weights(one) == "tensor 'norm.weight' differs (1 of 8 tensors differ)"
    assert str(weights(one, engine_version=2)).endswith("the engine states policy version 2, the trainer is at 3")
    first, third = "layers.1.mlp.experts.0.up.weight", "layers.1.mlp.experts.2.up.weight"
    swapped = {**tensors(), first: tensors()[third], third: tensors()[first]}
    assert weights(swapped) == ("swapped experts: layers.1.mlp.experts holds expert 2's 'up.weight' in place of expert 0's (2 of 8 tensors differ)")
    elsewhere = {**tensors(), "norm.weight": tensors()["embed.weight"]}
    assert str(weights(elsewhere)).startswith("swapped tensors: 'norm.weight' holds 'embed.weight'")
    scaled = {**tensors(), first: 0.5 * tensors()[first]}
    assert str(weights(scaled)).startswith(f"wrong expert scale: the engine holds 0.5 times tensor '{first}'")


def actions(engine: Sequence[Sequence[float]], trainer: Sequence[Sequence[float]]) -> list[ActionScores]:
    double = lambda row: torch.tensor(row, dtype=torch.float64)  # noqa: E731
    return [ActionScores(double(one), double(other)) for one, other in zip(engine, trainer, strict=True)]


def test_shift() -> None:
    true = [[-0.1, -2.0, -0.7, -1.4, -0.3, -3.0], [-1.1, -0.2, -2.7, -0.9, -1.6]]
    ahead, behind = [[*row[1:], -9.0] for row in true], [[-9.0, *row[:-1]] for row in true]
    assert "of the next token" in shift_finding(actions(ahead, true), limits=LIMITS).what  # type: ignore[union-attr]
    assert "of the previous token" in shift_finding(actions(behind, true), limits=LIMITS).what  # type: ignore[union-attr]
    assert shift_finding(actions(true, [*true[:1], [x + 0.1 for x in true[1]]]), limits=LIMITS) is None
    noisy = [[x + 0.01 for x in row] for row in ahead]
    assert shift_finding(actions(noisy, true), limits=LIMITS) is None
    assert shift_finding(actions(ahead[:1], true[:1]), limits=LIMITS) is None, "five tokens agree by chance too easily"


@pytest.mark.parametrize("reported", [0.3, 1.0, 1.7])
def test_temperature(reported: float) -> None:
    logits_N_V = 2 * torch.randn((40, 12), generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    of = lambda temperature: (logits_N_V / temperature).log_softmax(-1)[:, 3]  # noqa: E731
    finding = temperature_finding(lambda t: [ActionScores(of(reported), of(t))], temperature=0.8, limits=LIMITS)
    assert finding is not None
    assert f"temperature {reported:.4g}, the recipe samples at 0.8" in finding.what
    off = of(reported) + 0.01 * torch.randn(40, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    assert temperature_finding(lambda t: [ActionScores(off, of(t))], temperature=0.8, limits=LIMITS) is None


def test_statistics_by_hand() -> None:
    engine = [-1.0] * 200
    trainer = [-1.0 + i / 1000 for i in range(200)]
    statistics = ParityStatistics.of(actions([engine[:50], engine[50:]], [trainer[:50], trainer[50:]]))
    assert statistics.num_tokens == 200
    # 198 of 200 tokens are 99 %; the one with 0.197 is the 198th.
    assert statistics.difference == pytest.approx((0.0995, 0.197, 0.199))
    assert statistics.ratio == pytest.approx((sum(math.exp(i / 1000) for i in range(200)) / 200, math.exp(0.197), math.exp(0.199)))


def test_limits() -> None:
    apart = actions([[0.0, 0.0], [0.0, 0.0]], [[0.0, 0.4], [-0.1, 0.1]])
    assert Limits(0.4).hold(apart)
    assert not Limits(0.39).hold(apart)
    # (0 + 0.4 + 0.1 + 0.1) / 4, over tokens and not over actions.
    assert Limits(0.4, mean=0.1501).hold(apart)
    assert not Limits(0.4, mean=0.1499).hold(apart)
    assert not Limits(0.39, mean=0.1501).hold(apart)
    assert not Limits(1e9, mean=1e9).hold(actions([[0.0]], [[math.nan]]))


def test_an_explanation_must_bring_the_mean_below_its_limit_too() -> None:
    """With a mixture of experts the largest difference may be wide, and a wide one alone is kept by explanations that explain nothing."""
    true = [[-0.1, -2.0, -0.7, -1.4, -0.3, -3.0], [-1.1, -0.2, -2.7, -0.9, -1.6]]
    stale = [[x - 0.5 for x in row] for row in true]
    assert shift_finding(actions(stale, true), limits=Limits(5.0)) is not None
    assert shift_finding(actions(stale, true), limits=Limits(5.0, mean=0.05)) is None
    ahead = [[*row[1:], -9.0] for row in true]
    assert shift_finding(actions(ahead, true), limits=Limits(5.0, mean=0.05)) is not None
    engine, other = actions([[-0.5, -1.0]], [[-0.5, -1.0]]), actions([[-0.5, -1.0]], [[-0.8, -1.2]])
    assert unlike_replica([engine, other], limits=Limits(5.0)) is None
    assert unlike_replica([engine, other], limits=Limits(5.0, mean=0.05)) == 1


def test_the_first_replica_that_is_unlike_the_first() -> None:
    engine = [[-0.5, -1.0], [-2.0]]
    first, second = actions(engine, [[-0.5, -1.0], [-2.0]]), actions(engine, [[-0.5, -1.0005], [-2.0]])
    third = actions(engine, [[-0.5, -1.0], [-2.01]])
    lost = actions(engine, [[-0.5, math.nan], [-2.0]])
    assert unlike_replica([first], limits=LIMITS) is None
    assert unlike_replica([first, second], limits=LIMITS) is None
    assert unlike_replica([first, second, third, lost], limits=LIMITS) == 2
    assert unlike_replica([first, lost], limits=LIMITS) == 1
    # All of them may be wrong and alike: then it is no matter of replicas.
    assert unlike_replica([third, third], limits=LIMITS) is None


def test_unequal_copies() -> None:
    finding = copies_finding(UnequalCopy("norm.weight of layer 3", 5, 1, num_unequal=2))
    assert finding.place == "weights"
    assert "processes 1 and 5 of the trainer should hold the same and do not: norm.weight of layer 3 (2 parts differ" in finding.what
