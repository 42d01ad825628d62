"""Router replay: the experts that a forward pass chose, chosen again in later passes over the same tokens.

Where a batch of rollouts gets several updates, the policy moves between them, and a token whose experts change jumps in probability; the
ratio to the old log-probs then measures the router, not the policy. The trainer records every layer's choice in the pass for the old
log-probs and replays it in the updates. Upstream's `RouterReplay` does the choosing; a router follows its gate's weights all the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from enum import StrEnum

import torch
import torch.distributed as dist

from pivotrl.megatron.upstream import PLATFORM, RouterReplay, RouterReplayAction
from pivotrl.objective.microbatch import MicroBatch

COVERAGE = "routes_replayed"


class _Mode(StrEnum):
    OFF = "off"
    RECORD = "record"
    REPLAY = "replay"


class RouterMemory:
    """The choices of one model's routers on this process, by micro-batch."""

    def __init__(self, chunks: Sequence[torch.nn.Module]) -> None:
        self._routers = [_routers(chunk) for chunk in chunks]
        self._choices: dict[tuple[int, bytes], list[torch.Tensor]] = {}
        self._mode = _Mode.OFF
        # Choices of tokens in routers since the last `take_coverage`.
        self._num_replayed = self._num_missing = 0

    def take_coverage(self) -> dict[str, float]:
        """Share of the routers' choices, in passes that replayed since the last call, that were remembered; collective, equal everywhere.

        Empty where nothing was to be replayed. Anything below 1 is a pass over tokens that were not in the pass before: the ratio of those
        then measures the router as well.
        """
        counts = torch.tensor([self._num_replayed, self._num_missing], dtype=torch.float64, device=PLATFORM.device)
        self._num_replayed = self._num_missing = 0
        dist.all_reduce(counts)
        replayed, missing = counts.tolist()
        return {COVERAGE: replayed / (replayed + missing)} if replayed + missing else {}

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Passes inside the block choose freely and are remembered, in place of all before."""
        self._choices.clear()
        with self._in_mode(_Mode.RECORD):
            yield

    @contextmanager
    def replaying(self) -> Iterator[None]:
        """Passes inside the block, over micro-batches that were remembered, choose as then; others choose freely."""
        with self._in_mode(_Mode.REPLAY):
            yield

    @contextmanager
    def forward(self, chunk_index: int, micro_batch: MicroBatch) -> Iterator[None]:
        """Around the forward pass of one chunk over one micro-batch."""
        routers, key = self._routers[chunk_index], (chunk_index, micro_batch.token_ids_B_T.cpu().numpy().tobytes())
        num_choices = int(micro_batch.lengths_B.sum()) * len(routers)
        if self._mode is _Mode.REPLAY and key in self._choices:
            self._num_replayed += num_choices
            for router, chosen in zip(routers, self._choices[key], strict=True):
                router.clear_indices()
                router.set_target_indices(chosen)
                router.set_router_replay_action(RouterReplayAction.REPLAY_FORWARD)
        else:
            self._num_missing += num_choices if self._mode is _Mode.REPLAY else 0
            for router in routers:
                router.clear_router_replay_action()
                if self._mode is _Mode.RECORD:
                    router.set_router_replay_action(RouterReplayAction.RECORD)
        yield
        if self._mode is _Mode.RECORD:
            self._choices[key] = [chosen for router in routers if (chosen := router.get_recorded_indices()) is not None]

    @contextmanager
    def _in_mode(self, mode: _Mode) -> Iterator[None]:
        self._mode = mode
        try:
            yield
        finally:
            self._mode = _Mode.OFF
            for routers in self._routers:
                for router in routers:
                    router.clear_router_replay_action()


def _routers(chunk: torch.nn.Module) -> list[RouterReplay]:
    return [router for module in chunk.modules() if isinstance(router := getattr(module, "router_replay", None), RouterReplay)]
