"""Weights in buckets: cut in order and within bounds, read back bit for bit from memory, files and broadcasts, and every corruption named."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pivotrl.rundir import read_json
from pivotrl.weights import filesystem, shared_memory
from pivotrl.weights.broadcast import BroadcastStore, Member
from pivotrl.weights.buckets import Bucket, WeightStore, bucketed, read_bucket
from pivotrl.weights.filesystem import COMPLETE, FilesystemStore
from pivotrl.weights.shared_memory import SharedMemoryStore

READERS = {shared_memory.KIND: shared_memory.read, filesystem.KIND: filesystem.read}
TENSORS = [
    ("scalar", torch.tensor(3.5)),
    ("empty", torch.empty(0, 4)),
    ("odd", torch.arange(7, dtype=torch.bfloat16)),
    ("matrix", torch.arange(15.0).reshape(3, 5).t()),
]


@pytest.fixture(params=["shared_memory", "filesystem"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[WeightStore]:
    made = SharedMemoryStore() if request.param == "shared_memory" else FilesystemStore(tmp_path / "weights")
    yield made
    made.close()


@settings(max_examples=50)
@given(sizes=st.lists(st.integers(0, 9), max_size=12), limit=st.integers(1, 40))
def test_runs_are_in_order_and_only_a_single_tensor_exceeds_the_limit(sizes: list[int], limit: int) -> None:
    tensors = [(str(index), torch.zeros(size)) for index, size in enumerate(sizes)]
    runs = list(bucketed(tensors, limit))
    assert [name for run in runs for name, _ in run] == [name for name, _ in tensors]
    for index, run in enumerate(runs):
        size = sum(tensor.nbytes for _, tensor in run)
        assert size <= limit or len(run) == 1
        assert index + 1 == len(runs) or size + runs[index + 1][0][1].nbytes > limit


def test_what_was_put_is_read_bit_for_bit_and_survives_a_round_trip_of_its_description(store: WeightStore) -> None:
    for version in (1, 2):
        store.begin(version)
        buckets = [store.put(TENSORS[:2]), store.put([(name, tensor + version) for name, tensor in TENSORS[2:]])]
        store.finish()
    read = dict(pair for bucket in buckets for pair in read_bucket(Bucket.of(bucket.as_dict()), READERS))
    for name, tensor in [*TENSORS[:2], *((name, tensor + 2) for name, tensor in TENSORS[2:])]:
        assert read[name].dtype == tensor.dtype
        assert torch.equal(read[name], tensor), name


SPOILED: dict[str, tuple[Callable[[Bucket], Bucket], str]] = {
    "stale bytes": (lambda b: replace(b, records=(*b.records[:-1], replace(b.records[-1], digest="0" * 32))), "'matrix' arrived with other bytes"),
    "another shape": (lambda b: replace(b, records=(*b.records[:-1], replace(b.records[-1], shape=(4, 4)))), "'matrix' arrived"),
    "no such type": (lambda b: replace(b, records=(replace(b.records[0], dtype="complex64"), *b.records[1:])), "complex64"),
    "another kind": (lambda b: replace(b, kind="pigeon"), "a bucket of kind 'pigeon'"),
}


@pytest.mark.parametrize("case", SPOILED)
def test_a_spoiled_hand_over_is_refused_by_name(store: WeightStore, case: str) -> None:
    spoil, message = SPOILED[case]
    store.begin(1)
    bucket = spoil(store.put(TENSORS))
    with pytest.raises(ValueError, match=message):
        list(read_bucket(bucket, READERS))


def test_bytes_overwritten_in_memory_are_noticed() -> None:
    """A bucket of an older hand-over, read after the next one began."""
    store = SharedMemoryStore()
    store.begin(1)
    old = store.put([("w", torch.ones(3))])
    store.begin(2)
    store.put([("w", torch.full((3,), 2.0))])
    with pytest.raises(ValueError, match="'w' arrived with other bytes than were sent"):
        list(read_bucket(old, READERS))
    store.close()


def test_a_description_of_another_form_is_refused() -> None:
    with pytest.raises(ValueError, match="another form than this version's"):
        Bucket.of({"kind": "file", "location": "x"})


def test_files_of_older_versions_go_once_a_new_one_is_complete(tmp_path: Path) -> None:
    store = FilesystemStore(tmp_path)
    for version in (3, 4):
        store.begin(version)
        store.put(TENSORS)
        assert not (tmp_path / f"v{version}" / COMPLETE).exists()
        store.finish()
    assert [path.name for path in tmp_path.iterdir()] == ["v4"]
    assert [record["name"] for record in read_json(tmp_path / "v4" / COMPLETE)] == [name for name, _ in TENSORS]


def test_a_broadcast_reaches_every_member() -> None:
    store = BroadcastStore("127.0.0.1")
    invitations = store.invite(["a", "b"])
    received: list[dict[str, torch.Tensor]] = [{}, {}]
    buckets: list[Bucket] = []
    ready = threading.Event()

    def take_part(index: int) -> None:
        member = Member()
        member.join(invitations[index])
        ready.wait(60)
        received[index] = dict(read_bucket(buckets[0], {"broadcast": member.read}))

    threads = [threading.Thread(target=take_part, args=(index,), daemon=True) for index in range(2)]
    for thread in threads:
        thread.start()
    store.begin(1)
    buckets.append(store.put(TENSORS))
    ready.set()
    store.deliver()
    for thread in threads:
        thread.join(60)
    for tensors in received:
        assert all(torch.equal(tensors[name], tensor) for name, tensor in TENSORS)
    assert store.invite(["a", "b"]) == invitations
    store.close()
