"""What a rollout engine is: token ids in, token ids out, under weights whose version it states.

Consumes `GenerationRequest`s, produces `Completion`s in the order of the requests. Never sees a string and never re-tokenizes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from pivotrl.errors import UserError
from pivotrl.types import Completion

if TYPE_CHECKING:
    import torch


# As torch says it of a GPU and of the CPU, and vLLM where another process, such as a killed engine that is still ending, holds the GPU's memory.
_MEMORY_IS_SHORT = ("out of memory", "can't allocate memory", "free memory on device", "error in memory profiling")


class EngineError(RuntimeError):
    """The engine failed (death, timeout, out of memory). The caller turns it into infra verdicts, never into reward 0."""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that memory was short, which may pass: no fault of the model, the recipe or this code.

    >>> is_out_of_memory(RuntimeError("CUDA error: out of memory")), is_out_of_memory(ValueError("tensor 'w' is missing"))
    (True, False)
    """
    return isinstance(error, MemoryError) or any(sign in str(error).lower() for sign in _MEMORY_IS_SHORT)


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

    def weight_digests(self) -> Mapping[str, str]:
        """What the engine was given last: a digest of every required tensor, by Hugging Face name, in the engine's type, by the sender's algorithm.

        Before the first `load_weights`, of the checkpoint it was built on. Empty for an engine that holds no model. Taken from the model
        itself where its tensors can be read back (transformers), from what was received where they are packed (vLLM): a digest does not
        prove that a packed copy is fresh, a log-prob does.
        """
        ...

    def close(self) -> None:
        """Frees memory and ends processes the engine started."""
        ...


@runtime_checkable
class ReceivingEngine(Engine, Protocol):
    """An engine of several processes, each of which can take part in a broadcast of weights itself."""

    @property
    def num_receivers(self) -> int:
        """How many: each has a rank of its own in the broadcasts. Where it is 1, `load_weights` is what takes new weights."""
        ...

    def receive_weights(self, messages: Iterator[Mapping[str, Any]], invitation: Mapping[str, Any], version: int) -> Mapping[str, float]:
        """As `load_weights`, of tensors that the engine's processes receive, each all of them.

        Args:
            messages: the announcements of the buckets, see rollouts/incoming.py.
            invitation: to the group of the broadcasts; its rank is that of the first process.

        Returns:
            "read_s" and "load_s", of the slowest process: seconds to receive and check, and to load.
        """
        ...


@runtime_checkable
class MeteredEngine(Engine, Protocol):
    """An engine to which things happen that a run should state."""

    def take_cost(self) -> Mapping[str, float]:
        """What happened since the last call, under registered metric names (`pivotrl/metrics.py`)."""
        ...


def take_cost(engine: Engine) -> Mapping[str, float]:
    """`MeteredEngine.take_cost`; nothing for an engine that lives and dies with its process."""
    return engine.take_cost() if isinstance(engine, MeteredEngine) else {}


def check_requests(requests: Sequence[GenerationRequest], *, max_total_tokens: int, vocab_size: int) -> None:
    """Refuses requests that no model of this context and vocabulary could serve, before any work is done.

    Raises:
        UserError: for a prompt that leaves no room for one new token.
        ValueError: for an empty prompt, a token id outside the vocabulary, no seeds, or a bad temperature or cap.
    """
    for request in requests:
        prompt = request.prompt_token_ids
        if bad := [token for token in prompt if not 0 <= token < vocab_size]:
            raise ValueError(f"token id {bad[0]} of a prompt is outside the vocabulary of {vocab_size}")
        if not prompt or not request.seeds or request.temperature < 0 or request.max_new_tokens < 1:
            raise ValueError(f"a request needs a prompt, seeds, temperature >= 0 and max_new_tokens >= 1; got {request}")
        if len(prompt) >= max_total_tokens:
            raise UserError(
                f"a prompt has {len(prompt)} tokens",
                rule=f"the model's context holds {max_total_tokens} tokens, prompt and completion together",
                fix=f"set render.max_prompt_tokens below {max_total_tokens}",
            )
