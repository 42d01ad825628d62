"""The cascade: the first decision wins, abstentions and undecided reasons go on, and an abstention never comes out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
from pydantic import TypeAdapter

from pivotrl.build_verifiers import build_verifier
from pivotrl.config.verifiers import VerifierConfig
from pivotrl.types import Action, ParseOutcome, State, ToolCall, ToolOrigin, Verdict, VerdictKind
from pivotrl.verifiers.compose import ComposeVerifier, Stage
from pivotrl.verifiers.exact import ExactVerifier
from pivotrl.verifiers.protocol import Case, take_cost, verify_all

STATE = State((), (), ToolOrigin.NONE)


class Fixed:
    """Says the same of every action and counts how often it was asked."""

    def __init__(self, verdict: Verdict) -> None:
        self.verdict, self.num_asked = verdict, 0

    def verify(self, state: State, expert: Action, action: Action) -> Verdict:
        self.num_asked += 1
        return self.verdict


def _says(text: str) -> Action:
    return Action(text, (), None, ParseOutcome.ABSENT)


def _calls(arguments: str) -> Action:
    return Action("", (ToolCall("f", arguments),), None, ParseOutcome.PARSED)


ACCEPTED, REJECTED, PARTIAL = Verdict.ok(1.0, "yes"), Verdict.ok(0.0, "no"), Verdict.ok(0.5, "half")
INVALID, INFRA, ABSTAINED = Verdict.invalid("broken"), Verdict.infra("down"), Verdict.abstain("not mine")


@pytest.mark.parametrize(
    ("decides", "standing"),
    [("accept", {"yes", "broken", "down"}), ("reject", {"no", "broken", "down"}), ("both", {"yes", "no", "half", "broken", "down"})],
)
@pytest.mark.parametrize("verdict", [ACCEPTED, REJECTED, PARTIAL, INVALID, INFRA, ABSTAINED], ids=lambda verdict: verdict.reason)
def test_what_stands_and_what_goes_on(decides: str, standing: set[str], verdict: Verdict) -> None:
    last = Fixed(Verdict.ok(1.0, "last word"))
    cascade = ComposeVerifier([Stage(Fixed(verdict), decides), Stage(last, "both")], "zero")  # pyright: ignore[reportArgumentType]
    is_final = verdict.reason in standing
    assert cascade.verify(STATE, _says("a"), _says("b")) is (verdict if is_final else last.verdict)
    assert last.num_asked == (0 if is_final else 1)


class Waiting(Fixed):
    """A verifier that judges many actions at once and states what that cost."""

    def verify_many(self, cases: Sequence[Case]) -> list[Verdict]:
        self.num_asked += 1
        return [Verdict.ok(float(len(case.action.content)), "length") for case in cases]

    def take_cost(self) -> Mapping[str, float]:
        return {"x": 2.0}


def test_a_stage_that_waits_gets_all_open_cases_at_once_and_its_cost_comes_out() -> None:
    first, last = Stage(ExactVerifier(), "accept"), Waiting(ACCEPTED)
    cascade = ComposeVerifier([first, Stage(last, "both"), Stage(Waiting(ACCEPTED), "both")], "zero")
    verdicts = verify_all(cascade, [Case(STATE, _says("a"), _says(text)) for text in ("a", "bb", "a", "ccc")])
    assert [verdict.reason for verdict in verdicts] == ["identical", "length", "identical", "length"]
    assert [verdict.reward for verdict in verdicts] == [1, 2, 1, 3]
    assert last.num_asked == 1
    assert take_cost(cascade) == {"x": 4.0}


def test_an_undecided_reason_goes_on_though_the_reward_would_stand() -> None:
    cascade = ComposeVerifier([Stage(Fixed(REJECTED), "both", frozenset({"no"})), Stage(Fixed(ACCEPTED), "both")], "zero")
    assert cascade.verify(STATE, _says("a"), _says("b")) is ACCEPTED


def test_an_undecided_action_is_reward_zero_or_infra_as_the_recipe_says() -> None:
    stages = [Stage(Fixed(REJECTED), "accept"), Stage(Fixed(ABSTAINED), "both")]
    zero = ComposeVerifier(stages, "zero").verify(STATE, _says("a"), _says("b"))
    assert (zero.kind, zero.reward, zero.reason, zero.detail) == (VerdictKind.OK, 0.0, "undecided", {"stages": ["no", "not mine"]})
    assert ComposeVerifier(stages, "infra").verify(STATE, _says("a"), _says("b")).kind is VerdictKind.INFRA


def test_a_recipe_cascade_decides_where_its_stages_say() -> None:
    """exact decides identity, tool_call decides everything but a message that reads differently; that one is left undecided."""
    section = {
        "type": "compose",
        "undecided": "infra",
        "stages": [
            {"verifier": {"type": "exact"}, "decides": "accept"},
            {"verifier": {"type": "tool_call", "message": "similarity"}, "decides": "both", "undecided_reasons": ["different message"]},
        ],
    }
    verifier = build_verifier(TypeAdapter[VerifierConfig](VerifierConfig).validate_python(section), expand=Path)
    assert verifier.verify(STATE, _calls("{"), _calls("{")).reason == "identical"
    assert verifier.verify(STATE, _calls('{"a": 1}'), _calls('{"a": 1.0}')).reason == "same calls"
    assert verifier.verify(STATE, _calls('{"a": 1}'), _calls('{"a": 2}')).reason == "wrong argument value"
    assert verifier.verify(STATE, _says("It is done."), _says("I could not do it.")).kind is VerdictKind.INFRA
