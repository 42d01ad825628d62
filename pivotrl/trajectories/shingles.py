"""Hashes of the pieces of a text, computed without a Python loop over words.

Two kinds of pieces. N-grams of words (`word_hashes`, `ngram_hashes`), for lists of phrases: whatever stands between the words is ignored.
Shingles (`shingle_hashes`), for similarity: the 32 bytes from the start of each word, five words or so, at half the cost. Both fold ASCII letters to
lower case; a word is a run of letters, digits, underscores and non-ASCII bytes. Deterministic across processes and machines.
Called by `dedupe.py` and `decontaminate.py`. W = words of a text, S = its shingles.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

type Hashes = NDArray[np.uint64]

SHINGLE_BYTES = 32
ALL_WORDS = 512
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


def shingle_hashes(texts: Sequence[bytes]) -> list[Hashes]:
    """For each UTF-8 text one hash per sampled word: of the 32 bytes from its start, zeros after the end of the text; shapes (S,).

    Up to `ALL_WORDS` words are all sampled. Of a longer text those are whose first 8 bytes hash to one of every four values: the same ones in
    every text, so that similarities stay what they are. Short texts are hashed together, which saves most of their time.
    """
    if not texts:
        return []
    if sum(map(len, texts)) > _BLOCK_BYTES:
        if len(texts) == 1:
            return [_long_text_hashes(texts[0])]
        middle = len(texts) // 2
        return shingle_hashes(texts[:middle]) + shingle_hashes(texts[middle:])
    # One byte before each text tells whether a word starts it; 32 zeros after it complete its last shingle.
    folded = b"\0" + _PAD.join(texts).translate(_FOLD) + _PAD
    starts_W, loads = _word_starts(folded), _loads(folded)
    hashes_W = loads[starts_W]
    ends = np.cumsum([len(text) + SHINGLE_BYTES for text in texts])
    bounds = starts_W.searchsorted(ends).tolist()
    is_sampled_W = _is_sampled(hashes_W)
    for first, last in zip([0, *bounds], bounds, strict=False):
        if last - first <= ALL_WORDS:
            is_sampled_W[first:last] = True
    sampled_S = is_sampled_W.nonzero()[0]
    hashes_S = _shingles(loads, starts_W[sampled_S], hashes_W[sampled_S])
    return np.split(hashes_S, sampled_S.searchsorted(bounds[:-1]))


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


def _long_text_hashes(text: bytes) -> Hashes:
    folded = b"\0" + text.translate(_FOLD) + _PAD
    blocks = [folded[start : start + _BLOCK_BYTES + 1 + SHINGLE_BYTES] for start in range(0, len(text), _BLOCK_BYTES)]
    starts = [_word_starts(block) for block in blocks]
    is_short = sum(map(len, starts)) <= ALL_WORDS
    hashes: list[Hashes] = []
    for block, starts_W in zip(blocks, starts, strict=True):
        loads = _loads(block)
        hashes_W = loads[starts_W]
        sampled_S = slice(None) if is_short else _is_sampled(hashes_W).nonzero()[0]
        hashes.append(_shingles(loads, starts_W[sampled_S], hashes_W[sampled_S]))
    return np.concatenate(hashes)


def _word_starts(folded: bytes) -> NDArray[np.int64]:
    """Places where a word starts, but for the first byte and the last 32."""
    is_word_N = np.frombuffer(folded, np.uint8) != 0
    return (is_word_N[1:-SHINGLE_BYTES] & ~is_word_N[: -SHINGLE_BYTES - 1]).nonzero()[0] + 1


def _is_sampled(hashes_W: Hashes) -> NDArray[np.bool_]:
    return hashes_W * _ODD_3 < _QUARTER


def _shingles(loads: Hashes, starts_S: NDArray[np.int64], hashes_S: Hashes) -> Hashes:
    """Hashes of the 32 bytes from each start, the first 8 of which are given; both arrays are used up."""
    for _ in range(SHINGLE_BYTES // _LOAD_BYTES - 1):
        starts_S += _LOAD_BYTES
        hashes_S *= _ODD_2
        hashes_S += loads[starts_S]
    return _spread(hashes_S)


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
