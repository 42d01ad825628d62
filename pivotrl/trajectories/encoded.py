"""The JSON of a trajectory, made once: its content id, its candidates' ids and the stored file are all of these bytes.

Bottom of the package; called by the adapters' `converted`, by `prepare.py` and by `store.py`.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import orjson

from pivotrl.identity import canonical_json, running_id
from pivotrl.types import Message, Role, Tool

REMEMBERED_PROMPTS = 64
"""Size of caches over system prompts: the same long one comes with every trajectory of a harness."""


@dataclass(frozen=True, slots=True)
class Encoded:
    """What `encode_trajectory` makes."""

    messages: tuple[bytes, ...]
    """Canonical JSON of each message."""
    all_messages: bytes
    """The JSON array of them."""
    tools: bytes
    """Canonical JSON of all tools."""

    def content_id(self) -> str:
        """`identity.content_id` of messages and tools, without encoding them again."""
        running = running_id(b"[")
        running.update(self.all_messages)
        running.update(b"," + self.tools + b"]")
        return running.hexdigest()


def encode_trajectory(messages: Sequence[Message], tools: Sequence[Tool]) -> Encoded:
    """The JSON of messages and tools.

    Raises:
        TypeError: for text that UTF-8 cannot hold and for integers beyond 64 bits.
    """
    parts = tuple(_encode_prompt(message) if message.role is Role.SYSTEM else encode_message(message) for message in messages)
    return Encoded(parts, b"[" + b",".join(parts) + b"]", canonical_json(tools))


def encode_message(message: Message) -> bytes:
    """The bytes of `canonical_json(message)`, faster: as a dict, because orjson is slow on enum fields.

    Raises:
        TypeError: for text that UTF-8 cannot hold.
    """
    return orjson.dumps(
        {
            "role": message.role._value_,
            "content": message.content,
            "tool_calls": message.tool_calls,
            "reasoning": message.reasoning,
            "tool_call_id": message.tool_call_id,
            "name": message.name,
            "origin": message.origin._value_,
            "is_error": message.is_error,
            "parse": message.parse._value_,
        }
    )


@functools.lru_cache(maxsize=REMEMBERED_PROMPTS)
def _encode_prompt(message: Message) -> bytes:
    return encode_message(message)
