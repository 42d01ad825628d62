"""Groups of random samples by their lengths: what batching gets from a step's rollouts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from pivotrl.types import TrainSample

VOCAB = 96


def draw_samples(lengths: Mapping[str, tuple[int, Sequence[int]]], *, seed: int = 0) -> list[TrainSample]:
    """Samples of random tokens with advantages of both signs.

    Args:
        lengths: by group, the prompt's tokens and the tokens of each action.
    """
    generator = torch.Generator().manual_seed(seed)

    def draw(count: int) -> tuple[int, ...]:
        return tuple(torch.randint(0, VOCAB, (count,), generator=generator).tolist())

    rows = []
    for group, (prompt_tokens, action_tokens) in lengths.items():
        prompt = draw(prompt_tokens)
        for index, count in enumerate(action_tokens):
            rows.append(TrainSample(group, prompt, draw(count), (-1.0) ** index * (1 + index), (-1.0,) * count, 1.0))
    return rows
