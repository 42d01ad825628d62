"""Verifier noise: the stated share of judgements turned round, the same ones every time, and nothing else touched."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import TypeAdapter

from pivotrl.build_verifiers import build_verifier
from pivotrl.config.verifiers import FlippedVerifierConfig, VerifierConfig
from pivotrl.types import Action, Message, ParseOutcome, Role, State, ToolOrigin, Verdict
from pivotrl.verifiers.flipped import FlippedVerifier
from pivotrl.verifiers.protocol import Case, undisturbed

EXPERT = Action("yes", (), None, ParseOutcome.ABSENT)


class Fixed:
    """Says the same of every action."""

    def __init__(self, verdict: Verdict) -> None:
        self.verdict = verdict

    def verify(self, state: State, expert: Action, action: Action) -> Verdict:
        del state, expert, action
        return self.verdict


def noisy(probability: float, verdict: Verdict, seed: int = 1) -> FlippedVerifier:
    config = {"type": "flipped", "probability": probability, "verifier": {"type": "exact"}, "seed": seed}
    return FlippedVerifier(FlippedVerifierConfig.model_validate(config), Fixed(verdict))


def case(number: int, text: str = "no") -> Case:
    state = State((Message(Role.USER, f"question {number}"),), (), ToolOrigin.NONE)
    return Case(state, EXPERT, Action(text, (), None, ParseOutcome.ABSENT))


@pytest.mark.parametrize("probability", [0.05, 0.2])
@pytest.mark.parametrize("reward", [0.0, 1.0])
def test_the_stated_share_is_flipped(probability: float, reward: float) -> None:
    """Within four standard deviations of a binomial of 4,000."""
    verdicts = noisy(probability, Verdict.ok(reward, "reason")).verify_many([case(number) for number in range(4000)])
    share = sum(verdict.reward != reward for verdict in verdicts) / 4000
    assert abs(share - probability) < 4 * (probability * (1 - probability) / 4000) ** 0.5
    assert {verdict.reason for verdict in verdicts if verdict.reward != reward} == {"flipped: reason"}
    assert {verdict.reason for verdict in verdicts if verdict.reward == reward} == {"reason"}


def test_an_error_belongs_to_state_and_action_and_seed() -> None:
    cases = [case(number, text) for number in range(60) for text in ("no", "perhaps")]
    verifier = noisy(0.5, Verdict.ok(1.0, "reason"))
    verdicts = verifier.verify_many(cases)
    assert [verifier.verify(one.state, one.expert, one.action) for one in reversed(cases)] == verdicts[::-1]
    assert noisy(0.5, Verdict.ok(1.0, "reason"), seed=2).verify_many(cases) != verdicts
    assert verdicts[::2] != verdicts[1::2], "another action in the same state"


def test_a_share_is_graded_the_other_way_and_what_is_no_judgement_stays() -> None:
    assert noisy(1.0, Verdict.ok(0.25, "part")).verify_many([case(0)])[0].reward == 0.75
    for verdict in (Verdict.invalid("broken"), Verdict.infra("down")):
        assert noisy(1.0, verdict).verify_many([case(0)]) == [verdict]
    assert noisy(0.0, Verdict.ok(1.0, "reason")).verify_many([case(0)])[0].reward == 1.0


def test_experts_are_checked_without_the_noise() -> None:
    """Else noise would quarantine its own share of rows, and the profile would hold none of the errors on experts' actions."""
    config = TypeAdapter[VerifierConfig](VerifierConfig).validate_python(
        {"type": "flipped", "probability": 1.0, "verifier": {"type": "exact"}, "seed": 1}
    )
    verifier = build_verifier(config, expand=Path)
    one = case(0, "yes")
    assert verifier.verify(one.state, one.expert, one.action).reward == 0.0
    assert undisturbed(verifier).verify(one.state, one.expert, one.action).reward == 1.0


def test_text_that_is_no_unicode_is_judged_too() -> None:
    verdicts = [noisy(0.5, Verdict.ok(1.0, "reason")).verify_many([case(number, f"\ud800{number}")])[0].reward for number in range(40)]
    assert set(verdicts) == {0.0, 1.0}
