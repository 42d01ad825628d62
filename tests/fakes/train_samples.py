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


def draw_episode(turns: Sequence[tuple[int, int]], *, group: str = "episode", seed: int = 1) -> list[TrainSample]:
    """The turns of one episode, each with the whole of the turns before in its prompt.

    Args:
        turns: by turn, the tokens that are new in its prompt and the tokens of its action.
    """
    generator = torch.Generator().manual_seed(seed)
    so_far, rows = (), []
    for new_tokens, action_tokens in turns:
        drawn = tuple(torch.randint(0, VOCAB, (new_tokens + action_tokens,), generator=generator).tolist())
        prompt, action = so_far + drawn[:new_tokens], drawn[new_tokens:]
        rows.append(TrainSample(group, prompt, action, 1.5, (-1.0,) * action_tokens, 1.0))
        so_far = prompt + action
    return rows
