"""What a rollout engine is: token ids in, token ids out, under weights whose version it states.

Consumes `GenerationRequest`s, produces `Completion`s in the order of the requests. Never sees a string and never re-tokenizes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from pivotrl.types import Completion

if TYPE_CHECKING:
    import torch


class EngineError(RuntimeError):
    """The engine failed (death, timeout, out of memory). The caller turns it into infra verdicts, never into reward 0."""


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """n samples of one prompt, each with its own seed, so that a result does not depend on what else is in the batch."""

    prompt_token_ids: tuple[int, ...]
    seeds: tuple[int, ...]
    """One derived seed (`identity.derive_seed`) per sample."""
    temperature: float
    """Greedy where 0 (evaluation only)."""
    max_new_tokens: int


class Engine(Protocol):
    """Lifecycle: built with weights of policy version 0, `generate` any number of times, `load_weights` between, `close` once."""

    @property
    def policy_version(self) -> int:
        """Version of the weights that the next `generate` uses; attached to every completion."""
        ...

    def generate(self, requests: Sequence[GenerationRequest]) -> list[tuple[Completion, ...]]:
        """Completions by request, then by seed.

        Raises:
            EngineError: where the engine failed; no partial result is returned.
        """
        ...

    def load_weights(self, named_tensors: Iterable[tuple[str, torch.Tensor]], version: int) -> None:
        """Replaces all weights (Hugging Face names) and drops every cache of the old ones.

        Raises:
            ValueError: for an unknown, missing or misshapen tensor, naming it; the engine must not be used after that.
        """
        ...

    def close(self) -> None:
        """Frees memory and ends processes the engine started."""
        ...
