"""Thinking in front of an action: ``<think>\\n...\\n</think>\\n\\n``, the same in every format.

Some chat templates open the tag in the generation prompt, so a completion may hold only the closing one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from pivotrl.actions.protocol import malformed
from pivotrl.types import Action, ParseOutcome

OPEN = "<think>"
CLOSE = "</think>"


def write_thinking(reasoning: str | None, body: str) -> str:
    """`body` with the reasoning in front; no block where there is none."""
    return f"{OPEN}\n{reasoning}\n{CLOSE}\n\n{body}" if reasoning else body


def parse_after_thinking(text: str, parse_body: Callable[[str], Action]) -> Action:
    """Splits thinking off and reads the rest with `parse_body`.

    Thinking that is opened and never closed is malformed: nothing was said or done. A lone closing tag ends thinking, unless
    the text read as it stands is well-formed calls with that tag inside an argument.
    """
    stripped = text.lstrip()
    if stripped.startswith(OPEN):
        start = len(text) - len(stripped) + len(OPEN)
        close = text.find(CLOSE, start)
        if close == -1:
            return malformed(text)
        return _with_reasoning(text, text[start:close], parse_body(_after_close(text, close)))
    close = text.find(CLOSE)
    if close == -1:
        return parse_body(text)
    whole = parse_body(text)
    if whole.parse is ParseOutcome.PARSED and CLOSE not in whole.content:
        return whole
    return _with_reasoning(text, text[:close], parse_body(_after_close(text, close)))


def _after_close(text: str, close: int) -> str:
    rest = text[close + len(CLOSE) :]
    return rest.removeprefix("\n\n") if rest.startswith("\n\n") else rest.removeprefix("\n")


def _with_reasoning(text: str, reasoning: str, action: Action) -> Action:
    if action.parse is ParseOutcome.MALFORMED:
        return malformed(text, action.tool_calls)
    return dataclasses.replace(action, reasoning=reasoning.removeprefix("\n").removesuffix("\n") or None)
