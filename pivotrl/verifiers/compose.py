"""A cascade of verifiers, cheapest first: the first decision wins, an abstention goes on to the next.

Every verifier that a recipe names runs inside a cascade (of one stage where the recipe names no other), so that `VerdictKind.ABSTAIN` never
reaches a statistic. Malformed actions (invalid) and failures of the infrastructure (infra) decide whatever the stage says: asking another
verifier would not make the one well-formed, nor replace the judgement that the other would have been.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from pivotrl.types import Action, State, Verdict, VerdictKind
from pivotrl.verifiers.protocol import Case, Verifier, take_cost, verify_all

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
        return self.verify_many([Case(state, expert, action)])[0]

    def verify_many(self, cases: Sequence[Case]) -> list[Verdict]:
        """Stage by stage over all cases that are still open, so that a stage which waits overlaps its waiting."""
        verdicts: dict[int, Verdict] = {}
        passed: list[list[str]] = [[] for _ in cases]
        for stage in self._stages:
            still_open = [index for index in range(len(cases)) if index not in verdicts]
            if not still_open:
                break
            for index, verdict in zip(still_open, verify_all(stage.verifier, [cases[index] for index in still_open]), strict=True):
                if stage.is_decision(verdict):
                    verdicts[index] = verdict
                else:
                    passed[index].append(verdict.reason)
        return [verdicts.get(index) or self._undecided_verdict(reasons) for index, reasons in enumerate(passed)]

    def take_cost(self) -> Mapping[str, float]:
        """The sum over the stages."""
        total: Counter[str] = Counter()
        for stage in self._stages:
            total.update(take_cost(stage.verifier))
        return dict(total)

    def _undecided_verdict(self, reasons: Sequence[str]) -> Verdict:
        return Verdict.infra(UNDECIDED, stages=reasons) if self._undecided == "infra" else Verdict.ok(0.0, UNDECIDED, stages=reasons)
