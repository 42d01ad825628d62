"""The cascade: the first decision wins, abstentions and undecided reasons go on, and an abstention never comes out."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import TypeAdapter

from pivotrl.build_verifiers import build_verifier
from pivotrl.config.verifiers import VerifierConfig
from pivotrl.types import Action, ParseOutcome, State, ToolCall, ToolOrigin, Verdict, VerdictKind
from pivotrl.verifiers.compose import ComposeVerifier, Stage

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
