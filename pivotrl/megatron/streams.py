"""Which tokens of a micro-batch go through the model, in which order, and which hidden state scores which token.

The loss sees rows [B, T]; the model sees a stream, built here. `padded` sends the rows as they are. `packed` lays them one after the
other without their padding; a row that begins another one, as a turn of an episode does, is read from that one. `shared_prefix` lays each
group's prefix once and its actions behind it, so that a prefix of P tokens costs P and not G * P. All three give the same scores: a token is
predicted from the same tokens at the same positions in each.
Pure: no model, no process group. Called by logprobs.py. Suffixes: B = rows, T = tokens of a padded row, S = tokens of the stream,
N = scored tokens on this rank.

Under context parallelism every segment of a stream is dealt out as slices.py says, and padded for that.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise

import torch

from pivotrl.megatron.shared_prefix import Branches, SharedPrefixParams, StreamParams
from pivotrl.megatron.slices import own_positions
from pivotrl.objective.microbatch import MicroBatch
from pivotrl.objective.nesting import hosts

_NOWHERE = -1


@dataclass(frozen=True, slots=True)
class StreamLayout:
    """How ranks share a stream.

    >>> StreamLayout(context_parallel_size=2).segment_multiple, StreamLayout(2, 0, 4).total_multiple
    (4, 8)
    """

    context_parallel_size: int = 1
    context_parallel_rank: int = 0
    sequence_parallel_size: int = 1
    """Tensor parallel size where the residual stream is split along the sequence, else 1."""

    @property
    def segment_multiple(self) -> int:
        """Every segment's length is a multiple of it."""
        return 1 if self.context_parallel_size == 1 else 2 * self.context_parallel_size

    @property
    def total_multiple(self) -> int:
        """The stream's length is a multiple of it."""
        return math.lcm(self.segment_multiple, self.context_parallel_size * self.sequence_parallel_size)


@dataclass(frozen=True, slots=True)
class TokenStream:
    """This rank's part of a micro-batch's tokens as the model takes them."""

    token_ids_B_S: torch.Tensor
    """int64; one row except where `padded`."""
    positions_B_S: torch.Tensor
    """int64, each token's position in its own sequence."""
    packing: StreamParams | None
    """What attention and Mamba layers need to keep the stream's sequences apart; None where `padded`."""
    padding_B_S: torch.Tensor | None
    """bool, true at padding, where `padded`; else None, since `packing` says which tokens count."""
    source_N: torch.Tensor
    """Which hidden state, of [S, B] flattened, predicts each scored token; one may predict the first token of several actions."""
    row_N: torch.Tensor
    """Row of the scored token in the micro-batch."""
    column_N: torch.Tensor
    """Column of the scored token in the micro-batch."""


def token_stream(batch: MicroBatch, layout: StreamLayout) -> TokenStream:
    """The stream of a micro-batch, as its field `batching` says.

    Raises:
        ValueError: where the action mask is set in column 0, which no token predicts, or a shared prefix carries loss.
    """
    mask_B_T = batch.action_mask_B_T != 0
    if bool(mask_B_T[:, 0].any()):
        raise ValueError("the action mask is set in column 0, which no token predicts")
    row_N, column_N = mask_B_T.nonzero(as_tuple=True)
    if batch.batching == "padded":
        return _padded(batch, row_N, column_N, layout)
    return _packed(batch, row_N, column_N, layout)


def stream_tokens(batch: MicroBatch, layout: StreamLayout) -> tuple[int, int]:
    """(rows, tokens) of this rank's part of the stream: the shape a pipeline stage hands on, before sequence parallelism splits it."""
    if batch.batching == "padded":
        rows, tokens = batch.token_ids_B_T.shape
        return rows, _round_up(tokens, layout.total_multiple) // layout.context_parallel_size
    return 1, _segments(batch, layout).total // layout.context_parallel_size


@dataclass(frozen=True, slots=True)
class TokenPlaces:
    """Where a micro-batch's tokens lie in the whole stream, all ranks' parts together, and which part is this rank's."""

    place_B_T: torch.Tensor
    """int64 [B, T], position in the stream [rows, tokens] flattened; several tokens share one where rows share a prefix; -1 for padding."""
    rows: int
    total: int
    """Tokens of a stream's row."""
    mine_S: torch.Tensor
    """int64 [S], positions in a stream's row that this rank has, in its order."""


def token_places(batch: MicroBatch, layout: StreamLayout) -> TokenPlaces:
    """The places that `token_stream` gives to a micro-batch's tokens, on the CPU."""
    if batch.batching == "padded":
        rows, tokens = batch.token_ids_B_T.shape
        total = _round_up(tokens, layout.total_multiple)
        columns_T, lengths_B_1 = torch.arange(tokens), batch.lengths_B.cpu().unsqueeze(1)
        place_B_T = torch.where(columns_T < lengths_B_1, torch.arange(rows).unsqueeze(1) * total + columns_T, _NOWHERE)
        starts = [0, total]
    else:
        segments = _segments(batch, layout)
        rows, total, starts, place_B_T = 1, segments.total, segments.starts, segments.place_B_T
    mine_S = _own_positions(starts, layout) if layout.context_parallel_size > 1 else torch.arange(total)
    return TokenPlaces(place_B_T, rows, total, mine_S)


def nested_rows(batch: MicroBatch) -> dict[int, int]:
    """The row that a row is read from, for every row of a packed batch that begins another one; empty in other modes."""
    if batch.batching != "packed":
        return {}
    rows = [token_ids[:length] for token_ids, length in zip(batch.token_ids_B_T.tolist(), batch.lengths_B.tolist(), strict=True)]
    return {row: host for row, host in enumerate(hosts(rows)) if host != row}


def _padded(batch: MicroBatch, row_N: torch.Tensor, column_N: torch.Tensor, layout: StreamLayout) -> TokenStream:
    rows, tokens = batch.token_ids_B_T.shape
    total = _round_up(tokens, layout.total_multiple)
    ids_B_S = torch.nn.functional.pad(batch.token_ids_B_T, (0, total - tokens)) if total > tokens else batch.token_ids_B_T
    positions_B_S = torch.arange(total, device=ids_B_S.device).expand_as(ids_B_S)
    padding_B_S = positions_B_S >= batch.lengths_B.unsqueeze(1)
    if layout.context_parallel_size == 1:
        return TokenStream(ids_B_S, positions_B_S, None, padding_B_S, (column_N - 1) * rows + row_N, row_N, column_N)
    mine_S = _own_positions([0, total], layout).to(ids_B_S.device)
    place_N, is_mine_N = _local_places(column_N - 1, mine_S, total)
    row_N, column_N = row_N[is_mine_N], column_N[is_mine_N]
    ids_B_S, positions_B_S, padding_B_S = (tensor_B_S[:, mine_S] for tensor_B_S in (ids_B_S, positions_B_S, padding_B_S))
    return TokenStream(ids_B_S, positions_B_S, None, padding_B_S, place_N * rows + row_N, row_N, column_N)


@dataclass(frozen=True, slots=True)
class _Segments:
    """Where the rows' tokens lie in a packed stream."""

    place_B_T: torch.Tensor
    """int64 [B, T], position in the stream of a row's token; _NOWHERE for padding."""
    starts: list[int]
    """First position of every segment and, last, the stream's length."""
    branches: tuple[Branches, ...]
    """The groups; empty where nothing is shared."""

    @property
    def total(self) -> int:
        return self.starts[-1]


def _packed(batch: MicroBatch, row_N: torch.Tensor, column_N: torch.Tensor, layout: StreamLayout) -> TokenStream:
    device = batch.token_ids_B_T.device
    segments = _segments(batch, layout)
    place_B_T = segments.place_B_T.to(device)
    is_real_B_T = place_B_T != _NOWHERE
    ids_S, positions_S = (torch.zeros(segments.total, dtype=torch.int64, device=device) for _ in range(2))
    ids_S[place_B_T[is_real_B_T]] = batch.token_ids_B_T[is_real_B_T]
    positions_S[place_B_T[is_real_B_T]] = is_real_B_T.nonzero()[:, 1]
    weights_S = torch.bincount(place_B_T[is_real_B_T], minlength=segments.total)
    source_N = place_B_T[row_N, column_N - 1]
    if layout.context_parallel_size > 1:
        mine_S = _own_positions(segments.starts, layout).to(device)
        source_N, is_mine_N = _local_places(source_N, mine_S, segments.total)
        row_N, column_N = row_N[is_mine_N], column_N[is_mine_N]
        ids_S, positions_S, weights_S = ids_S[mine_S], positions_S[mine_S], weights_S[mine_S]
    packing = _packing(segments, positions_S, weights_S)
    return TokenStream(ids_S.unsqueeze(0), positions_S.unsqueeze(0), packing, None, source_N, row_N, column_N)


def _packing(segments: _Segments, positions_S: torch.Tensor, weights_S: torch.Tensor) -> StreamParams:
    device = positions_S.device
    starts = torch.tensor(segments.starts, dtype=torch.int32, device=device)
    longest = max(end - start for start, end in pairwise(segments.starts))
    fields = {
        "cu_seqlens_q": starts,
        "cu_seqlens_kv": starts,
        "max_seqlen_q": longest,
        "max_seqlen_kv": longest,
        "total_tokens": segments.total,
        "token_weights_S": weights_S,
    }
    if not segments.branches:
        return StreamParams(qkv_format="thd", **fields)
    return SharedPrefixParams(qkv_format="sbhd", **fields, positions_S=positions_S, branches=tuple(group.to(device) for group in segments.branches))


def _segments(batch: MicroBatch, layout: StreamLayout) -> _Segments:
    lengths = batch.lengths_B.tolist()
    place_B_T = torch.full(batch.token_ids_B_T.shape, _NOWHERE, dtype=torch.int64)
    starts, branches = [0], []

    def append(row: int, first: int, last: int) -> int:
        start = starts[-1]
        place_B_T[row, first:last] = torch.arange(start, start + last - first)
        starts.append(start + _round_up(last - first, layout.segment_multiple))
        return start

    nested = nested_rows(batch)
    for prefix, rows in _groups(batch, nested):
        prefix_start = append(rows[0], 0, prefix) if prefix else starts[-1]
        place_B_T[rows, :prefix] = place_B_T[rows[0], :prefix].clone()
        action_starts = [append(row, prefix, lengths[row]) for row in rows]
        if prefix:
            action_lengths = [lengths[row] - prefix for row in rows]
            branches.append(Branches.of(prefix_start=prefix_start, prefix_length=prefix, action_starts=action_starts, action_lengths=action_lengths))
    for row, host in nested.items():
        place_B_T[row, : lengths[row]] = place_B_T[host, : lengths[row]]
    starts[-1] = _round_up(starts[-1], layout.total_multiple)
    return _Segments(place_B_T, starts, tuple(branches))


def _groups(batch: MicroBatch, nested: Mapping[int, int]) -> list[tuple[int, list[int]]]:
    """(prefix tokens to share, rows) of the rows with tokens of their own, in the order of first rows."""
    rows_B = range(len(batch.lengths_B))
    if batch.batching == "packed":
        return [(0, [row]) for row in rows_B if row not in nested]
    if batch.group_ids_B is None or batch.prefix_lengths_B is None:
        raise ValueError("a micro-batch with shared prefixes names no groups")
    groups: dict[int, list[int]] = {}
    for row, group in enumerate(batch.group_ids_B.tolist()):
        groups.setdefault(group, []).append(row)
    prefixes = batch.prefix_lengths_B.tolist()
    for rows in groups.values():
        if {prefixes[row] for row in rows} != {prefixes[rows[0]]}:
            raise ValueError("rows of one group have prefixes of different lengths")
        if prefixes[rows[0]] == 0:
            raise ValueError("a group without a prefix has nothing to share")
        if bool(batch.action_mask_B_T[rows, : prefixes[rows[0]]].any()):
            raise ValueError("a shared prefix carries loss; it would count once and not once per row")
    return [(prefixes[rows[0]], rows) for rows in groups.values()]


def _own_positions(starts: list[int], layout: StreamLayout) -> torch.Tensor:
    return own_positions(starts, size=layout.context_parallel_size, rank=layout.context_parallel_rank)


def _local_places(place_N: torch.Tensor, mine_S: torch.Tensor, total: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(position on this rank of every place that is here, which ones are)."""
    local = torch.full((total,), _NOWHERE, dtype=torch.int64, device=place_N.device)
    local[mine_S] = torch.arange(len(mine_S), device=place_N.device)
    local_N = local[place_N]
    is_mine_N = local_N != _NOWHERE
    return local_N[is_mine_N], is_mine_N


def _round_up(length: int, multiple: int) -> int:
    return -(-length // multiple) * multiple
