"""Finds credentials in trajectories and replaces them by ``[REDACTED:kind]``, in message text, reasoning and call arguments.

Well-known shapes only, so that hashes, ids and base64 payloads are left alone. A cheap look at the encoded messages decides whether the
patterns run at all. Called by `ingest.py`; pure.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections import Counter
from typing import Any, cast

from pivotrl.actions.protocol import json_text
from pivotrl.types import Message, ToolCall

# Not inside a longer word; the n of an escaped newline, in text that is itself JSON, is no part of a word.
_START = r"(?:(?<![A-Za-z0-9])|(?<=\\[nrt]))"
# Kind -> pattern. The group named `secret`, or else the whole match, is replaced.
_KINDS = {
    "private_key": (
        r"-----BEGIN (?:[A-Z0-9]+ )*PRIVATE KEY-----(?:\\[nr]|\s)*(?:[A-Za-z-]+: [^\n\\]{1,80}(?:\\[nr]|\s)+)*"
        r"(?:[A-Za-z0-9+/=]|\\[nr]|\s){16,}(?:-----END (?:[A-Z0-9]+ )*PRIVATE KEY-----)?"
    ),
    "aws_access_key_id": _START + r"(?:AKIA|ASIA)[A-Z0-9]{16}(?![A-Za-z0-9])",
    "aws_secret_access_key": r"(?i:aws_?secret_?(?:access_?)?key)\W{1,8}(?P<aws_secret>[A-Za-z0-9/+]{40})(?![A-Za-z0-9/+])",
    "github_token": _START + r"(?:gh[pousr]_[A-Za-z0-9]{36,}|github_pat_[A-Za-z0-9_]{40,})",
    "gitlab_token": _START + r"glpat-[A-Za-z0-9_-]{20,}",
    "anthropic_key": _START + r"sk-ant-[A-Za-z0-9_-]{20,}",
    "openai_key": _START + r"sk-(?:(?:proj|svcacct|admin)-[A-Za-z0-9_-]{20,}|(?=[A-Za-z]*[0-9])[A-Za-z0-9]{32,})",
    "huggingface_token": _START + r"hf_[A-Za-z0-9]{30,}",
    "google_key": _START + r"AIza[A-Za-z0-9_-]{35}(?![A-Za-z0-9_-])",
    "slack_token": _START + r"xox[abeoprs]-[A-Za-z0-9-]{16,}",
    "stripe_key": _START + r"[rs]k_live_[A-Za-z0-9]{20,}",
    "npm_token": _START + r"npm_[A-Za-z0-9]{36}(?![A-Za-z0-9])",
    "pypi_token": _START + r"pypi-AgE[A-Za-z0-9_-]{50,}",
    "jwt": _START + r"eyJ[A-Za-z0-9_-]{17,}\.eyJ[A-Za-z0-9_-]{10,}\.[A-Za-z0-9_-]{10,}",
    "bearer_token": r"[Bb]earer[ +](?P<bearer>(?=[A-Za-z._~+/=-]*[0-9])[A-Za-z0-9._~+/=-]{20,})",
    "url_password": r"(?<![A-Za-z])[A-Za-z][A-Za-z0-9+.-]{1,20}://[^\s/:@\"'<>\\]{0,80}:(?P<url_password>[^\s/@\"'<>\\$\{\[]{3,128})@",
}
_SECRET_GROUPS = {"aws_secret_access_key": "aws_secret", "bearer_token": "bearer", "url_password": "url_password"}
_PATTERNS = {kind: re.compile(pattern) for kind, pattern in _KINDS.items()}

# The prefilter. Tokens that speak for themselves hold a run of at least this many of these characters, which ordinary words seldom do;
# the other shapes are found by a word that must stand in or before them.
_RUN_BYTES = 20
_RUN_CHARACTERS = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789_-"
_RUN_TABLE = bytes(0x78 if byte in _RUN_CHARACTERS else 0x20 for byte in range(256))
_RUN = b"x" * _RUN_BYTES
# A longer run is a payload (base64), which the patterns would take minutes to search for tokens that are none.
_MAX_TOKEN_START = 512
_TOKEN = re.compile(
    rb"A[KS]IA[A-Z0-9]{16}|gh[pousr]_[A-Za-z0-9]{36}|github_pat_|glpat-|sk-[A-Za-z0-9_-]{20}|xox[abeoprs]-|AIza[A-Za-z0-9_-]{35}"
    rb"|hf_[A-Za-z0-9]{30}|k_live_|eyJ[A-Za-z0-9_-]{17}|npm_[A-Za-z0-9]{36}|pypi-AgE"
)
_CONTEXTS = (
    (b"PRIVATE KEY-----", re.compile(rb"PRIVATE KEY")),
    (b"://", re.compile(rb"://[^\s/:@\"'<>\\]{0,80}:[^\s/@\"'<>\\$\{\[]{3,128}@")),
    (b"earer", re.compile(rb"earer[ +][A-Za-z0-9._~+/=-]{20}")),
    (b"ecret", re.compile(rb"(?i:ecret_?(?:access_?)?key)\W{1,12}[A-Za-z0-9/+]{40}")),
    (b"SECRET", re.compile(rb"(?i:secret_?(?:access_?)?key)\W{1,12}[A-Za-z0-9/+]{40}")),
)


def may_hold_secret(encoded: bytes) -> bool:
    """False where no pattern can match, at a small part of the patterns' cost. `encoded` is the JSON of the messages."""
    runs = encoded.translate(_RUN_TABLE)
    start = runs.find(_RUN)
    while start >= 0:
        end = runs.find(b" ", start)
        end = len(runs) if end < 0 else end
        if _TOKEN.search(encoded, start, min(end, start + _MAX_TOKEN_START)):
            return True
        start = runs.find(_RUN, end)
    return any(_has_context(encoded, word, pattern) for word, pattern in _CONTEXTS)


def _has_context(encoded: bytes, word: bytes, pattern: re.Pattern[bytes]) -> bool:
    start = encoded.find(word)
    while start >= 0:
        if pattern.match(encoded, start):
            return True
        start = encoded.find(word, start + len(word))
    return False


def redact_messages(messages: tuple[Message, ...]) -> tuple[tuple[Message, ...], Counter[str]]:
    """The messages with every secret replaced, and how many of each kind were found. Arguments that are JSON stay JSON."""
    found: Counter[str] = Counter()
    redacted = tuple(
        dataclasses.replace(
            message,
            content=redact_text(message.content, found),
            reasoning=None if message.reasoning is None else redact_text(message.reasoning, found),
            tool_calls=tuple(dataclasses.replace(call, arguments=_redact_arguments(call, found)) for call in message.tool_calls),
        )
        for message in messages
    )
    return (redacted, found) if found else (messages, found)


def redact_text(text: str, found: Counter[str]) -> str:
    """`text` with every secret replaced; `found` is counted up by kind."""
    for kind, pattern in _PATTERNS.items():
        group = _SECRET_GROUPS.get(kind, 0)

        def replace(match: re.Match[str], kind: str = kind, group: str | int = group) -> str:
            found[kind] += 1
            start, end = match.start(group) - match.start(), match.end(group) - match.start()
            whole = match.group()
            return f"{whole[:start]}[REDACTED:{kind}]{whole[end:]}"

        text = pattern.sub(replace, text)
    return text


def _redact_arguments(call: ToolCall, found: Counter[str]) -> str:
    """Redacts the strings inside, one by one, where the arguments are JSON: in the raw text a match could span an escape or a closing quote."""
    try:
        value = json.loads(call.arguments)
    except (ValueError, RecursionError):
        return redact_text(call.arguments, found)
    before = found.total()
    redacted = _redact_value(value, found)
    return call.arguments if found.total() == before else json_text(redacted)


def _redact_value(value: Any, found: Counter[str]) -> Any:
    if isinstance(value, str):
        return redact_text(value, found)
    if isinstance(value, dict):
        return {redact_text(key, found): _redact_value(item, found) for key, item in cast("dict[str, Any]", value).items()}
    if isinstance(value, list):
        return [_redact_value(item, found) for item in cast("list[Any]", value)]
    return value
