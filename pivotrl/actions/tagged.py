"""What Hermes and Qwen3-Coder share: calls between tags inside running text.

The text around the calls is the action's content; pieces after the first call are joined to it by a newline.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pivotrl.actions.json_span import MAX_FAILED_READS
from pivotrl.actions.protocol import malformed
from pivotrl.actions.thinking import CLOSE, OPEN
from pivotrl.types import Action, ParseOutcome, ToolCall


@dataclass(frozen=True, slots=True)
class ReadCalls:
    """What was read at one opening tag."""

    calls: tuple[ToolCall, ...]
    end: int
    """Where the text goes on."""
    is_well_formed: bool


type CallReader = Callable[[str, re.Match[str]], ReadCalls]


def parse_tagged(text: str, *, opening: re.Pattern[str], read: CallReader, separator: str) -> Action:
    """Reads every call outside thinking.

    Args:
        opening: matches where a call begins; must have no group for thinking tags.
        read: reads the call at such a match; its end is beyond the match's start.
        separator: newlines a writer puts between content and first call; that many at most are taken off.
    """
    calls: list[ToolCall] = []
    pieces: list[str] = []
    piece_start = place = num_failed = 0
    match, may_think = opening.search(text), True
    while match and num_failed < MAX_FAILED_READS:
        thinking = text.find(OPEN, place, match.start()) if may_think else -1
        if thinking != -1:
            close = text.find(CLOSE, thinking)
            may_think = close != -1
            place = close + len(CLOSE) if may_think else place
            # The match is kept while it is ahead: searching again from every closed thought would be quadratic.
            match = match if match.start() >= place else opening.search(text, place)
            continue
        pieces.append(text[piece_start : match.start()])
        found = read(text, match)
        calls.extend(found.calls)
        num_failed += not found.is_well_formed
        piece_start = place = found.end
        match = opening.search(text, place)
    if num_failed:
        return malformed(text, calls)
    if not calls:
        return Action(text, (), None, ParseOutcome.ABSENT)
    pieces.append(text[piece_start:])
    return Action(_content(pieces, separator), tuple(calls), None, ParseOutcome.PARSED)


def write_tagged(content: str, calls: Sequence[str], separator: str) -> str:
    """Content and written calls in one text; the inverse of `parse_tagged` where content holds no opening tag."""
    body = "\n".join(calls)
    return f"{content}{separator}{body}" if content and body else content + body


def _content(pieces: Sequence[str], separator: str) -> str:
    first = pieces[0]
    for length in range(len(separator), 0, -1):
        if first.endswith(separator[:length]):
            first = first[:-length]
            break
    kept = [piece for piece in (first, *(piece.strip() for piece in pieces[1:])) if piece]
    return "\n".join(kept)
