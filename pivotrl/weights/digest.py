"""The digest of a tensor's bytes, computed where the tensor lies.

Two algorithms, and a digest says which it is of: blake3 on a CPU (32 hex digits), `lanes` elsewhere ("lanes:" and 32 hex digits), which torch's
integer operations compute on any device with the same result. Whoever compares a tensor with a digest uses that digest's algorithm, on whatever
device the tensor is. Both find mistakes; `lanes` is no cryptographic hash and keeps nobody out who wants to deceive.

`lanes`: row-major bytes, cut into chunks of 2^20 lanes of 8 bytes, the last lane filled up with zeros. Lane x at place i of its chunk becomes
h(x + k_i), all modulo 2^64: h is one to one (shift by half a word, exclusive or, odd multiplier, twice), k_i is an odd number of its own per place.
A chunk has the two sums of h and of h * k_i, which do not depend on the order of adding. The digest is blake2b of the number of bytes and all sums.
One changed lane always changes both sums; lanes that are swapped, shifted or changed together would have to cancel in both at once. Chunks, lengths
and the tail are told apart by blake2b.
"""

from __future__ import annotations

import functools
import hashlib
import struct
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from blake3 import blake3

_DIGEST_BYTES = 16
# Below it, handing out work to threads costs more than hashing.
_THREADED_BYTES = 1 << 20
LANES = "lanes:"
_LANE_BYTES = 8
# 8 MiB: two buffers and the table of places, each of this size, are all the memory that a digest takes beside the tensor's own.
CHUNK_LANES = 1 << 20
_HALF_BITS = 32
_LOW_HALF = (1 << _HALF_BITS) - 1


def _odd_number(name: str) -> int:
    """A number of 64 bits without structure, as torch has it (signed)."""
    number = int.from_bytes(hashlib.blake2b(f"pivotrl lanes {name}".encode(), digest_size=_LANE_BYTES).digest(), "little", signed=True)
    return number | 1


MULTIPLIERS = (_odd_number("first multiplier"), _odd_number("second multiplier"))
PLACE_STEP = _odd_number("step between places")


@dataclass(frozen=True, slots=True)
class StartedDigest:
    """A digest whose sums may still be computed by the device; `finish` waits for them."""

    num_bytes: int
    text: str
    """The digest where it is known already, else empty."""
    sums_C_2: torch.Tensor | None
    """int64, on the tensor's device: both sums of each chunk."""


def tensor_digest(tensor: torch.Tensor) -> str:
    """By blake3 where the tensor lies on a CPU, else by `lanes`: the algorithm of a sender, which decides.

    Takes 24 MiB beside the tensor on its device, and a copy of the tensor where it is not contiguous.
    """
    return finish([start(tensor)])[0]


def digest_like(tensor: torch.Tensor, digest: str | None) -> str:
    """By the algorithm of another digest, to be compared with it; None: `tensor_digest`.

    Raises:
        ValueError: for a digest of an unknown algorithm.
    """
    return finish([start(tensor, like=digest)])[0]


def start(tensor: torch.Tensor, *, like: str | None = None) -> StartedDigest:
    """Lets the device begin; work that follows on the same stream may change the tensor.

    Args:
        like: a digest by whose algorithm; None: as `tensor_digest`.

    Raises:
        ValueError: as `digest_like`.
    """
    if like is not None and ":" in like and not like.startswith(LANES):
        raise ValueError(f"a digest is {like!r}; this version knows those of blake3 (hex digits alone) and {LANES!r}")
    is_lanes = tensor.device.type != "cpu" if like is None else like.startswith(LANES)
    data = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    if is_lanes:
        return StartedDigest(data.numel(), "", _lane_sums(data))
    on_host = data.cpu().numpy()
    threads = blake3.AUTO if on_host.nbytes >= _THREADED_BYTES else 1
    return StartedDigest(on_host.nbytes, blake3(on_host, max_threads=threads).hexdigest(length=_DIGEST_BYTES), None)


def finish(started: Sequence[StartedDigest]) -> list[str]:
    """The digests, in order. Waits for the device once for all of them, because each wait costs as much as a small tensor.

    Raises:
        RuntimeError: as torch does, where the tensors lie on several devices.
    """
    sums = [one.sums_C_2 for one in started if one.sums_C_2 is not None]
    rows: list[list[int]] = torch.cat(sums).tolist() if sums else []
    on_host = iter(rows)
    digests: list[str] = []
    for one in started:
        if one.sums_C_2 is None:
            digests.append(one.text)
            continue
        digest = hashlib.blake2b(struct.pack("<Q", one.num_bytes), digest_size=_DIGEST_BYTES)
        for _ in range(len(one.sums_C_2)):
            digest.update(struct.pack("<2q", *next(on_host)))
        digests.append(LANES + digest.hexdigest())
    return digests


def _lane_sums(data: torch.Tensor) -> torch.Tensor:
    """int64 [chunks, 2] on the device of the bytes."""
    keys = _place_keys(data.device)
    num_lanes = -(-data.numel() // _LANE_BYTES)
    mixed, shifted = (torch.empty(min(num_lanes, CHUNK_LANES), dtype=torch.int64, device=data.device) for _ in range(2))
    sums_C_2 = torch.empty(-(-num_lanes // CHUNK_LANES), 2, dtype=torch.int64, device=data.device)
    for chunk in range(len(sums_C_2)):
        begin = chunk * CHUNK_LANES * _LANE_BYTES
        lanes = _as_lanes(data[begin : begin + CHUNK_LANES * _LANE_BYTES], spare=mixed)
        count = lanes.numel()
        hashed = torch.add(lanes, keys[:count], out=mixed[:count])
        _mix(hashed, shifted[:count])
        torch.sum(hashed, dim=0, out=sums_C_2[chunk, 0])
        torch.sum(hashed.mul_(keys[:count]), dim=0, out=sums_C_2[chunk, 1])
    return sums_C_2


def _as_lanes(data: torch.Tensor, *, spare: torch.Tensor) -> torch.Tensor:
    """Bytes as int64; those that do not begin or end with a lane are copied into the spare lanes, and zeros after them."""
    if data.numel() % _LANE_BYTES == 0 and data.storage_offset() % _LANE_BYTES == 0 and data.data_ptr() % _LANE_BYTES == 0:
        return data.view(torch.int64)
    lanes = spare[: -(-data.numel() // _LANE_BYTES)]
    lanes[-1:] = 0
    lanes.view(torch.uint8)[: data.numel()] = data
    return lanes


def _mix(lanes: torch.Tensor, spare: torch.Tensor) -> None:
    """One to one, in place: the high half goes into the low one, and a product carries the low one up, twice."""
    for multiplier in MULTIPLIERS:
        # torch shifts the sign in; the mask takes it out.
        torch.bitwise_right_shift(lanes, _HALF_BITS, out=spare)
        lanes.bitwise_xor_(spare.bitwise_and_(_LOW_HALF)).mul_(multiplier)


@functools.cache
def _place_keys(device: torch.device) -> torch.Tensor:
    """An odd number per place in a chunk, made on the CPU once and kept on the device."""
    keys = torch.arange(1, CHUNK_LANES + 1) * PLACE_STEP
    _mix(keys, torch.empty_like(keys))
    return keys.bitwise_or_(1).to(device)
