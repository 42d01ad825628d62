"""Which replica answers which request: all samples of one prompt one replica, and the same one again while it lives.

Its prefix cache then holds the prompt. New prompts go where least work waits. Pure but for what it remembers; called by pool.py.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from pivotrl.identity import content_id
from pivotrl.rollouts.engine import GenerationRequest

# A run's prompts; forgetting one costs a prefill, nothing else.
_MAX_REMEMBERED = 1 << 17


class Dealer:
    """Deals requests to replicas by prompt.

    >>> def request(prompt, num_samples): return GenerationRequest(prompt, tuple(range(num_samples)), 1.0, 10)
    >>> dealer = Dealer()
    >>> dealer.deal([request((1,), 1), request((2,), 3), request((3,), 1), request((1,), 1)], [0, 1])
    {0: [1], 1: [0, 2, 3]}
    >>> dealer.deal([request((3,), 9), request((2,), 1)], [0, 1])
    {1: [0], 0: [1]}
    >>> dealer.deal([request((3,), 9)], [0])
    {0: [0]}
    """

    def __init__(self) -> None:
        self._home: OrderedDict[str, int] = OrderedDict()

    def deal(self, requests: Sequence[GenerationRequest], replicas: Sequence[int]) -> dict[int, list[int]]:
        """Indices of requests by replica, each list in the order given; replicas without work are left out."""
        if len(replicas) == 1:
            return {replicas[0]: list(range(len(requests)))} if requests else {}
        indices_of: dict[str, list[int]] = {}
        for index, request in enumerate(requests):
            indices_of.setdefault(content_id(list(request.prompt_token_ids)), []).append(index)
        work = {prompt: sum(_work(requests[index]) for index in indices) for prompt, indices in indices_of.items()}
        load = dict.fromkeys(replicas, 0)
        for prompt in indices_of:
            if self._home.get(prompt) in load:
                load[self._home[prompt]] += work[prompt]
        # The largest first, so that the last ones even out; sorted() keeps the order of equals.
        for prompt in sorted(indices_of, key=lambda prompt: -work[prompt]):
            if self._home.get(prompt) not in load:
                self._home[prompt] = min(replicas, key=lambda replica: load[replica])
                load[self._home[prompt]] += work[prompt]
            self._home.move_to_end(prompt)
        homes = {prompt: self._home[prompt] for prompt in indices_of}
        while len(self._home) > _MAX_REMEMBERED:
            self._home.popitem(last=False)
        shares: dict[int, list[int]] = {}
        for prompt, indices in indices_of.items():
            shares.setdefault(homes[prompt], []).extend(indices)
        return {replica: sorted(indices) for replica, indices in shares.items()}


def _work(request: GenerationRequest) -> int:
    """Tokens that a replica passes through the model at most: the prompt once, and every sample's."""
    return len(request.prompt_token_ids) + len(request.seeds) * request.max_new_tokens
