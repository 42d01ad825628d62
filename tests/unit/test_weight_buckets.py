"""Weights in buckets: cut in order and within bounds, read back bit for bit from memory, files and broadcasts, and every corruption named."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pivotrl.rundir import read_json
from pivotrl.weights import broadcast, filesystem, shared_memory
from pivotrl.weights.broadcast import BroadcastStore, Member
from pivotrl.weights.buckets import Bucket, Invited, WeightStore, bucketed, read_bucket
from pivotrl.weights.filesystem import COMPLETE, FilesystemStore
from pivotrl.weights.manifest import SentStream, TensorRecord, VerifiedStream, tensor_record
from pivotrl.weights.owned_directory import OWNER, remove_abandoned
from pivotrl.weights.shared_memory import SharedMemoryStore

READERS = {shared_memory.KIND: shared_memory.read, filesystem.KIND: filesystem.read}
TENSORS = [
    ("scalar", torch.tensor(3.5)),
    ("empty", torch.empty(0, 4)),
    ("odd", torch.arange(7, dtype=torch.bfloat16)),
    ("matrix", torch.arange(15.0).reshape(3, 5).t()),
]


def recorded(tensors: Sequence[tuple[str, torch.Tensor]]) -> list[tuple[TensorRecord, torch.Tensor]]:
    return [(tensor_record(name, tensor), tensor) for name, tensor in tensors]


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


@pytest.mark.parametrize("piece_bytes", [8, 8 << 20])
def test_what_was_put_is_read_bit_for_bit_and_survives_a_round_trip_of_its_description(
    store: WeightStore, monkeypatch: pytest.MonkeyPatch, piece_bytes: int
) -> None:
    """Shared memory is filled in pieces by several threads; here some tensors are many pieces."""
    monkeypatch.setattr(shared_memory, "_PIECE_BYTES", piece_bytes)
    for version in (1, 2):
        store.begin(version)
        buckets = [store.put(recorded(TENSORS[:2])), store.put(recorded([(name, tensor + version) for name, tensor in TENSORS[2:]]))]
        store.finish()
    read = {record.name: tensor for bucket in buckets for record, tensor in read_bucket(Bucket.of(bucket.as_dict()), READERS)}
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
    bucket = spoil(store.put(recorded(TENSORS)))
    with pytest.raises(ValueError, match=message):
        read_bucket(bucket, READERS)


def test_bytes_overwritten_in_memory_are_noticed() -> None:
    """A bucket of an older hand-over, read after the next one began."""
    store = SharedMemoryStore()
    store.begin(1)
    old = store.put(recorded([("w", torch.ones(3))]))
    store.begin(2)
    store.put(recorded([("w", torch.full((3,), 2.0))]))
    with pytest.raises(ValueError, match="'w' arrived with other bytes than were sent"):
        read_bucket(old, READERS)
    store.close()


def test_a_tensor_that_changes_on_the_way_into_the_store_is_refused(store: WeightStore) -> None:
    """The digest is that of the sender's own tensor, so the copy is checked as well."""
    sent = SentStream([("w", torch.ones(3))])
    ((name, tensor),) = list(sent)
    store.begin(1)
    bucket = store.put([(sent.records[name], tensor * 2)])
    with pytest.raises(ValueError, match="'w' arrived with other bytes than were sent"):
        read_bucket(bucket, READERS)


def test_a_description_of_another_form_is_refused() -> None:
    with pytest.raises(ValueError, match="another form than this version's"):
        Bucket.of({"kind": "file", "location": "x"})


def test_files_of_older_versions_go_once_a_new_one_is_complete(tmp_path: Path) -> None:
    store = FilesystemStore(tmp_path)
    for version in (3, 4):
        store.begin(version)
        place = Path(store.put(recorded(TENSORS)).location).parent
        assert place.name == f"v{version}"
        assert not (place / COMPLETE).exists()
        store.finish()
    assert sorted(path.name for path in place.parent.iterdir()) == [OWNER, "v4"]
    assert [record["name"] for record in read_json(place / COMPLETE)] == [name for name, _ in TENSORS]


def contents(directory: Path) -> dict[str, bytes]:
    return {str(path.relative_to(directory)): path.read_bytes() for path in sorted(directory.rglob("*")) if path.is_file()}


def test_a_users_own_files_in_the_directory_of_weights_are_never_touched(tmp_path: Path) -> None:
    for name in ("v1/results.txt", "v7/data.txt", "notes.txt", "pivotrl-weights-mine/thesis.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    before = contents(tmp_path)
    unused, store = FilesystemStore(tmp_path), FilesystemStore(tmp_path)
    for version in (1, 2):
        store.begin(version)
        store.put(recorded(TENSORS))
        store.finish()
    unused.close()
    assert before.items() < contents(tmp_path).items()
    store.close()
    assert contents(tmp_path) == before


def test_the_weights_of_another_store_in_the_same_directory_stay(tmp_path: Path) -> None:
    first, second = FilesystemStore(tmp_path), FilesystemStore(tmp_path)
    buckets = []
    for store in (first, second):
        store.begin(1)
        buckets.append(store.put(recorded(TENSORS)))
        store.finish()
    second.close()
    assert len(read_bucket(buckets[0], READERS)) == len(TENSORS)
    assert not Path(buckets[1].location).exists()
    first.close()


_HOLDER = """
import sys, time
from pathlib import Path
from pivotrl.weights.owned_directory import OwnedDirectory
own = OwnedDirectory(Path(sys.argv[1]))
(own.path / "v1").mkdir()
(own.path / "v1" / "00000.safetensors").write_bytes(b"weights")
print(own.path, flush=True)
time.sleep(600)
"""


def test_what_a_killed_process_left_is_removed_by_the_next_and_what_a_living_one_holds_is_not(tmp_path: Path) -> None:
    holders = [subprocess.Popen([sys.executable, "-c", _HOLDER, str(tmp_path)], stdout=subprocess.PIPE, text=True) for _ in range(2)]
    try:
        dead, living = (Path((holder.stdout or sys.stdin).readline().strip()) for holder in holders)
        holders[0].kill()
        holders[0].wait(60)
        store = FilesystemStore(tmp_path)
        store.begin(1)
        assert not dead.exists()
        assert (living / "v1" / "00000.safetensors").read_bytes() == b"weights"
        own = Path(store.put(recorded(TENSORS)).location)
        assert remove_abandoned(tmp_path) == []
        assert own.exists()
        store.close()
        assert {path.name for path in tmp_path.iterdir()} == {living.name}
    finally:
        for holder in holders:
            holder.kill()
            holder.wait(60)


_SEGMENT_HOLDER = """
import os, torch
from multiprocessing import resource_tracker
from pivotrl.weights.manifest import tensor_record
from pivotrl.weights.shared_memory import SharedMemoryStore
store = SharedMemoryStore()
store.begin(1)
print(store.put([(tensor_record("w", torch.ones(9)), torch.ones(9))]).location, flush=True)
os.kill(resource_tracker._resource_tracker._pid, 9)
os.kill(os.getpid(), 9)
"""


def test_segments_do_not_outlive_a_killed_process_and_its_tracker_for_good() -> None:
    """A job that is ended as a whole: nobody is left to free its memory but the next hand-over, which leaves those of the living."""
    living = SharedMemoryStore()
    living.begin(1)
    kept = living.put(recorded(TENSORS))
    killed = subprocess.run([sys.executable, "-c", _SEGMENT_HOLDER], stdout=subprocess.PIPE, text=True, check=False)
    left = Path("/dev/shm") / killed.stdout.strip()
    assert killed.stdout.strip()
    assert left.is_file()
    store = SharedMemoryStore()
    store.begin(1)
    assert not left.exists()
    assert not left.with_suffix("").exists()
    assert len(read_bucket(kept, READERS)) == len(TENSORS)
    store.close()
    living.close()
    assert not (Path("/dev/shm") / kept.location).with_suffix("").exists()


def test_a_broadcast_reaches_every_member() -> None:
    # Two addresses of this machine, as two networks of a node would be.
    store, members = BroadcastStore(), [Invited("a", "127.0.0.1"), Invited("b", "127.0.0.2")]
    invitations = store.invite(members)
    assert [invitation["host"] for invitation in invitations] == ["127.0.0.1", "127.0.0.2"]
    received: list[dict[str, torch.Tensor]] = [{}, {}]
    buckets: list[Bucket] = []
    ready = threading.Event()

    def take_part(index: int) -> None:
        member = Member()
        member.join(invitations[index])
        ready.wait(60)
        received[index] = dict(VerifiedStream(read_bucket(buckets[0], {"broadcast": member.read})))

    threads = [threading.Thread(target=take_part, args=(index,), daemon=True) for index in range(2)]
    for thread in threads:
        thread.start()
    store.begin(1)
    buckets.append(store.put(recorded(TENSORS)))
    ready.set()
    store.deliver()
    store.finish()
    for thread in threads:
        thread.join(60)
    for tensors in received:
        assert all(torch.equal(tensors[name], tensor) for name, tensor in TENSORS)
    assert store.invite(members) == invitations
    store.close()


def test_a_bucket_is_gathered_and_laid_out_while_the_one_before_is_under_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """The member takes nothing until the sender has put the second bucket; a sender that waited for the first would end with a timeout."""
    monkeypatch.setattr(broadcast, "_TIMEOUT", timedelta(seconds=20))
    store = BroadcastStore()
    (invitation,) = store.invite([Invited("a", "127.0.0.1")])
    # More than a socket holds.
    tensors = [("first", torch.arange(8 << 20)), ("second", torch.arange(8 << 20) * 3)]
    buckets: list[Bucket] = []
    both_put = threading.Event()
    received: dict[str, torch.Tensor] = {}

    def take_part() -> None:
        member = Member()
        member.join(invitation)
        both_put.wait(60)
        for bucket in buckets:
            received.update(VerifiedStream(read_bucket(bucket, {"broadcast": member.read})))

    thread = threading.Thread(target=take_part, daemon=True)
    thread.start()
    store.begin(1)
    buckets.append(store.put(recorded(tensors[:1])))
    store.deliver()
    buckets.append(store.put(recorded(tensors[1:])))
    both_put.set()
    store.deliver()
    store.finish()
    thread.join(60)
    assert all(torch.equal(received[name], tensor) for name, tensor in tensors)
    store.close()
