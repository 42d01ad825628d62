"""Exact and near-duplicate detection in one pass, without comparing every pair and with a few hundred bytes per trajectory.

`IdSet` remembers content ids. `NearDuplicates` remembers a sketch of each kept text: the bottom-k variant of MinHash (Broder 1997, "On the
resemblance and containment of documents"; exact for texts of at most k shingles) decides, and one-permutation hashing (Li, Owen and Zhang 2012)
with densification (Shrivastava 2017) in bands finds what to compare. Called by `ingest.py`. B = bands, R = rows of a band, M = bins.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pivotrl.trajectories.shingles import Hashes, mix, shingle_hashes

SAID_SKETCH_SIZE = 128
SEEN_SKETCH_SIZE = 64
"""k: shingles kept of each text. Similarity is exact up to k shingles; beyond, its standard error at 0.95 is 0.02 for k = 128, 0.03 for 64."""
_NUM_BINS = 64
# A text this similar to another must be compared with it this often.
_MIN_RECALL = 0.99
# Bounds the work where thousands of kept texts share a band without being near-duplicates (one template, different data).
_MAX_COMPARISONS = 64
_MAX_PROBES = 64
_RECENT_IDS = 1 << 16
_ODD = np.uint64(0x9E3779B97F4A7C15)
_BIN_SHIFT = np.uint64(64 - 6)
_BIN_BOUNDS_M = np.arange(_NUM_BINS, dtype=np.uint64) << _BIN_SHIFT

type Sketch = NDArray[np.uint32]


@dataclass(frozen=True, slots=True)
class ShingleSketch:
    """The bottom-k MinHash of one text."""

    hashes: Sketch
    """High 32 bits of the k smallest distinct shingle hashes, ascending, shape (<= k,)."""
    num_shingles: int
    """Distinct shingles of the whole text."""


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """What is remembered of one trajectory; `to_bytes` and `from_bytes` are its form on disk."""

    said: ShingleSketch
    """Of what agent and user said and what was called."""
    seen: ShingleSketch
    """Of what tools answered, which is most of the text and little of the behaviour, and so is looked at apart."""
    bins_M: Hashes
    """Densified one-permutation MinHash of what was said, shape (M,)."""

    def to_bytes(self) -> bytes:
        sizes = np.array([self.said.num_shingles, self.seen.num_shingles], np.uint64)
        return sizes.tobytes() + self.bins_M.tobytes() + self.said.hashes.tobytes() + self.seen.hashes.tobytes()

    @staticmethod
    def from_bytes(data: bytes) -> Fingerprint:
        num_said, num_seen = (int(size) for size in np.frombuffer(data, np.uint64, 2))
        bins_M = np.frombuffer(data, np.uint64, _NUM_BINS, offset=16)
        hashes = np.frombuffer(data, np.uint32, offset=16 + 8 * _NUM_BINS)
        split = min(num_said, SAID_SKETCH_SIZE)
        return Fingerprint(ShingleSketch(hashes[:split], num_said), ShingleSketch(hashes[split:], num_seen), bins_M)


def fingerprints(texts: Sequence[tuple[bytes, bytes]]) -> list[Fingerprint]:
    """The fingerprint of each trajectory from its two UTF-8 texts, what was said and what was seen; together, which is faster."""
    hashes = shingle_hashes([text for pair in texts for text in pair])
    marks: list[Fingerprint] = []
    for said_S, seen_S in zip(hashes[0::2], hashes[1::2], strict=True):
        said_S, seen_S = _sorted_distinct(said_S), _sorted_distinct(seen_S)
        marks.append(Fingerprint(_sketch(said_S, SAID_SKETCH_SIZE), _sketch(seen_S, SEEN_SKETCH_SIZE), _bins(said_S)))
    return marks


def similarity(a: ShingleSketch, b: ShingleSketch, *, size: int) -> float:
    """Estimated Jaccard similarity of two texts' shingle sets, exact where both have at most `size` shingles; 1 for two empty texts.

    J = |bottom_k(A u B) n A n B| / |bottom_k(A u B)|, k = `size`, the size both sketches were made with.
    """
    both = np.sort(np.concatenate((a.hashes, b.hashes)))
    if not len(both):
        return 1.0
    is_second = both[1:] == both[:-1]
    union = both[np.concatenate(([True], ~is_second))]
    if max(a.num_shingles, b.num_shingles) > size:
        union = union[:size]
    shared = both[1:][is_second]
    return float(np.count_nonzero(shared <= union[-1])) / len(union)


class NearDuplicates:
    """The kept trajectories so far.

    Args:
        threshold: similarity at which a trajectory is a near-duplicate, in [0, 1); use none of this class for 1.
    """

    def __init__(self, threshold: float) -> None:
        self._threshold = threshold
        rows = next(r for r in (32, 16, 8, 4, 2, 1) if r == 1 or 1 - (1 - threshold**r) ** (_NUM_BINS // r) >= _MIN_RECALL)
        self._num_bands = _NUM_BINS // rows
        self._band_numbers_B = np.arange(self._num_bands)
        self._count = 0
        self._allocate(1024)

    def __len__(self) -> int:
        return self._count

    def admit(self, mark: Fingerprint, *, group: int) -> bool:
        """Remembers a trajectory and returns True, unless one of the same group is at least as similar as the threshold.

        Similar means similar in what was said, and in what tools answered. `group` (0..255) keeps apart what must never count as the same, such
        as different outcomes.
        """
        bands_B = self._bands(mark, group)
        candidates = self._promising(mark, self._candidates(bands_B))
        if any(self._is_near(mark, group, entry) for entry in candidates):
            return False
        self._remember(mark, group, bands_B)
        return True

    def add(self, mark: Fingerprint, *, group: int) -> None:
        """Remembers a trajectory that was admitted in an earlier run."""
        self._remember(mark, group, self._bands(mark, group))

    def _promising(self, mark: Fingerprint, candidates: list[int]) -> list[int]:
        """Those with enough hashes in common, counted for all at once: J <= |a n b| / max(|a|, |b|) for the sketches a and b."""
        if not candidates or not len(mark.said.hashes):
            return candidates
        rows = self._sketches[0][candidates]
        places = np.minimum(mark.said.hashes.searchsorted(rows), len(mark.said.hashes) - 1)
        num_shared = (mark.said.hashes[places] == rows).sum(axis=1)
        sizes = np.minimum(self._sizes[0][candidates], SAID_SKETCH_SIZE)
        is_promising = num_shared >= self._threshold * np.maximum(sizes, len(mark.said.hashes))
        return [entry for entry, promising in zip(candidates, is_promising.tolist(), strict=True) if promising]

    def _is_near(self, mark: Fingerprint, group: int, entry: int) -> bool:
        said, seen = (
            ShingleSketch(sketches[entry, : min(int(sizes[entry]), sketches.shape[1])], int(sizes[entry]))
            for sketches, sizes in zip(self._sketches, self._sizes, strict=True)
        )
        return (
            self._groups[entry] == group
            and self._is_similar(mark.said, said, SAID_SKETCH_SIZE)
            and self._is_similar(mark.seen, seen, SEEN_SKETCH_SIZE)
        )

    def _is_similar(self, a: ShingleSketch, b: ShingleSketch, size: int) -> bool:
        # J(A, B) <= min(|A|, |B|) / max(|A|, |B|)
        if min(a.num_shingles, b.num_shingles) < self._threshold * max(a.num_shingles, b.num_shingles):
            return False
        return similarity(a, b, size=size) >= self._threshold

    def _remember(self, mark: Fingerprint, group: int, bands_B: NDArray[np.uint32]) -> None:
        if self._count == len(self._groups):
            self._grow()
        entry = self._count
        for sketches, sizes, part in zip(self._sketches, self._sizes, (mark.said, mark.seen), strict=True):
            sketches[entry, : len(part.hashes)] = part.hashes
            sizes[entry] = part.num_shingles
        self._groups[entry] = group
        self._band_hashes[entry] = bands_B
        self._link(entry, bands_B)
        self._count += 1

    def _bands(self, mark: Fingerprint, group: int) -> NDArray[np.uint32]:
        data = mark.bins_M.tobytes()
        width = len(data) // self._num_bands
        return np.array([zlib.crc32(data[start : start + width], group) for start in range(0, len(data), width)], np.uint32)

    def _candidates(self, bands_B: NDArray[np.uint32]) -> list[int]:
        found: dict[int, None] = {}
        band_numbers = self._band_numbers_B
        links = self._heads[band_numbers, bands_B & self._mask]
        for _ in range(_MAX_COMPARISONS):
            alive = links.nonzero()[0]
            if not len(alive) or len(found) >= _MAX_COMPARISONS:
                break
            band_numbers, entries = band_numbers[alive], links[alive].astype(np.int64) - 1
            found.update(dict.fromkeys(entries[self._band_hashes[entries, band_numbers] == bands_B[band_numbers]].tolist()))
            links = self._next[entries, band_numbers]
        return list(found)[:_MAX_COMPARISONS]

    def _link(self, entry: int, bands_B: NDArray[np.uint32]) -> None:
        slots_B = bands_B & self._mask
        self._next[entry] = self._heads[self._band_numbers_B, slots_B]
        self._heads[self._band_numbers_B, slots_B] = entry + 1

    def _allocate(self, capacity: int) -> None:
        self._sketches = tuple(np.zeros((capacity, size), np.uint32) for size in (SAID_SKETCH_SIZE, SEEN_SKETCH_SIZE))
        self._sizes = tuple(np.zeros(capacity, np.int64) for _ in self._sketches)
        self._groups = np.zeros(capacity, np.uint8)
        self._band_hashes = np.zeros((capacity, self._num_bands), np.uint32)
        # Chains as in a hash table: the newest entry of each slot plus one, and for each entry the one before it.
        self._heads = np.zeros((self._num_bands, 2 * capacity), np.uint32)
        self._next = np.zeros((capacity, self._num_bands), np.uint32)
        self._mask = np.uint32(2 * capacity - 1)

    def _grow(self) -> None:
        old = (*self._sketches, *self._sizes, self._groups, self._band_hashes)
        self._allocate(2 * self._count)
        for array, old_array in zip((*self._sketches, *self._sizes, self._groups, self._band_hashes), old, strict=True):
            array[: self._count] = old_array
        for entry in range(self._count):
            self._link(entry, self._band_hashes[entry])


class IdSet:
    """A set of content ids: recent ones in a Python set, the others as sorted runs of 64-bit prefixes, 8 bytes an id."""

    def __init__(self) -> None:
        self._recent: set[int] = set()
        self._runs: list[Hashes] = []

    def add(self, ids: Sequence[str]) -> list[bool]:
        """Adds 32-hex-digit ids; True for each that was neither in the set nor earlier in `ids`.

        Two different ids count as one with probability about n**2 / 2**65.
        """
        keys = [int(entry[:16], 16) for entry in ids]
        is_stored = self._is_in_runs(keys)
        is_new: list[bool] = []
        for key, stored in zip(keys, is_stored, strict=True):
            is_new.append(not stored and key not in self._recent)
            if is_new[-1]:
                self._recent.add(key)
        if len(self._recent) > _RECENT_IDS:
            self._flush()
        return is_new

    def add_keys(self, keys_N: Hashes) -> NDArray[np.bool_]:
        """`add` for many at once: the first 64 bits of ids, shape (N,)."""
        self._flush()
        keys, first = np.unique(keys_N, return_index=True)
        is_new = ~self._known(keys)
        self._add_run(keys[is_new])
        is_new_N = np.zeros(len(keys_N), np.bool_)
        is_new_N[first[is_new]] = True
        return is_new_N

    def _is_in_runs(self, keys: Sequence[int]) -> list[bool]:
        return self._known(np.array(keys, np.uint64)).tolist() if self._runs else [False] * len(keys)

    def _known(self, keys_N: Hashes) -> NDArray[np.bool_]:
        is_known_N = np.zeros(len(keys_N), np.bool_)
        for run in self._runs:
            is_known_N |= run[np.minimum(np.searchsorted(run, keys_N), len(run) - 1)] == keys_N
        return is_known_N

    def _flush(self) -> None:
        self._add_run(np.sort(np.fromiter(self._recent, np.uint64, len(self._recent))))
        self._recent.clear()

    def _add_run(self, run: Hashes) -> None:
        if not len(run):
            return
        # Runs at least halve in length from first to last, so there are at most log2(n) of them.
        while self._runs and len(self._runs[-1]) < 2 * len(run):
            run = np.sort(np.concatenate((self._runs.pop(), run)))
        self._runs.append(run)


def _sorted_distinct(hashes_S: Hashes) -> Hashes:
    sorted_S = hashes_S.copy()
    sorted_S.sort()
    if not len(sorted_S):
        return sorted_S
    is_first_S = np.empty(len(sorted_S), np.bool_)
    is_first_S[0] = True
    np.not_equal(sorted_S[1:], sorted_S[:-1], out=is_first_S[1:])
    return sorted_S[is_first_S]


def _sketch(sorted_S: Hashes, size: int) -> ShingleSketch:
    return ShingleSketch((sorted_S[:size] >> np.uint64(32)).astype(np.uint32), len(sorted_S))


def _bins(sorted_S: Hashes) -> Hashes:
    if not len(sorted_S):
        return np.zeros(_NUM_BINS, np.uint64)
    first_M = sorted_S.searchsorted(_BIN_BOUNDS_M)
    first_M[first_M == len(sorted_S)] = 0
    values_M = sorted_S[first_M]
    is_full_M = (values_M >> _BIN_SHIFT) == np.arange(_NUM_BINS, dtype=np.uint64)
    if is_full_M.all():
        return values_M
    empty = np.flatnonzero(~is_full_M)
    for attempt in range(_MAX_PROBES):
        # An empty bin borrows from the first full bin of its own fixed random sequence (optimal densification).
        probes = (mix(empty.astype(np.uint64) * _ODD + np.uint64(attempt + 1)) >> _BIN_SHIFT).astype(np.int64)
        hit = is_full_M[probes]
        values_M[empty[hit]] = values_M[probes[hit]]
        empty = empty[~hit]
        if not len(empty):
            return values_M
    values_M[empty] = sorted_S[0]
    return values_M
