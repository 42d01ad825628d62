"""Log-probs of given completions under a trainer's policy, outside the loop: the probe after a hand-over, the diagnostics of `eval`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from pivotrl.training.batching import train_batch, train_micro_batches
from pivotrl.types import TrainSample

if TYPE_CHECKING:
    from pivotrl.training.protocols import PolicyTrainer

type Completed = tuple[tuple[int, ...], tuple[int, ...]]
"""Prompt and completion, token ids."""


def completion_logprobs(
    trainer: PolicyTrainer, completed_N: Sequence[Completed], *, temperature: float, micro_batch_tokens: int
) -> list[tuple[float, ...]]:
    """Log-probs of every completion's tokens at a temperature, without gradient, in the order given."""
    # Padded micro-batches take rows longest first; sorted the same way before, they come back in a known order.
    order = sorted(range(len(completed_N)), key=lambda i: -len(completed_N[i][0]) - len(completed_N[i][1]))
    samples = [TrainSample(str(i), *completed_N[i], 0.0, (0.0,) * len(completed_N[i][1])) for i in order]
    batches = train_micro_batches(train_batch(samples), batching="padded", micro_batch_tokens=micro_batch_tokens, skip_zero_variance=False)
    rows = [row for found in trainer.token_logprobs(batches, temperature=temperature, reference=False) for row in found.tolist()]
    scores: dict[int, tuple[float, ...]] = {}
    for i, row in zip(order, rows, strict=True):
        prompt, completion = completed_N[i]
        scores[i] = tuple(row[len(prompt) : len(prompt) + len(completion)])
    return [scores[i] for i in range(len(completed_N))]
