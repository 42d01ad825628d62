"""The engine's experts for a micro-batch's tokens, in the order in which this rank's routers see the tokens.

Consumes `MicroBatch.routes_B`, which every process holds whole and as bytes; produces one tensor per router of a model chunk, for this rank's
tokens alone: its context parallel slices, its part of the sequence, and the layers of its pipeline stage. Expert parallelism changes nothing:
a router chooses before tokens are sent away. Called by replay.py. Suffixes: B = rows, T = tokens of a padded row, S = tokens of the stream on
this rank, R = rows of the stream, N = tokens with a route, L = layers with experts, K = experts per token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from pivotrl.errors import UserError
from pivotrl.megatron.streams import StreamLayout, TokenPlaces, token_places
from pivotrl.objective.microbatch import MicroBatch
from pivotrl.rollouts.routes import expert_indices, num_routed_tokens
from pivotrl.types import RoutedExperts

FREE = -1
"""In the place of an expert: the token has no route and chooses as if nothing were replayed."""


@dataclass(frozen=True, slots=True)
class RouteTargets:
    """What one chunk's routers are told about one micro-batch."""

    chosen: list[torch.Tensor]
    """By router: int16 [S * rows of the stream, K]; FREE for a token without a route."""
    num_routed: int
    """Tokens of the whole stream with a route, among those that anything reads."""
    num_read: int
    """Tokens of the whole stream whose layers' outputs something reads: all but each row's last. Padding is none."""


@dataclass(frozen=True, slots=True)
class RouterShape:
    """The numbers of a model that routes must fit.

    >>> RouterShape(num_layers=2, experts_per_token=8, num_experts=128).num_layers
    2
    """

    num_layers: int
    """Layers with experts in the whole model."""
    experts_per_token: int
    num_experts: int


def check_routes(micro_batches: Sequence[MicroBatch], shape: RouterShape) -> None:
    """Refuses routes of another model. Pure, so that all processes refuse alike, before one waits for another.

    Raises:
        UserError: naming the numbers.
    """
    for routes in (routes for batch in micro_batches for routes in batch.routes_B or () if routes is not None):
        found = (routes.num_layers, routes.experts_per_token)
        if found != (shape.num_layers, shape.experts_per_token):
            raise UserError(
                f"the engine returned routes of {found[0]} layers with {found[1]} experts per token; the trainer's model has {shape.num_layers} "
                f"layers with experts and {shape.experts_per_token} experts per token",
                rule="with moe.router_replay rollout engine and trainer are the same model",
                fix="give both the same checkpoint, or set moe.router_replay to none",
            )
        largest = int(expert_indices(routes).max(initial=0))
        if largest >= shape.num_experts:
            raise UserError(
                f"the engine returned expert {largest}; the trainer's model has {shape.num_experts} experts per layer",
                rule="experts are counted from 0",
                fix="give engine and trainer the same checkpoint, or set moe.router_replay to none",
            )


def route_targets(
    batch: MicroBatch, layout: StreamLayout, *, layers: Sequence[int], experts_per_token: int, sequence_parallel_rank: int
) -> RouteTargets:
    """The targets of the routers of one chunk.

    Args:
        layers: the chunk's layers with experts, counted over those of the whole model, from 0.
        sequence_parallel_rank: this rank's place among those that share the residual stream's tokens; 0 where they do not.
    """
    places = token_places(batch, layout)
    routes_B = batch.routes_B or (None,) * len(batch.lengths_B)
    source, is_read = _sources(routes_B, batch.lengths_B.tolist(), places)
    own_S_R = source.reshape(places.rows, places.total)[:, places.mine_S.numpy()].T
    part = len(own_S_R) // layout.sequence_parallel_size
    own = own_S_R[sequence_parallel_rank * part : (sequence_parallel_rank + 1) * part].reshape(-1)
    chosen = np.full((len(own), len(layers), experts_per_token), FREE, dtype=np.int16)
    start = 0
    for routes in (routes for routes in routes_B if routes is not None):
        routed_N_L_K = expert_indices(routes)
        is_here = (own >= start) & (own < start + len(routed_N_L_K))
        chosen[is_here] = routed_N_L_K[own[is_here] - start][:, list(layers)]
        start += len(routed_N_L_K)
    by_router = [one.contiguous() for one in torch.from_numpy(chosen).unbind(1)]
    return RouteTargets(by_router, int((is_read & (source != FREE)).sum()), int(is_read.sum()))


def _sources(routes_B: Sequence[RoutedExperts | None], lengths: Sequence[int], places: TokenPlaces) -> tuple[np.ndarray, np.ndarray]:
    """By position of the whole stream: which row of all routes one after the other speaks about it (FREE: none), and whether it is read.

    A token of one row's completion may stand in the prompt of another, an episode's later turn; the engine routed it twice. The route under
    which it was sampled counts. Among prompts the shorter row's counts, whose first sampled token hangs on it.
    """
    place_B_T = places.place_B_T.numpy()
    source, is_read = np.full(places.rows * places.total, FREE), np.zeros(places.rows * places.total, dtype=bool)
    completions: list[tuple[np.ndarray, np.ndarray]] = []
    starts = np.cumsum([0, *(0 if one is None else sum(num_routed_tokens(one)) for one in routes_B)])
    for row in sorted(range(len(lengths)), key=lambda row: -lengths[row]):
        place_T = place_B_T[row, : max(lengths[row] - 1, 0)]
        is_read[place_T] = True
        routes = routes_B[row]
        if routes is None:
            continue
        num_prompt, num_completion = num_routed_tokens(routes)
        numbers = starts[row] + np.arange(num_prompt + num_completion)
        place_N = place_T[len(place_T) - len(numbers) :]
        source[place_N[:num_prompt]] = numbers[:num_prompt]
        completions.append((place_N[num_prompt:], numbers[num_prompt:]))
    for place_N, numbers in completions:
        source[place_N] = numbers
    return source, is_read
