"""Word shingles of a text as 64-bit hashes, computed without a Python loop over words.

A word is a run of letters, digits, underscores and non-ASCII bytes, ASCII letters folded to lower case. Deterministic across processes and machines.
Called by `dedupe.py` (similarity) and `decontaminate.py` (n-gram lists). W = words of a text, S = its shingles.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

type Hashes = NDArray[np.uint64]

# Long texts are hashed in blocks, so that the arrays of one block stay in cache.
_BLOCK_BYTES = 1 << 17
_LOAD_BYTES = 8
_PAD = b"\0" * _LOAD_BYTES
_ODD_1, _ODD_2, _ODD_3 = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xD6E8FEB86659FD93), np.uint64(0xC2B2AE3D27D4EB4F)
_WORD_BYTES = b"abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_" + bytes(range(128, 256))
_FOLD = bytes(byte + 32 if 65 <= byte <= 90 else byte if byte in _WORD_BYTES else 0 for byte in range(256))
# Keeps the first n bytes of a little-endian load, n = 0..8.
_FIRST_BYTES = np.array([(1 << (8 * n)) - 1 for n in range(_LOAD_BYTES + 1)], np.uint64)


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


def shingle_hashes(words_W: Hashes, *, num_words: int) -> Hashes:
    """Hashes of every run of `num_words` consecutive words, shape (W - num_words + 1,); one for the whole text where it is shorter."""
    if len(words_W) == 0:
        return words_W
    width = min(num_words, len(words_W))
    count = len(words_W) - width + 1
    hashes_S = np.full(count, width, np.uint64)
    for offset in range(width):
        hashes_S *= _ODD_2
        hashes_S += words_W[offset : offset + count]
    return mix(hashes_S)


def mix(hashes: Hashes) -> Hashes:
    """The finalizer of splitmix64 (Steele, Lea and Flood 2014): every input bit reaches every output bit."""
    mixed = hashes >> np.uint64(30)
    mixed ^= hashes
    mixed *= np.uint64(0xBF58476D1CE4E5B9)
    mixed ^= mixed >> np.uint64(27)
    mixed *= np.uint64(0x94D049BB133111EB)
    mixed ^= mixed >> np.uint64(31)
    return mixed


def _block_word_hashes(padded: bytes) -> Hashes:
    """Hashes of a block with 8 zero bytes on either side: three 8-byte loads per word, no work per byte beyond finding the edges."""
    bytes_N = np.frombuffer(padded, np.uint8)
    is_word_N = bytes_N != 0
    edges = np.flatnonzero(is_word_N[1:] != is_word_N[:-1]) + 1
    starts_W, ends_W = edges[0::2], edges[1::2]
    lengths_W = ends_W - starts_W
    loads = np.ndarray((len(padded) - _LOAD_BYTES + 1,), "<u8", buffer=padded, strides=(1,))
    hashes_W = loads[starts_W]
    hashes_W &= _FIRST_BYTES[np.minimum(lengths_W, _LOAD_BYTES)]
    hashes_W *= _ODD_1
    long = np.flatnonzero(lengths_W > _LOAD_BYTES)
    if len(long):
        starts, ends = starts_W[long], ends_W[long]
        hashes_W[long] ^= mix(loads[ends - _LOAD_BYTES] * _ODD_2 + loads[(starts + ends - _LOAD_BYTES) >> 1])
    hashes_W += lengths_W.astype(np.uint64) * _ODD_3
    return hashes_W
