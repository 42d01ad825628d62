"""Shell commands that an agent wrote into its text, in a fenced block, and what their results look like.

SWE-agent and mini-SWE-agent without function calling run the contents of a fence. Such a turn becomes a call of `BASH` with one argument, `command`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from pivotrl.actions.protocol import json_text
from pivotrl.types import ToolCall

BASH = "bash"

_FENCE = re.compile(r"^```([^\n`]*)\n(.*?)^```[ \t]*$", re.DOTALL | re.MULTILINE)
_EXIT_CODE_MARKS = ("<returncode>", "exit code ")


def bash_call(command: str) -> ToolCall:
    """A call that runs a command; the newline before the closing fence is not part of the command."""
    return ToolCall(BASH, json_text({"command": command.rstrip("\n")}))


@dataclass(frozen=True, slots=True)
class FencedBlock:
    """One fenced block of a text."""

    before: str
    """The text in front of it, without trailing space."""
    language: str
    """What follows the opening fence on its line."""
    body: str


def fenced_blocks(text: str) -> tuple[FencedBlock, ...]:
    """The fenced blocks of a text, in order."""
    return tuple(FencedBlock(text[: match.start()].rstrip(), match.group(1).strip(), match.group(2)) for match in _FENCE.finditer(text))


def exit_code(observation: str) -> int | None:
    """The exit code that a harness wrote into an observation: ``<returncode>1</returncode>`` or ``exit code 1``; None where it wrote none.

    >>> exit_code("[Command finished with exit code 2]")
    2
    """
    for mark in _EXIT_CODE_MARKS:
        place = observation.rfind(mark)
        if place != -1:
            digits = re.match(r"-?\d+", observation[place + len(mark) : place + len(mark) + 12])
            if digits is not None:
                return int(digits.group())
    return None
