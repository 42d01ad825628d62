"""Why engine and trainer disagree: explanations that name one place, tried on digests and on scores.

Pure but for the `rescore` it is given; called by training/parity.py once a check has failed. An explanation counts only where it removes the
disagreement: a shift or a temperature under which every token agrees, a tensor whose digest is another tensor's.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from pivotrl.weights.digest import digest_like

if TYPE_CHECKING:
    from pivotrl.megatron.copies import UnequalCopy

# Exact in every number format, so that a scaled tensor's digest can be found again.
_SCALES = (0.0, 0.25, 0.5, 2.0, 4.0, -1.0)
# Below it, agreement after a shift would be chance.
_MIN_SHIFTED_TOKENS = 8
_STALE_FRAC = 0.5
_TEMPERATURE_SPAN, _GRID_POINTS, _REFINEMENTS = 4.0, 17, 24
_GOLDEN = (math.sqrt(5) - 1) / 2
ENGINE = "engine"
_EXPERT = re.compile(r"^(.*\.experts)\.(\d+)\.(.*)$")


@dataclass(frozen=True, slots=True)
class Finding:
    """The first place that differs.

    >>> Finding("weights", "tensor 'a' differs", "push again").place
    'weights'
    """

    place: str
    """weights, template, shift, temperature, replicas, embedding, layer <i>, final norm, head, or engine."""
    what: str
    fix: str


@dataclass(frozen=True, slots=True)
class ActionScores:
    """One action's log-probs, float64 [T], as both sides give them."""

    engine_T: torch.Tensor
    trainer_T: torch.Tensor

    @property
    def differences(self) -> torch.Tensor:
        """|trainer - engine|, [T]."""
        return (self.trainer_T - self.engine_T).abs()


@dataclass(frozen=True, slots=True)
class Limits:
    """How far two lists of log-probs may lie apart and count as the same; of the recipe's `train.parity`."""

    largest: float
    mean: float | None = None

    def hold(self, actions: Sequence[ActionScores]) -> bool:
        """NaN counts as infinite."""
        differences = torch.cat([action.differences for action in actions]).nan_to_num(nan=math.inf)
        return float(differences.max()) <= self.largest and (self.mean is None or float(differences.mean()) <= self.mean)


def weights_finding(
    expected: Iterable[tuple[str, torch.Tensor]], held: Mapping[str, str], *, engine_version: int, trainer_version: int
) -> Finding | None:
    """The first tensor of the trainer that the engine does not hold.

    Args:
        expected: the trainer's tensors by Hugging Face name, in the engine's number format, read once; names that the engine does not have
            must be left out, because engines may fuse tensors.
        held: `Engine.weight_digests`.
    """
    digests: dict[str, str] = {}
    wrong: dict[str, float | None] = {}
    for name, tensor in expected:
        digests[name] = digest_like(tensor, held[name])
        if digests[name] != held[name]:
            wrong[name] = next((scale for scale in _SCALES if digest_like(tensor * scale, held[name]) == held[name]), None)
    if not wrong:
        return None
    first, count = min(wrong), f"{len(wrong)} of {len(digests)} tensors differ"
    if engine_version != trainer_version or len(wrong) > _STALE_FRAC * len(digests):
        what = f"stale weights: {count}, first {first!r}; the engine states policy version {engine_version}, the trainer is at {trainer_version}"
        return Finding("weights", what, "push the trainer's weights, and look at what the last push reported")
    owners = {digest: name for name, digest in digests.items()}
    for name in sorted(wrong):
        owner = owners.get(held[name], name)
        if owner != name:
            return Finding("weights", f"{_swap(name, owner)} ({count})", "compare the engine's mapping of names with the checkpoint's")
    for name, scale in sorted(wrong.items()):
        if scale is not None:
            kind = "wrong expert scale" if _EXPERT.match(name) else "wrong scale"
            return Finding("weights", f"{kind}: the engine holds {scale:g} times tensor {name!r} ({count})", "look at what loads that tensor")
    return Finding("weights", f"tensor {first!r} differs ({count})", "look at what loads that tensor")


def _swap(name: str, owner: str) -> str:
    here, there = _EXPERT.match(name), _EXPERT.match(owner)
    if here and there and here[1] == there[1] and here[3] == there[3]:
        return f"swapped experts: {here[1]} holds expert {there[2]}'s {here[3]!r} in place of expert {here[2]}'s"
    return f"swapped tensors: {name!r} holds {owner!r}"


def copies_finding(unequal: UnequalCopy) -> Finding:
    """Two processes of the trainer hold different bytes of what should be the same; the engine was sent one of the two."""
    what = (
        f"processes {unequal.other} and {unequal.process} of the trainer should hold the same and do not: {unequal.name} "
        f"({unequal.num_unequal} {'part differs' if unequal.num_unequal == 1 else 'parts differ'} between its copies)"
    )
    return Finding("weights", what, "go on from the last checkpoint, which holds one copy; if it comes back, test the devices of both")


def unlike_replica(replicas: Sequence[Sequence[ActionScores]], *, limits: Limits) -> int | None:
    """The first data parallel replica whose log-probs are not those of replica 0; None where all are alike."""
    first = [action.trainer_T for action in replicas[0]]
    for number, actions in enumerate(replicas[1:], 1):
        if not limits.hold([ActionScores(ours_T, action.trainer_T) for ours_T, action in zip(first, actions, strict=True)]):
            return number
    return None


def replica_finding(replica: int) -> Finding:
    """Of replicas that differed and, asked again, do not."""
    what = (
        f"data parallel replica {replica} gave the same tokens other log-probs than replica 0, from equal weights, and layer by layer, "
        "asked again, the same: it computes wrongly at times"
    )
    return Finding("replicas", what, "test the devices of that replica's processes; the same command goes on from the last checkpoint")


def shift_finding(actions: Sequence[ActionScores], *, limits: Limits) -> Finding | None:
    """Whether the engine's list is the trainer's, one token further or one token back."""
    long = [action for action in actions if len(action.engine_T) > 1]
    if sum(len(action.engine_T) - 1 for action in long) < _MIN_SHIFTED_TOKENS:
        return None
    for offset, word in ((1, "next"), (-1, "previous")):
        cut = slice(None, -1) if offset == 1 else slice(1, None)
        moved = slice(1, None) if offset == 1 else slice(None, -1)
        if limits.hold([ActionScores(action.engine_T[cut], action.trainer_T[moved]) for action in long]):
            what = f"off by one: the log-prob that the engine reports for a token is the one of the {word} token"
            return Finding("shift", what, "align the engine's list of log-probs with its tokens")
    return None


def temperature_finding(rescore: Callable[[float], Sequence[ActionScores]], *, temperature: float, limits: Limits) -> Finding | None:
    """The one temperature under which all tokens agree: a grid over a factor of 4 either way, then golden section on the mean difference.

    Args:
        rescore: the same actions with the trainer's log-probs at another temperature.
        temperature: the recipe's, at which they disagree.
    """

    def mean_difference(log_temperature: float) -> float:
        differences = torch.cat([action.differences for action in rescore(math.exp(log_temperature))])
        return float(differences.mean())

    span, center = math.log(_TEMPERATURE_SPAN), math.log(temperature)
    grid = [center - span + 2 * span * i / (_GRID_POINTS - 1) for i in range(_GRID_POINTS)]
    best = min(range(_GRID_POINTS), key=[mean_difference(point) for point in grid].__getitem__)
    low, high = grid[max(best - 1, 0)], grid[min(best + 1, _GRID_POINTS - 1)]
    left, right = high - _GOLDEN * (high - low), low + _GOLDEN * (high - low)
    at_left, at_right = mean_difference(left), mean_difference(right)
    for _ in range(_REFINEMENTS):
        if at_left < at_right:
            high, right, at_right = right, left, at_left
            left = high - _GOLDEN * (high - low)
            at_left = mean_difference(left)
        else:
            low, left, at_left = left, right, at_right
            right = low + _GOLDEN * (high - low)
            at_right = mean_difference(right)
    fitted = math.exp((low + high) / 2)
    if not limits.hold(rescore(fitted)):
        return None
    what = f"wrong temperature: every log-prob of the engine is that of temperature {fitted:.4g}, the recipe samples at {temperature:g}"
    return Finding("temperature", what, "report log-probs after temperature, and pass sampling.temperature to the engine")
