"""Labelled pairs: judgements of people, with which a verifier's precision and recall are measured.

Reads the JSONL form that tests/labelled/README.md describes: one pair per line, the states in `states.json` beside the file.
Used by `pivotrl audit` and by the tests that hold the verifiers to their bars.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from pivotrl.actions.protocol import json_text
from pivotrl.actions.registry import ACTION_FORMAT_NAMES, action_format
from pivotrl.errors import UserError
from pivotrl.types import Action, ParseOutcome, State, Tool, ToolCall, ToolOrigin

STATES_FILE = "states.json"
_RULE = "a labelled line is an object with id, domain, state, expert, action, equivalent and reason"


@dataclass(frozen=True, slots=True)
class LabelledPair:
    """Whether an action does in a state what the expert's does, as a person judged it."""

    id: str
    domain: str
    """``conversational``, ``swe``, ``terminal``, ``search`` or ``message``: which verifier is meant to judge it."""
    state: State
    expert: Action
    action: Action
    is_equivalent: bool
    reason: str
    """What differs between the two."""
    needs_judge: bool
    """Only understanding decides; such pairs are counted apart."""


def is_labelled_file(path: Path) -> bool:
    """Whether a file looks like labelled pairs: its first line is an object with an `equivalent` label."""
    if path.suffix != ".jsonl" or not path.is_file():
        return False
    with path.open("rb") as lines:
        try:
            first = orjson.loads(lines.readline())
        except orjson.JSONDecodeError:
            return False
    return isinstance(first, dict) and "equivalent" in first and "expert" in first


def read_pairs(path: Path) -> list[LabelledPair]:
    """The pairs of a file, in order.

    Raises:
        UserError: for a line that is not a pair, naming file and line; for an unknown state; for a missing states file; for an id used twice.
    """
    states = _read_states(path.with_name(STATES_FILE))
    pairs: list[LabelledPair] = []
    seen: set[str] = set()
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                pair = _pair(orjson.loads(line), states)
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                raise UserError(f"{path}:{number}: {type(error).__name__}: {error}", rule=_RULE, fix="correct or remove the line") from error
            if pair.id in seen:
                raise UserError(f"{path}:{number}: id {pair.id} was used before", rule="ids are unique in a file", fix="rename one of the two")
            seen.add(pair.id)
            pairs.append(pair)
    if not pairs:
        raise UserError(f"{path} holds no pair", rule=_RULE, fix="name a file of labelled pairs")
    return pairs


def _read_states(path: Path) -> Mapping[str, State]:
    try:
        states = orjson.loads(path.read_bytes())
        return {name: State((), tuple(Tool(**tool) for tool in state["tools"]), ToolOrigin(state["tool_origin"])) for name, state in states.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(
            f"{path} cannot be read: {type(error).__name__}: {error}",
            rule="labelled pairs name states of that file, each with `tools` and `tool_origin`",
            fix=f"put {STATES_FILE} beside the pairs",
        ) from error


def _pair(row: Mapping[str, Any], states: Mapping[str, State]) -> LabelledPair:
    if not isinstance(row["equivalent"], bool):
        raise TypeError("equivalent is not true or false")
    state = states[row["state"]]
    return LabelledPair(
        id=str(row["id"]),
        domain=str(row["domain"]),
        state=state,
        expert=_action(row["expert"], state),
        action=_action(row["action"], state),
        is_equivalent=row["equivalent"],
        reason=str(row["reason"]),
        needs_judge=row.get("needs_judge") is True,
    )


def _action(value: Any, state: State) -> Action:
    if isinstance(value, str):
        return Action(value, (), None, ParseOutcome.ABSENT)
    if isinstance(value, dict):
        if value["format"] not in ACTION_FORMAT_NAMES:
            raise ValueError(f"format {value['format']!r} is none of {', '.join(ACTION_FORMAT_NAMES)}")
        return action_format(value["format"]).parse(value["text"], state.tools)
    calls = tuple(ToolCall(call["name"], _arguments(call["arguments"])) for call in value)
    return Action("", calls, None, ParseOutcome.PARSED if calls else ParseOutcome.ABSENT)


def _arguments(value: Any) -> str:
    return value if isinstance(value, str) else json_text(value)
