"""Router replay: experts that were chosen elsewhere, chosen again in the trainer's passes over the same tokens.

Two mismatches are the router's and not the policy's, each with a mode of `moe.router_replay`:

- `updates`: where a batch of rollouts gets several updates, a token whose experts change between them jumps in probability. The trainer
  records every layer's choice in the pass for the old log-probs and replays it in the updates.
- `rollout`: the engine's rounding sends a token to other experts than the trainer's would. The engine says which it chose
  (`Completion.routed_experts`); the trainer replays them in the pass for the old log-probs and in the updates.

Upstream's `RouterReplay` puts the experts in the place of the router's own; their probabilities are the gate's, gradient and all. The
reference model of the KL term always chooses freely: it is another policy, and no engine routed for it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from enum import StrEnum
from typing import Any

import torch
import torch.distributed as dist

from pivotrl.config.schema import MoeConfig
from pivotrl.megatron import upstream
from pivotrl.megatron.architecture import LayerKind, layers, num_experts
from pivotrl.megatron.logprobs import stream_layout
from pivotrl.megatron.route_targets import FREE, RouterShape, check_routes, route_targets
from pivotrl.megatron.upstream import PLATFORM, RouterReplay, RouterReplayAction, parallel_state
from pivotrl.objective.microbatch import MicroBatch

COVERAGE = "routes_replayed"


class _Mode(StrEnum):
    OFF = "off"
    RECORD = "record"
    REPLAY = "replay"


type _TopK = Callable[..., tuple[torch.Tensor, torch.Tensor]]


class PartialReplay(RouterReplay):
    """Upstream's replay for tokens of which some have no route: those choose freely."""

    is_partial = False
    """Whether the target says FREE of some tokens."""

    def get_replay_topk(
        self,
        scores: torch.Tensor,
        topk: int,
        num_groups: int | None = None,
        group_topk: int | None = None,
        default_compute_topk: _TopK | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Scores and experts [tokens, topk]. Scores are the gate's: upstream makes probabilities of them as it does for its own choice."""
        assert default_compute_topk is not None
        if self.router_replay_action is not RouterReplayAction.REPLAY_FORWARD:
            return super().get_replay_topk(scores, topk, num_groups, group_topk, default_compute_topk)
        assert self.target_topk_idx is not None
        target = self.target_topk_idx.to(scores.device, torch.int64)
        if self.is_partial:
            with torch.no_grad():
                _, own = default_compute_topk(scores, topk, num_groups, group_topk)
            target = torch.where(target == FREE, own, target)
        return scores.gather(1, target), target


class RouterMemory(ABC):
    """What one model's routers are to choose on this process."""

    def __init__(self, chunks: Sequence[torch.nn.Module]) -> None:
        self._routers = [_routers(chunk) for chunk in chunks]
        self._mode = _Mode.OFF
        # Choices of tokens in routers in the last update.
        self._num_replayed = self._num_missing = 0

    @abstractmethod
    def for_old_logprobs(self, micro_batches: Sequence[MicroBatch]) -> AbstractContextManager[None]:
        """Around the pass of the policy that gives old log-probs."""

    @contextmanager
    def for_update(self, micro_batches: Sequence[MicroBatch]) -> Iterator[None]:  # noqa: ARG002 - what they bring is checked below
        """Around an update's passes, recomputation included; coverage is counted anew."""
        self._num_replayed = self._num_missing = 0
        with self._in_mode(_Mode.REPLAY):
            yield

    @abstractmethod
    def forward(self, chunk_index: int, micro_batch: MicroBatch) -> AbstractContextManager[None]:
        """Around the forward pass of one chunk over one micro-batch."""

    def take_coverage(self) -> dict[str, float]:
        """Share of the routers' choices in the last update that were replayed; collective, equal everywhere.

        Empty where nothing was to be replayed. Anything below 1 is a pass over tokens that chose freely: the ratio of those then measures
        the router as well.
        """
        counts = torch.tensor([self._num_replayed, self._num_missing], dtype=torch.float64, device=PLATFORM.device)
        dist.all_reduce(counts)
        replayed, missing = counts.tolist()
        return {COVERAGE: replayed / (replayed + missing)} if replayed + missing else {}

    @contextmanager
    def _in_mode(self, mode: _Mode) -> Iterator[None]:
        self._mode = mode
        try:
            yield
        finally:
            self._mode = _Mode.OFF
            for router in (router for routers in self._routers for router in routers):
                router.clear_router_replay_action()
                router.clear_indices()

    def _replay(self, chunk_index: int, chosen: Sequence[torch.Tensor], *, is_partial: bool) -> None:
        for router, target in zip(self._routers[chunk_index], chosen, strict=True):
            router.clear_indices()
            router.is_partial = is_partial
            router.set_target_indices(target)
            router.set_router_replay_action(RouterReplayAction.REPLAY_FORWARD)


class RecordedRoutes(RouterMemory):
    """`updates`: the choices of the pass for the old log-probs, by micro-batch."""

    def __init__(self, chunks: Sequence[torch.nn.Module]) -> None:
        super().__init__(chunks)
        self._choices: dict[tuple[int, bytes], list[torch.Tensor]] = {}

    @contextmanager
    def for_old_logprobs(self, micro_batches: Sequence[MicroBatch]) -> Iterator[None]:  # noqa: ARG002 - they bring nothing to replay
        """The passes choose freely and are remembered, in place of all before."""
        self._choices.clear()
        with self._in_mode(_Mode.RECORD):
            yield

    @contextmanager
    def forward(self, chunk_index: int, micro_batch: MicroBatch) -> Iterator[None]:
        """Records, or replays a micro-batch that was remembered; another chooses freely."""
        routers, key = self._routers[chunk_index], (chunk_index, micro_batch.token_ids_B_T.cpu().numpy().tobytes())
        num_choices = int(micro_batch.lengths_B.sum()) * len(routers)
        if self._mode is _Mode.REPLAY and key in self._choices:
            self._num_replayed += num_choices
            self._replay(chunk_index, self._choices[key], is_partial=False)
        else:
            self._num_missing += num_choices if self._mode is _Mode.REPLAY else 0
            for router in routers:
                router.clear_router_replay_action()
                if self._mode is _Mode.RECORD:
                    router.set_router_replay_action(RouterReplayAction.RECORD)
        yield
        if self._mode is _Mode.RECORD:
            self._choices[key] = [chosen for router in routers if (chosen := router.get_recorded_indices()) is not None]


class RolloutRoutes(RouterMemory):
    """`rollout`: the engine's choices, as a micro-batch brings them. Keeps nothing."""

    def __init__(self, chunks: Sequence[torch.nn.Module], hf: Any) -> None:
        super().__init__(chunks)
        numbers = [number for number, kinds in enumerate(layers(hf), start=1) if LayerKind.MOE in kinds]
        self._layers = [[numbers.index(router.layer_number or 0) for router in routers] for routers in self._routers]
        chunk: Any = upstream.unwrap_model(chunks[0])
        config = chunk.config
        self._layout = stream_layout(config)
        self._shape = RouterShape(len(numbers), config.moe_router_topk, num_experts(hf))

    @contextmanager
    def for_old_logprobs(self, micro_batches: Sequence[MicroBatch]) -> Iterator[None]:
        """Replays as the updates do; raises UserError for routes of another model."""
        check_routes(micro_batches, self._shape)
        with self._in_mode(_Mode.REPLAY):
            yield

    @contextmanager
    def for_update(self, micro_batches: Sequence[MicroBatch]) -> Iterator[None]:
        """Raises UserError for routes of another model, in all processes alike, before one waits for another."""
        check_routes(micro_batches, self._shape)
        with super().for_update(micro_batches):
            yield

    @contextmanager
    def forward(self, chunk_index: int, micro_batch: MicroBatch) -> Iterator[None]:
        """Replays what has a route; the rest chooses freely."""
        if self._mode is _Mode.REPLAY:
            targets = route_targets(
                micro_batch,
                self._layout,
                layers=self._layers[chunk_index],
                experts_per_token=self._shape.experts_per_token,
                sequence_parallel_rank=parallel_state.get_tensor_model_parallel_rank() if self._layout.sequence_parallel_size > 1 else 0,
            )
            self._num_replayed += targets.num_routed * len(targets.chosen)
            self._num_missing += (targets.num_read - targets.num_routed) * len(targets.chosen)
            self._replay(chunk_index, targets.chosen, is_partial=True)
        yield


def router_memory(chunks: Sequence[torch.nn.Module], moe: MoeConfig, hf: Any) -> RouterMemory | None:
    """The memory that `moe.router_replay` asks for; None where it asks for none.

    Args:
        hf: the transformers configuration, as `families.read_family` returns it.
    """
    match moe.router_replay:
        case "none":
            return None
        case "updates":
            return RecordedRoutes(chunks)
        case "rollout":
            return RolloutRoutes(chunks, hf)


def _routers(chunk: torch.nn.Module) -> list[PartialReplay]:
    """The routers' replays, in the model's order, each in the place of the one that upstream gave it."""
    found: list[PartialReplay] = []
    for router in chunk.modules():
        given = getattr(router, "router_replay", None)
        if not isinstance(given, RouterReplay):
            continue
        replay = PartialReplay()
        replay.layer_number = given.layer_number
        setattr(router, "router_replay", replay)  # noqa: B010 - torch's modules declare only tensors and modules
        found.append(replay)
    return found
