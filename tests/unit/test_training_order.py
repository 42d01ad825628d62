"""Epoch order: no item twice in a batch or an epoch, every item in the long run, a function of the seed and the batch alone."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from pivotrl.training.order import EpochOrder


@given(size=st.integers(1, 40), data=st.data())
def test_no_item_twice_in_an_epoch(size: int, data: st.DataObject) -> None:
    per_batch = data.draw(st.integers(1, size))
    order = EpochOrder(size, per_batch, seed=data.draw(st.integers(0, 2**40)))
    for epoch in range(3):
        batches = [b for b in range((epoch + 2) * (size // per_batch)) if order.epoch(b) == epoch]
        items = [i for b in batches for i in order.items(b)]
        assert len(batches) == size // per_batch
        assert len(items) == len(set(items)) == len(batches) * per_batch


def test_left_over_items_change_from_epoch_to_epoch() -> None:
    order = EpochOrder(5, 3, seed=1)
    assert set(Counter(i for b in range(40) for i in order.items(b))) == set(range(5))


def test_function_of_seed_and_batch() -> None:
    assert EpochOrder(9, 2, seed=4).items(7) == EpochOrder(9, 2, seed=4).items(7)
    assert EpochOrder(9, 9, seed=4).items(0) != EpochOrder(9, 9, seed=5).items(0)
