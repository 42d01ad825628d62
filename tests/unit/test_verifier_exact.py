"""Eq. 2: nothing but the expert's own writing is rewarded."""

from __future__ import annotations

import dataclasses

import pytest

from pivotrl.types import Action, ParseOutcome, State, ToolCall, ToolOrigin, VerdictKind
from pivotrl.verifiers.exact import ExactVerifier

STATE = State((), (), ToolOrigin.NONE)
EXPERT = Action("Looking.", (ToolCall("f", '{"a": 1}', "call_1"), ToolCall("g", "{}")), "Why not.", ParseOutcome.PARSED)


@pytest.mark.parametrize(
    ("change", "reward"),
    [
        ({}, 1),
        ({"reasoning": None}, 1),
        ({"tool_calls": (ToolCall("f", '{"a": 1}'), ToolCall("g", "{}", "x"))}, 1),
        ({"tool_calls": (ToolCall("f", '{"a":1}'), ToolCall("g", "{}"))}, 0),
        ({"tool_calls": (ToolCall("f", '{"a": 1.0}'), ToolCall("g", "{}"))}, 0),
        ({"tool_calls": EXPERT.tool_calls[::-1]}, 0),
        ({"tool_calls": EXPERT.tool_calls[:1]}, 0),
        ({"content": "Looking. "}, 0),
    ],
)
def test_equal_as_written(change: dict[str, object], reward: float) -> None:
    verdict = ExactVerifier().verify(STATE, EXPERT, dataclasses.replace(EXPERT, **change))
    assert (verdict.kind, verdict.reward) == (VerdictKind.OK, reward)


def test_malformed_and_blank_actions_are_invalid_even_where_the_expert_is_the_same() -> None:
    for action in (Action("<tool_call>", (), None, ParseOutcome.MALFORMED), Action(" ", (), None, ParseOutcome.ABSENT)):
        assert ExactVerifier().verify(STATE, action, action).kind is VerdictKind.INVALID
