"""A cascade of verifiers, cheapest first: the first decision wins, an abstention goes on to the next.

Every verifier that a recipe names runs inside a cascade (of one stage where the recipe names no other), so that `VerdictKind.ABSTAIN` never
reaches a statistic. Malformed actions (invalid) and failures of the infrastructure (infra) decide whatever the stage says: asking another
verifier would not make the one well-formed, nor replace the judgement that the other would have been.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from pivotrl.types import Action, State, Verdict, VerdictKind
from pivotrl.verifiers.protocol import Verifier

UNDECIDED = "undecided"
"""Reason of a verdict on an action that no stage decided."""


@dataclass(frozen=True, slots=True)
class Stage:
    """One verifier and which of its judgements stand."""

    verifier: Verifier
    decides: Literal["accept", "reject", "both"]
    undecided_reasons: frozenset[str] = frozenset()
    """Reasons on which the stage goes on although `decides` covers the reward."""

    def is_decision(self, verdict: Verdict) -> bool:
        if verdict.kind is not VerdictKind.OK:
            return verdict.kind is not VerdictKind.ABSTAIN
        if verdict.reason in self.undecided_reasons:
            return False
        return self.decides == "both" or verdict.reward == (1.0 if self.decides == "accept" else 0.0)


class ComposeVerifier:
    """Reason ``undecided`` where no stage decides: reward 0 or infra, as the recipe says; the detail holds the reason of every stage."""

    def __init__(self, stages: Sequence[Stage], undecided: Literal["zero", "infra"]) -> None:
        self._stages, self._undecided = tuple(stages), undecided

    def verify(self, state: State, expert: Action, action: Action) -> Verdict:
        passed: list[str] = []
        for stage in self._stages:
            verdict = stage.verifier.verify(state, expert, action)
            if stage.is_decision(verdict):
                return verdict
            passed.append(verdict.reason)
        return Verdict.infra(UNDECIDED, stages=passed) if self._undecided == "infra" else Verdict.ok(0.0, UNDECIDED, stages=passed)
