"""What a judge is shown and what its answer may be: versioned prompt files, data kept apart from instructions, a strict grammar.

A prompt is symmetric: it shows two actions as A and B and says of neither that it is the expert's. Whatever models, users and tools wrote
is one line of JSON between lines that carry a boundary nobody can foresee (a hash of that very data), so that it can neither end its block
nor pass for a line of the prompt. Pure; no request is made here.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined, Template

from pivotrl.identity import bytes_id, content_id
from pivotrl.types import Action, Message, State, Tool, ToolCall

_PROMPTS = Path(__file__).parent / "prompts"
_BOUNDARY_DIGITS = 12
# Of the context: the first message (instructions, policies) and, of all that are left, how much one message may take.
_FIRST_MESSAGE_SHARE = 4
_TOOL_CHARS = 4_000
_CUT = " [...] "


class Opinion(Enum):
    """One answer about an expert's and a candidate's action."""

    ACCEPT = "accept"
    REJECT = "reject"
    NOT_APPLICABLE = "not applicable"
    """The rubric says nothing here: the expert's own message meets no criterion."""


@dataclass(frozen=True, slots=True)
class Question:
    """One request for one opinion."""

    system: str
    user: str
    expert_is_first: bool


class JudgePrompt:
    """One version of one prompt.

    Args:
        name: stem of a file in prompts/, for example ``equivalence.v1``.
        criteria: of a rubric.
    """

    def __init__(self, name: str, criteria: Sequence[str], *, max_context_chars: int) -> None:
        self.name, self._criteria, self._max_context_chars = name, tuple(criteria), max_context_chars
        self._template, source = _load(name)
        self.hash = bytes_id(source)
        """Of the file's bytes: another wording is another judge."""

    def questions(self, state: State, expert: str, action: str) -> tuple[Question, Question]:
        """Both orders of one pair of action lines, the same two whichever of them is the expert's."""
        conversation = _conversation(state.messages, self._max_context_chars)
        tools = _tools(state.tools, f"{expert}\n{action}")
        return self._question(conversation, tools, min(expert, action), max(expert, action), expert), self._question(
            conversation, tools, max(expert, action), min(expert, action), expert
        )

    def _question(self, conversation: str, tools: str, first: str, second: str, expert: str) -> Question:
        data = {"conversation": conversation, "tools": tools, "first": first, "second": second}
        context = self._template.new_context({**data, "boundary": content_id(data)[:_BOUNDARY_DIGITS], "criteria": self._criteria})
        system, user = ("".join(self._template.blocks[block](context)).strip() for block in ("system", "user"))
        return Question(system, user, expert_is_first=first == expert)

    def parse(self, answer: str, question: Question) -> Opinion | None:
        """The opinion of an answer; None for one outside the grammar, which is never guessed at."""
        lines = [line.strip() for line in answer.rpartition("</think>")[2].splitlines() if line.strip()]
        return self._parse_rubric(lines, question) if self._criteria else _parse_equivalence(lines)

    def _parse_rubric(self, lines: Sequence[str], question: Question) -> Opinion | None:
        found = [re.fullmatch(r"(\d+): A=(YES|NO) B=(YES|NO)", line) for line in lines[-len(self._criteria) :]]
        if [match and match[1] for match in found] != [str(number + 1) for number in range(len(self._criteria))]:
            return None
        expert, action = (2, 3) if question.expert_is_first else (3, 2)
        required = [match for match in found if match and match[expert] == "YES"]
        if not required:
            return Opinion.NOT_APPLICABLE
        return Opinion.ACCEPT if all(match[action] == "YES" for match in required) else Opinion.REJECT


def _parse_equivalence(lines: Sequence[str]) -> Opinion | None:
    if not lines or sum(line.startswith("VERDICT") for line in lines) != 1:
        return None
    return {"VERDICT: SAME": Opinion.ACCEPT, "VERDICT: DIFFERENT": Opinion.REJECT}.get(lines[-1])


def action_line(action: Action) -> str:
    """An action as one line of JSON: what it says and what it calls. Its reasoning is no part of its effect."""
    return _line({"text": action.content, "calls": _calls(action.tool_calls)})


def _conversation(messages: Sequence[Message], max_chars: int) -> str:
    """The first message and as many of the last as fit, cut where they are too long; what is left out is said."""
    if not messages:
        return "(nothing was said before)"
    first = _message_line(messages[0], max_chars // _FIRST_MESSAGE_SHARE)
    left, shown = max_chars - len(first), list[str]()
    for message in reversed(messages[1:]):
        line = _message_line(message, max(left, 0))
        if len(line) > left:
            break
        shown.append(line)
        left -= len(line)
    omitted = len(messages) - 1 - len(shown)
    return "\n".join([first, *([f"({omitted} messages are left out)"] if omitted else []), *reversed(shown)])


def _message_line(message: Message, max_chars: int) -> str:
    """One message as one line; its text is cut in the middle so that the line has about `max_chars` characters, its calls are not."""
    whole = {"role": message.role.value, "text": message.content, "calls": _calls(message.tool_calls)}
    surplus = len(_line(whole)) - max_chars
    if surplus <= 0:
        return _line(whole)
    kept = max(len(message.content) - surplus - len(_CUT), 0)
    head, tail = message.content[: kept - kept // 2], message.content[len(message.content) - kept // 2 :]
    return _line({**whole, "text": head + _CUT + tail})


def _tools(tools: Sequence[Tool], actions: str) -> str:
    """The tools that either action names, in the state's order."""
    lines = [
        _line({"name": tool.name, "description": tool.description, "parameters": dict(tool.parameters)})[:_TOOL_CHARS]
        for tool in tools
        if json.dumps(tool.name, ensure_ascii=False) in actions
    ]
    return "\n".join(lines) or "(none described)"


def _calls(calls: Sequence[ToolCall]) -> list[dict[str, str]]:
    return [{"name": call.name, "arguments": call.arguments} for call in calls]


def _line(value: object) -> str:
    """JSON without a line break; lone surrogates, which no request can carry, become escapes."""
    return json.dumps(value, ensure_ascii=False).encode("utf-8", "backslashreplace").decode()


@lru_cache(maxsize=8)
def _load(name: str) -> tuple[Template, bytes]:
    environment = Environment(loader=FileSystemLoader(_PROMPTS), undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    return environment.get_template(f"{name}.jinja"), (_PROMPTS / f"{name}.jinja").read_bytes()
