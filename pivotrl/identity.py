"""Content ids and seeds: the same bytes give the same id, the same place in a run gives the same random numbers.

Pure and bottom tier; called by every stage.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import orjson

_DIGEST_BYTES = 16
_SEED_BYTES = 8
# torch, numpy and vLLM all take a signed 64-bit seed; 62 bits leave room for vLLM's "seed + sample index".
_SEED_BITS = 62
_READ_BYTES = 1 << 17


def canonical_json(value: Any) -> bytes:
    """JSON with sorted keys and no spaces, the byte form that every id is computed from.

    Raises:
        TypeError: for a value JSON cannot hold.
    """
    return orjson.dumps(value, option=orjson.OPT_SORT_KEYS)


def content_id(*parts: Any) -> str:
    """32 hex digits of blake2b over the canonical JSON of `parts`.

    >>> content_id({"b": 1, "a": 2}) == content_id({"a": 2, "b": 1})
    True
    """
    return hashlib.blake2b(canonical_json(list(parts)), digest_size=_DIGEST_BYTES).hexdigest()


def bytes_id(data: bytes) -> str:
    """32 hex digits of blake2b over raw bytes."""
    return hashlib.blake2b(data, digest_size=_DIGEST_BYTES).hexdigest()


def running_id(data: bytes = b"") -> hashlib.blake2b:
    """A hash that gives `bytes_id` of everything it was updated with; `copy` forks it, so ids of all prefixes of a sequence cost one pass."""
    return hashlib.blake2b(data, digest_size=_DIGEST_BYTES)


def file_id(path: Path) -> str:
    """32 hex digits of blake2b over a file's bytes, read in blocks."""
    digest = hashlib.blake2b(digest_size=_DIGEST_BYTES)
    with path.open("rb", buffering=0) as stream:
        while block := stream.read(_READ_BYTES):
            digest.update(block)
    return digest.hexdigest()


def derive_seed(run_seed: int, *place: str | int) -> int:
    """A seed in [0, 2**62) for one place of one run, for example ``derive_seed(seed, "rollout", step, pivot_id, sample_index)``.

    Independent of call order and process, unlike ``hash()``; two different places give independent seeds.

    >>> derive_seed(1, "rollout", 0) == derive_seed(1, "rollout", 0)
    True
    >>> derive_seed(1, "rollout", 0) == derive_seed(1, "rollout", "0")
    False
    """
    digest = hashlib.blake2b(canonical_json([run_seed, *place]), digest_size=_SEED_BYTES).digest()
    return int.from_bytes(digest, "big") >> (8 * _SEED_BYTES - _SEED_BITS)
