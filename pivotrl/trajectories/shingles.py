"""Hashes of the pieces of a text, computed without a Python loop over words.

Two kinds of pieces. N-grams of words (`word_hashes`, `ngram_hashes`), for lists of phrases: whatever stands between the words is ignored.
Shingles (`shingle_hashes`), for similarity: the 32 bytes from the start of each word, five words or so, at half the cost. Both fold ASCII letters to
lower case; a word is a run of letters, digits, underscores and non-ASCII bytes. Deterministic across processes and machines.
Called by `dedupe.py` and `decontaminate.py`. W = words of a text, S = its shingles.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

type Hashes = NDArray[np.uint64]

SHINGLE_BYTES = 32
ALL_WORDS = 1024
_QUARTER = np.uint64(1 << 62)
# Long texts are hashed in blocks, so that the arrays of one block stay in cache.
_BLOCK_BYTES = 1 << 17
_LOAD_BYTES = 8
_PAD = b"\0" * SHINGLE_BYTES
_ODD_1, _ODD_2, _ODD_3 = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xD6E8FEB86659FD93), np.uint64(0xC2B2AE3D27D4EB4F)
_WORD_BYTES = b"abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_" + bytes(range(128, 256))
_FOLD = bytes(byte + 32 if 65 <= byte <= 90 else byte if byte in _WORD_BYTES else 0 for byte in range(256))
# Keeps the first n bytes of a little-endian load, n = 0..8.
_FIRST_BYTES = np.array([(1 << (8 * n)) - 1 for n in range(_LOAD_BYTES + 1)], np.uint64)


def shingle_hashes(text: bytes) -> Hashes:
    """One hash per sampled word of UTF-8 `text`: of the 32 bytes from its start, zeros after the end of the text; shape (S,).

    Up to `ALL_WORDS` words are all sampled. Of a longer text those are whose first 8 bytes hash to one of every four values: the same ones in
    every text, so that similarities stay what they are.
    """
    folded = b"\0" + text.translate(_FOLD) + _PAD
    parts: list[tuple[Hashes, NDArray[np.int64], Hashes]] = []
    num_words = 0
    for start in range(0, len(text), _BLOCK_BYTES):
        # One byte before the block tells whether a word starts in it; 32 after it complete the last shingle.
        block = folded[start : start + _BLOCK_BYTES + 1 + SHINGLE_BYTES]
        is_word_N = np.frombuffer(block, np.uint8) != 0
        starts_W = np.flatnonzero(is_word_N[1:-SHINGLE_BYTES] & ~is_word_N[: -SHINGLE_BYTES - 1]) + 1
        loads = _loads(block)
        parts.append((loads, starts_W, loads[starts_W]))
        num_words += len(starts_W)
    if not parts:
        return np.empty(0, np.uint64)
    hashes = [_block_shingle_hashes(*part, is_sampled=num_words > ALL_WORDS) for part in parts]
    return hashes[0] if len(hashes) == 1 else np.concatenate(hashes)


def word_hashes(text: bytes) -> Hashes:
    """One hash per word of UTF-8 `text`, in order, shape (W,).

    Covers a word's length, its first, middle and last 8 bytes: words up to 24 bytes are told apart by every byte, longer ones by these 24. A word
    longer than 128 KiB counts as several.
    """
    folded = text.translate(_FOLD)
    parts: list[Hashes] = []
    start = 0
    while start < len(folded):
        end = min(start + _BLOCK_BYTES, len(folded))
        if end < len(folded):
            cut = folded.rfind(b"\0", start, end)
            end = cut + 1 if cut >= start else end
        parts.append(_block_word_hashes(_PAD + folded[start:end] + _PAD))
        start = end
    return np.concatenate(parts) if parts else np.empty(0, np.uint64)


def ngram_hashes(words_W: Hashes, *, num_words: int) -> Hashes:
    """Hashes of every run of `num_words` consecutive words, shape (W - num_words + 1,), none where the text is shorter."""
    count = max(0, len(words_W) - num_words + 1)
    hashes = np.full(count, num_words, np.uint64)
    for offset in range(num_words):
        hashes *= _ODD_2
        hashes += words_W[offset : offset + count]
    return mix(hashes)


def mix(hashes: Hashes) -> Hashes:
    """The finalizer of splitmix64 (Steele, Lea and Flood 2014): every input bit reaches every output bit."""
    mixed = hashes >> np.uint64(30)
    mixed ^= hashes
    mixed *= np.uint64(0xBF58476D1CE4E5B9)
    mixed ^= mixed >> np.uint64(27)
    mixed *= np.uint64(0x94D049BB133111EB)
    mixed ^= mixed >> np.uint64(31)
    return mixed


def _spread(hashes: Hashes) -> Hashes:
    """Half of `mix`, in place: enough for sampling by the smallest hash, where the high bits must depend on all bytes."""
    hashes *= _ODD_1
    hashes ^= hashes >> np.uint64(32)
    hashes *= _ODD_3
    hashes ^= hashes >> np.uint64(29)
    return hashes


def _block_shingle_hashes(loads: Hashes, starts_W: NDArray[np.int64], hashes_W: Hashes, *, is_sampled: bool) -> Hashes:
    if is_sampled:
        sampled = np.flatnonzero(hashes_W * _ODD_3 < _QUARTER)
        starts_W, hashes_W = starts_W[sampled], hashes_W[sampled]
    for _ in range(SHINGLE_BYTES // _LOAD_BYTES - 1):
        starts_W += _LOAD_BYTES
        hashes_W *= _ODD_2
        hashes_W += loads[starts_W]
    return _spread(hashes_W)


def _loads(data: bytes) -> Hashes:
    """Every 8 consecutive bytes as one little-endian integer, a view without a copy."""
    return np.ndarray((len(data) - _LOAD_BYTES + 1,), "<u8", buffer=data, strides=(1,))


def _block_word_hashes(padded: bytes) -> Hashes:
    """Hashes of a block with zero bytes on either side: three 8-byte loads a word, and no work per byte beyond finding the edges."""
    is_word_N = np.frombuffer(padded, np.uint8) != 0
    edges = np.flatnonzero(is_word_N[1:] != is_word_N[:-1]) + 1
    starts_W, ends_W = edges[0::2], edges[1::2]
    lengths_W = ends_W - starts_W
    loads = _loads(padded)
    hashes_W = loads[starts_W]
    hashes_W &= _FIRST_BYTES[np.minimum(lengths_W, _LOAD_BYTES)]
    hashes_W *= _ODD_1
    long = np.flatnonzero(lengths_W > _LOAD_BYTES)
    if len(long):
        starts, ends = starts_W[long], ends_W[long]
        hashes_W[long] ^= mix(loads[ends - _LOAD_BYTES] * _ODD_2 + loads[(starts + ends - _LOAD_BYTES) >> 1])
    hashes_W += lengths_W.astype(np.uint64) * _ODD_3
    return hashes_W
