"""Streams: which tokens go through the model at which positions, what predicts what, and how context parallel ranks share them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from pivotrl.megatron.shared_prefix import SharedPrefixParams
from pivotrl.megatron.streams import StreamLayout, TokenStream, stream_tokens, token_stream
from pivotrl.objective.microbatch import MicroBatch


def batch(prompts: list[list[int]], actions: list[list[int]], groups: list[int], batching: str = "padded") -> MicroBatch:
    rows = [[*prompt, *action] for prompt, action in zip(prompts, actions, strict=True)]
    width = max(map(len, rows))
    token_ids = torch.tensor([row + [0] * (width - len(row)) for row in rows])
    mask = torch.zeros(token_ids.shape)
    for i, (prompt, row) in enumerate(zip(prompts, rows, strict=True)):
        mask[i, len(prompt) : len(row)] = 1
    ones = torch.ones(len(rows))
    return MicroBatch(
        token_ids_B_T=token_ids,
        lengths_B=torch.tensor([len(row) for row in rows]),
        action_mask_B_T=mask,
        advantages_B=ones,
        loss_weights_B=ones,
        behavior_logprobs_B_T=None,
        old_logprobs_B_T=None,
        reference_logprobs_B_T=None,
        num_actions=len(rows),
        num_action_tokens=int(mask.sum()),
        batching=batching,  # type: ignore[arg-type]
        group_ids_B=torch.tensor(groups),
        prefix_lengths_B=torch.tensor([len(prompt) for prompt in prompts]),
    )


# Two groups: one of two ragged actions after (1, 2, 3), one of a single action after (7, 8); rows of the first are not neighbours.
_ROWS = ([[1, 2, 3], [7, 8], [1, 2, 3]], [[4, 5], [9], [6]], [10, 20, 10])
_LAYOUTS = [StreamLayout(), StreamLayout(sequence_parallel_size=4), StreamLayout(2, 0), StreamLayout(2, 0, 2), StreamLayout(4, 0)]


def predictions(stream: TokenStream) -> set[tuple[int, int, int, int]]:
    """(row, column, token that predicts it, that token's position)."""
    ids, positions = (tensor.T.flatten()[stream.source_N].tolist() for tensor in (stream.token_ids_B_S, stream.positions_B_S))
    return set(zip(stream.row_N.tolist(), stream.column_N.tolist(), ids, positions, strict=True))


# Read off _ROWS by hand: the token before each action token and where it stands.
_EXPECTED = {(0, 3, 3, 2), (0, 4, 4, 3), (1, 2, 8, 1), (2, 3, 3, 2)}


def test_a_packed_stream_has_the_rows_without_padding() -> None:
    stream = token_stream(batch(*_ROWS, "packed"), StreamLayout())
    assert stream.token_ids_B_S.tolist() == [[1, 2, 3, 4, 5, 7, 8, 9, 1, 2, 3, 6]]
    assert stream.positions_B_S.tolist() == [[0, 1, 2, 3, 4, 0, 1, 2, 0, 1, 2, 3]]
    assert stream.packing is not None
    assert stream.packing.cu_seqlens_q.tolist() == [0, 5, 8, 12]
    assert stream.packing.seq_idx.tolist() == [[0] * 5 + [1] * 3 + [2] * 4]


def test_a_shared_prefix_is_there_once_and_actions_go_on_from_it() -> None:
    stream = token_stream(batch(*_ROWS, "shared_prefix"), StreamLayout())
    assert stream.token_ids_B_S.tolist() == [[1, 2, 3, 4, 5, 6, 7, 8, 9]]
    assert stream.positions_B_S.tolist() == [[0, 1, 2, 3, 4, 3, 0, 1, 2]]
    assert isinstance(stream.packing, SharedPrefixParams)
    first, second = stream.packing.branches
    assert (first.prefix, second.prefix) == (slice(0, 3), slice(6, 8))
    assert first.action_index_G_A.tolist() == [[3, 4], [5, 5]]
    assert first.is_real_G_A.tolist() == [[True, True], [True, False]]
    assert second.action_rows.tolist() == [8]


@pytest.mark.parametrize("batching", ["padded", "packed", "shared_prefix"])
@pytest.mark.parametrize("layout", _LAYOUTS, ids=str)
def test_ranks_together_score_every_action_token_once_from_the_token_before_it(batching: str, layout: StreamLayout) -> None:
    one = batch(*_ROWS, batching)
    streams = [token_stream(one, replace(layout, context_parallel_rank=rank)) for rank in range(layout.context_parallel_size)]
    assert set().union(*map(predictions, streams)) == _EXPECTED
    assert sum(len(stream.row_N) for stream in streams) == len(_EXPECTED)
    for stream in streams:
        assert tuple(stream.token_ids_B_S.shape) == stream_tokens(one, layout)
        assert stream.token_ids_B_S.shape[1] % layout.sequence_parallel_size == 0


def test_context_parallel_ranks_hold_outer_and_inner_slices_of_every_sequence() -> None:
    one = batch([[1, 2], [5, 6]], [[3, 4], [7]], [0, 1], "packed")
    outer, inner = (token_stream(one, StreamLayout(2, rank)) for rank in range(2))
    assert outer.token_ids_B_S.tolist() == [[1, 4, 5, 0]]
    assert inner.token_ids_B_S.tolist() == [[2, 3, 6, 7]]
    assert outer.packing is not None
    assert outer.packing.cu_seqlens_q.tolist() == [0, 4, 8]


@pytest.mark.parametrize("layout", _LAYOUTS, ids=str)
def test_weights_count_rows(layout: StreamLayout) -> None:
    """Token by token: once in every row that has it, whether rows share it or not, and padding in none."""
    for batching in ("packed", "shared_prefix"):
        counts = dict.fromkeys(range(1, 10), 0)
        for rank in range(layout.context_parallel_size):
            stream = token_stream(batch(*_ROWS, batching), replace(layout, context_parallel_rank=rank))
            assert stream.packing is not None
            assert stream.packing.token_weights_S is not None
            for token, weight in zip(stream.token_ids_B_S[0].tolist(), stream.packing.token_weights_S.tolist(), strict=True):
                counts[token or 9] += weight
        assert counts == {1: 2, 2: 2, 3: 2, 4: 1, 5: 1, 6: 1, 7: 1, 8: 1, 9: 1}


def test_a_group_of_one_row_is_a_stream_of_its_own() -> None:
    stream = token_stream(batch([[1, 2]], [[3, 4]], [5], "shared_prefix"), StreamLayout())
    assert stream.token_ids_B_S.tolist() == [[1, 2, 3, 4]]
    assert predictions(stream) == {(0, 2, 2, 1), (0, 3, 3, 2)}


def test_loss_inside_a_shared_prefix_is_refused() -> None:
    one = batch(*_ROWS, "shared_prefix")
    one.action_mask_B_T[0, 2] = 1
    with pytest.raises(ValueError, match="carries loss"):
        token_stream(one, StreamLayout())


def test_a_mask_on_the_first_token_is_refused() -> None:
    one = batch(*_ROWS)
    with pytest.raises(ValueError, match="column 0"):
        token_stream(replace(one, action_mask_B_T=torch.ones_like(one.action_mask_B_T)), StreamLayout())
