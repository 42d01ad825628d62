"""Batching: denominators over the whole step, masks from spans, every kept token exactly once, skipping that changes no gradient."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pivotrl.config.training import Batching
from pivotrl.objective.microbatch import MicroBatch
from pivotrl.training.batching import demonstration_micro_batches, samples_to_forward, train_batch, train_micro_batches
from pivotrl.types import Demonstration, TrainSample


def sample(group: str, prompt: int, completion: int, advantage: float = 1.0, weight: float = 1.0) -> TrainSample:
    return TrainSample(group, tuple(range(2, 2 + prompt)), tuple(range(50, 50 + completion)), advantage, (-0.5,) * completion, weight)


samples = st.lists(
    st.builds(sample, st.sampled_from("abcd"), st.integers(1, 9), st.integers(1, 9), st.sampled_from([0.0, 1.0, -2.0]), st.sampled_from([0.0, 1.0])),
    min_size=1,
    max_size=12,
)


def with_one_prompt_per_group(samples: list[TrainSample]) -> list[TrainSample]:
    prompts = {one.group_id: one.prompt_token_ids for one in samples}
    return [dataclasses.replace(one, prompt_token_ids=prompts[one.group_id]) for one in samples]


def stream_length(one: MicroBatch) -> int:
    """Tokens that go through the model, counted from the rows themselves."""
    rows, width = one.token_ids_B_T.shape
    if one.batching == "padded":
        return rows * width
    if one.batching == "packed":
        return sum(map(len, unfinished_by_others(one)))
    prompts: dict[object, int] = {}
    tokens = 0
    for i, length in enumerate(one.lengths_B.tolist()):
        assert one.group_ids_B is not None
        prompt = int(one.action_mask_B_T[i].nonzero()[0])
        prompts[one.group_ids_B[i].item()] = prompt
        tokens += length - prompt
    return tokens + sum(prompts.values())


def unfinished_by_others(one: MicroBatch) -> set[tuple[int, ...]]:
    """The rows that begin no longer row."""
    rows = {tuple(ids[:length]) for ids, length in zip(one.token_ids_B_T.tolist(), one.lengths_B.tolist(), strict=True)}
    return {row for row in rows if not any(len(other) > len(row) and other[: len(row)] == row for other in rows)}


@given(
    samples=samples.map(with_one_prompt_per_group),
    micro_batch_tokens=st.integers(1, 80),
    skip=st.booleans(),
    batching=st.sampled_from(["padded", "packed", "shared_prefix"]),
)
def test_every_kept_token_once_under_one_denominator(samples: list[TrainSample], micro_batch_tokens: int, skip: bool, batching: Batching) -> None:
    batch = train_batch(samples)
    kept = samples_to_forward(batch, skip_zero_variance=skip)
    micro_batches = train_micro_batches(batch, batching=batching, micro_batch_tokens=micro_batch_tokens, skip_zero_variance=skip)
    seen = []
    for one in micro_batches:
        assert one.batching == batching
        is_one_sequence = len(one.lengths_B) == 1 or (batching == "packed" and len(unfinished_by_others(one)) == 1)
        assert is_one_sequence or stream_length(one) <= micro_batch_tokens
        assert one.prefix_lengths_B is not None
        assert one.prefix_lengths_B.tolist() == [int(mask.nonzero()[0]) for mask in one.action_mask_B_T]
        assert (one.num_actions, one.num_action_tokens) == (len(samples), sum(len(s.completion_token_ids) for s in samples))
        assert one.behavior_logprobs_B_T is not None
        for i, length in enumerate(one.lengths_B.tolist()):
            ids, mask = one.token_ids_B_T[i].tolist(), one.action_mask_B_T[i].bool()
            first = int(mask.nonzero()[0])
            seen.append((tuple(ids[:first]), tuple(torch.tensor(ids)[mask].tolist()), one.advantages_B[i].item(), one.loss_weights_B[i].item()))
            assert mask.sum() == length - first
            assert not mask[length:].any()
            assert (one.behavior_logprobs_B_T[i][mask] == -0.5).all()
            assert (one.behavior_logprobs_B_T[i][~mask] == 0).all()
    expected = [(s.prompt_token_ids, s.completion_token_ids, s.advantage, s.loss_weight) for s in kept]
    assert sorted(seen) == sorted(expected)


def test_the_end_of_turn_token_carries_loss_and_the_prompt_does_not() -> None:
    """Also where the end-of-turn token's id is the padding id and occurs inside the prompt: masks come from spans."""
    one = TrainSample("g", (5, 0, 6), (7, 0), 1.0, (-1.0, -2.0))
    longer = TrainSample("g", (5, 0, 6, 9), (7, 7, 7, 0), 1.0, (-1.0,) * 4)
    (batch,) = train_micro_batches(train_batch([one, longer]), batching="padded", micro_batch_tokens=100, skip_zero_variance=True)
    assert batch.action_mask_B_T[1].tolist() == [0, 0, 0, 1, 1, 0, 0, 0]
    assert batch.behavior_logprobs_B_T is not None
    assert batch.behavior_logprobs_B_T[1].tolist() == [0, 0, 0, -1, -2, 0, 0, 0]


def test_zero_variance_groups_are_skipped_whole_and_only_where_asked() -> None:
    flat, mixed = [sample("flat", 2, 3, 0.0)] * 2, [sample("mixed", 2, 3, 0.0), sample("mixed", 2, 4, 1.0)]
    batch = train_batch([*flat, *mixed])
    assert samples_to_forward(batch, skip_zero_variance=True) == mixed
    assert samples_to_forward(batch, skip_zero_variance=False) == [*flat, *mixed]


def test_masked_samples_are_never_forwarded_but_counted() -> None:
    batch = train_batch([sample("a", 2, 3), sample("a", 2, 5, -1.0, weight=0.0)])
    assert samples_to_forward(batch, skip_zero_variance=False) == [sample("a", 2, 3)]
    assert (batch.num_actions, batch.num_action_tokens) == (2, 8)


def test_a_step_with_nothing_to_learn_keeps_its_shortest_sample() -> None:
    batch = train_batch([sample("a", 4, 4, 0.0), sample("b", 2, 3, 0.0)])
    assert samples_to_forward(batch, skip_zero_variance=True) == [sample("b", 2, 3, 0.0)]


def test_groups_with_equal_prompts_stay_apart() -> None:
    """Keyed by pivot id: the flat group is skipped although a group with the same prompt is not."""
    batch = train_batch([sample("a", 3, 2, 0.0), sample("b", 3, 2, 1.0)])
    assert [s.group_id for s in samples_to_forward(batch, skip_zero_variance=True)] == ["b"]


def test_longest_first_and_deterministic() -> None:
    batch = train_batch([sample("a", 1, n) for n in (2, 9, 4, 9, 1)])
    first, second = (train_micro_batches(batch, batching="padded", micro_batch_tokens=20, skip_zero_variance=True) for _ in range(2))
    assert [tuple(one.token_ids_B_T.shape) for one in first] == [(2, 10), (3, 5)]
    assert all(torch.equal(a.token_ids_B_T, b.token_ids_B_T) for a, b in zip(first, second, strict=True))


def test_packing_fills_earlier_micro_batches_first() -> None:
    """Lengths 9, 7, 5, 4, 3 into 12: first-fit decreasing gives {9, 3}, {7, 5}, {4}; filling one after the other would take four."""
    batch = train_batch([dataclasses.replace(sample(str(n), 1, n - 1), prompt_token_ids=(n,)) for n in (5, 9, 3, 7, 4)])
    parts = train_micro_batches(batch, batching="packed", micro_batch_tokens=12, skip_zero_variance=True)
    assert [part.lengths_B.tolist() for part in parts] == [[9, 3], [7, 5], [4]]


def test_a_group_longer_than_a_micro_batch_is_split_with_its_prompt_in_each_part() -> None:
    batch = train_batch([sample("a", 6, n) for n in (2, 2, 3, 1)] + [sample("b", 2, 1)])
    parts = train_micro_batches(batch, batching="shared_prefix", micro_batch_tokens=11, skip_zero_variance=True)
    assert [part.lengths_B.tolist() for part in parts] == [[8, 8], [9, 7], [3]]
    assert [part.group_ids_B.tolist() for part in parts if part.group_ids_B is not None] == [[0, 0], [0, 0], [0]]
    assert [part.prefix_lengths_B.tolist() for part in parts if part.prefix_lengths_B is not None] == [[6, 6], [6, 6], [2]]


def test_prompts_of_one_group_must_be_equal_to_be_shared() -> None:
    batch = train_batch([sample("a", 3, 2), dataclasses.replace(sample("a", 3, 2), prompt_token_ids=(2, 9, 4))])
    assert len(train_micro_batches(batch, batching="packed", micro_batch_tokens=50, skip_zero_variance=True)) == 1
    with pytest.raises(ValueError, match="group a have different prompts"):
        train_micro_batches(batch, batching="shared_prefix", micro_batch_tokens=50, skip_zero_variance=True)


def test_demonstrations_count_only_loss_tokens() -> None:
    shown = [Demonstration((5, 6, 7, 8), (0, 1, 0, 1)), Demonstration((5, 6), (0, 1))]
    (batch,) = demonstration_micro_batches(shown, batching="padded", micro_batch_tokens=8)
    assert (batch.num_actions, batch.num_action_tokens) == (2, 3)
    assert batch.action_mask_B_T.tolist() == [[0, 1, 0, 1], [0, 1, 0, 0]]
    assert batch.behavior_logprobs_B_T is None
    longer = Demonstration((9, 6, 7), (0, 0, 1))
    packed = demonstration_micro_batches([*shown, longer], batching="packed", micro_batch_tokens=6)
    assert [(part.batching, part.lengths_B.tolist()) for part in packed] == [("packed", [4, 2]), ("packed", [3])]
    assert packed[0].action_mask_B_T.tolist() == [[0, 1, 0, 1], [0, 1, 0, 0]]
    with pytest.raises(ValueError, match="no token"):
        demonstration_micro_batches([Demonstration((5, 6), (0, 0))], batching="padded", micro_batch_tokens=8)


def test_impossible_samples_are_refused() -> None:
    with pytest.raises(ValueError, match="no denominator"):
        train_batch([])
    with pytest.raises(ValueError, match="no completion token"):
        train_batch([sample("a", 2, 0)])
    with pytest.raises(ValueError, match="log-probs"):
        train_batch([dataclasses.replace(sample("a", 2, 2), behavior_logprobs_T=(-1.0,))])
