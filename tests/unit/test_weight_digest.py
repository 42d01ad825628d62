"""Digests of tensors: `lanes` by whole numbers in plain Python, every mistake of a hand-over found, and an algorithm that follows the sender's."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
import torch
from fakes.tiny_llama import PAD, STOP, named_weights, save_tiny_llama, tiny_llama
from hypothesis import given, settings
from hypothesis import strategies as st

from pivotrl.config.engines import TransformersEngineConfig
from pivotrl.rollouts.transformers_engine import TransformersEngine
from pivotrl.training.parity_findings import weights_finding
from pivotrl.weights import digest as digest_module
from pivotrl.weights import shared_memory
from pivotrl.weights.buckets import read_bucket
from pivotrl.weights.digest import CHUNK_LANES, LANES, MULTIPLIERS, PLACE_STEP, digest_like, finish, start, tensor_digest
from pivotrl.weights.manifest import SentStream
from pivotrl.weights.push import push
from pivotrl.weights.shared_memory import SharedMemoryStore

WORD = 1 << 64


def mixed(lane: int) -> int:
    for multiplier in MULTIPLIERS:
        lane = (lane ^ (lane >> 32)) * multiplier % WORD
    return lane


def place_key(place: int) -> int:
    return mixed((place + 1) * PLACE_STEP % WORD) | 1


def lanes_by_hand(data: bytes, *, chunk_lanes: int) -> str:
    digest = hashlib.blake2b(struct.pack("<Q", len(data)), digest_size=16)
    for begin in range(0, len(data), chunk_lanes * 8):
        chunk = data[begin : begin + chunk_lanes * 8]
        first = second = 0
        for place in range(-(-len(chunk) // 8)):
            lane = int.from_bytes(chunk[place * 8 : place * 8 + 8].ljust(8, b"\0"), "little")
            hashed = mixed((lane + place_key(place)) % WORD)
            first, second = (first + hashed) % WORD, (second + hashed * place_key(place)) % WORD
        digest.update(struct.pack("<2Q", first, second))
    return "lanes:" + digest.hexdigest()


def lanes(tensor: torch.Tensor) -> str:
    return digest_like(tensor, LANES)


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """Of four lanes, so that a small tensor has many; the table of places is made anew."""
    monkeypatch.setattr(digest_module, "CHUNK_LANES", 4)
    digest_module._place_keys.cache_clear()
    yield 4
    digest_module._place_keys.cache_clear()


@pytest.mark.usefixtures("small_chunks")
@settings(max_examples=100)
@given(data=st.binary(max_size=150), offset=st.integers(0, 9))
def test_lanes_is_what_whole_numbers_say_at_every_length_and_alignment(data: bytes, offset: int) -> None:
    stored = torch.frombuffer(bytearray(bytes(offset) + data + b"beyond"), dtype=torch.uint8)
    assert lanes(stored[offset : offset + len(data)]) == lanes_by_hand(data, chunk_lanes=4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int32, torch.bool, torch.uint8])
def test_lanes_is_of_the_row_major_bytes(dtype: torch.dtype) -> None:
    tensor = (torch.arange(35.0).reshape(5, 7) % 11).to(dtype).t()
    data = bytes(tensor.contiguous().reshape(-1).view(torch.uint8).tolist())
    assert lanes(tensor) == lanes_by_hand(data, chunk_lanes=CHUNK_LANES)


def test_a_chunk_of_full_size_and_the_next() -> None:
    """Three lanes beyond a chunk and half a lane, against two chunks hashed apart."""
    data = torch.arange(CHUNK_LANES * 2 + 7, dtype=torch.int32)
    alone = digest_module._lane_sums(data.view(torch.uint8))
    assert alone.shape == (2, 2)
    for chunk, part in enumerate((data[: CHUNK_LANES * 2], data[CHUNK_LANES * 2 :].clone())):
        assert torch.equal(alone[chunk], digest_module._lane_sums(part.view(torch.uint8))[0])


def flipped(tensor: torch.Tensor, bit: int) -> torch.Tensor:
    data = tensor.clone().view(torch.uint8)
    data[bit // 8] ^= 1 << (bit % 8)
    return data.view(tensor.dtype)


def test_every_single_bit_counts() -> None:
    weights = torch.randn(9, generator=torch.Generator().manual_seed(0)).bfloat16()
    digests = {lanes(weights), *(lanes(flipped(weights, bit)) for bit in range(weights.nbytes * 8))}
    assert len(digests) == weights.nbytes * 8 + 1


def swapped(tensor: torch.Tensor, first: int, second: int) -> torch.Tensor:
    order = list(range(len(tensor)))
    order[first], order[second] = order[second], order[first]
    return tensor[order]


def signs(places: Sequence[int], *, like: torch.Tensor) -> torch.Tensor:
    changed = like.clone().view(-1)
    changed[list(places)] *= -1
    return changed.view(like.shape)


MISTAKES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "two swapped rows": lambda w: swapped(w, 3, 40),
    "two swapped rows of the same chunk and lane parity": lambda w: swapped(w, 0, 32),
    "two swapped elements": lambda w: swapped(w.view(-1), 17, 1029).view(w.shape),
    "two swapped halves": lambda w: w.roll(w.shape[0] // 2, 0),
    "shifted by an element": lambda w: w.view(-1).roll(1).view(w.shape),
    "shifted by a lane": lambda w: w.view(-1).roll(4).view(w.shape),
    "transposed": lambda w: w.t().contiguous().view(w.shape),
    "truncated": lambda w: w[:-1],
    "with a row of zeros more": lambda w: torch.cat([w, torch.zeros_like(w[:1])]),
    "the last element zero": lambda w: torch.cat([w.view(-1)[:-1], torch.zeros(1, dtype=w.dtype)]),
    "the sign of one": lambda w: signs([3], like=w),
    "the signs of the last of two lanes": lambda w: signs([3, 7], like=w),
    "the signs of the last of all lanes": lambda w: signs(range(3, w.numel(), 4), like=w),
    "negated": lambda w: -w,
    "one unit more in all": lambda w: (w.view(torch.int16) + 1).view(w.dtype),
    "zeros": torch.zeros_like,
}


@pytest.mark.parametrize("name", MISTAKES)
@pytest.mark.parametrize("seed", range(3))
def test_mistakes_change_the_digest(name: str, seed: int) -> None:
    weights = torch.randn(64, 36, generator=torch.Generator().manual_seed(seed)).bfloat16()
    assert lanes(MISTAKES[name](weights)) != lanes(weights)


def test_swapped_signs_at_the_top_of_lanes_do_not_cancel() -> None:
    """A sum of products with odd numbers alone would not see half of these: the difference of two multipliers is even."""
    generator = torch.Generator().manual_seed(0)
    for _ in range(200):
        weights = torch.full((256,), 0.5, dtype=torch.bfloat16)
        first, second = (torch.randperm(64, generator=generator)[:2] * 4 + 3).tolist()
        weights[first] = -0.5
        assert lanes(swapped(weights, first, second)) != lanes(weights)


def test_zeros_of_other_lengths_differ() -> None:
    sizes = [*range(20), CHUNK_LANES * 8 - 1, CHUNK_LANES * 8, CHUNK_LANES * 8 + 1]
    assert len({lanes(torch.zeros(size, dtype=torch.uint8)) for size in sizes}) == len(sizes)


def test_many_digests_at_once_are_those_of_each() -> None:
    tensors = [torch.ones(3), torch.empty(0), torch.arange(CHUNK_LANES * 3, dtype=torch.int32), torch.tensor(2.0)]
    likes = [LANES, LANES, LANES, None]
    started = [start(tensor, like=like) for tensor, like in zip(tensors, likes, strict=True)]
    assert finish(started) == [digest_like(tensor, like) for tensor, like in zip(tensors, likes, strict=True)]
    assert finish([]) == []


def test_an_unknown_algorithm_is_refused() -> None:
    with pytest.raises(ValueError, match="a digest is 'sha3:00'"):
        digest_like(torch.ones(1), "sha3:00")


@pytest.fixture
def sender_on_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sender that chooses `lanes`, as one whose tensors lie on a GPU does."""
    monkeypatch.setattr("pivotrl.weights.manifest.start", lambda tensor: start(tensor, like=LANES))


@pytest.mark.usefixtures("sender_on_a_device")
def test_a_receiver_computes_what_the_sender_did() -> None:
    weights = [("a", torch.arange(9.0)), ("b", torch.arange(5).bfloat16())]
    stream = SentStream(weights)
    assert list(stream) == weights
    assert stream.digests == {name: lanes(tensor) for name, tensor in weights}
    store = SharedMemoryStore()
    store.begin(1)
    whole = store.put([(stream.records[name], tensor) for name, tensor in weights])
    readers = {shared_memory.KIND: shared_memory.read}
    assert [record.digest for record, _ in read_bucket(whole, readers)] == [lanes(tensor) for _, tensor in weights]
    spoiled = store.put([(stream.records[name], flipped(tensor, 37)) for name, tensor in weights])
    with pytest.raises(ValueError, match="'a' arrived with other bytes than were sent"):
        read_bucket(spoiled, readers)
    store.close()


@pytest.mark.usefixtures("sender_on_a_device")
def test_an_engine_that_reads_its_model_back_and_the_parity_check_follow_the_sender(tmp_path: Path) -> None:
    config = TransformersEngineConfig(type="transformers", batch_size=8)
    engine = TransformersEngine.load(save_tiny_llama(tmp_path), config, stop_token_ids=(STOP,), pad_token_id=PAD)
    weights = named_weights(tiny_llama(seed=1))
    assert engine.weight_digests() == {name: tensor_digest(tensor) for name, tensor in named_weights(tiny_llama())}
    push(weights, engine, 1)
    held = engine.weight_digests()
    assert held == {name: lanes(tensor) for name, tensor in weights}
    assert weights_finding(weights, held, engine_version=1, trainer_version=1) is None
    wrong = [(name, tensor * 2 if name == "model.layers.0.mlp.down_proj.weight" else tensor) for name, tensor in weights]
    finding = weights_finding(wrong, held, engine_version=1, trainer_version=1)
    assert finding is not None
    assert "0.5 times tensor 'model.layers.0.mlp.down_proj.weight'" in finding.what
