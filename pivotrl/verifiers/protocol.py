"""What a verifier is: r_func of Eq. 6 as a pure function with three-state verdicts, or an abstention inside a cascade."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from pivotrl.types import Action, State, Verdict


class Verifier(Protocol):
    """Judges one action against the expert's in a state.

    Pure (a judge excepted): same arguments, same verdict; raises nothing for any model output, however hostile. A malformed
    action is `Verdict.invalid`; a failure that is not the model's is `Verdict.infra`, never reward 0. A verifier that
    cannot judge an action (not its kind of turn, judges that disagree) returns `Verdict.abstain`; `compose.py` asks the next one.
    Stateless, so one instance serves profiling, training and evaluation.
    """

    def verify(self, state: State, expert: Action, action: Action) -> Verdict:
        """The verdict on `action`, with a short countable reason. Accepts the expert's own action in every state, or the row is quarantined."""
        ...


@dataclass(frozen=True, slots=True)
class Case:
    """One action to be judged: the arguments of `Verifier.verify`."""

    state: State
    expert: Action
    action: Action


@runtime_checkable
class BatchVerifier(Verifier, Protocol):
    """A verifier that waits (for an endpoint, for a subprocess), and so judges many actions at once. Pure verifiers need not be one."""

    def verify_many(self, cases: Sequence[Case]) -> list[Verdict]:
        """One verdict per case, in order: the ones that `verify` gives, one failure never touching another's verdict."""
        ...


@runtime_checkable
class MeteredVerifier(Verifier, Protocol):
    """A verifier whose judgements cost something that a run should state."""

    def take_cost(self) -> Mapping[str, float]:
        """What was spent since the last call, under registered metric names (`pivotrl/metrics.py`)."""
        ...


@runtime_checkable
class DisturbedVerifier(Verifier, Protocol):
    """A verifier whose judgements are made wrong on purpose."""

    @property
    def undisturbed(self) -> Verifier:
        """The one that judges rightly: experts' own actions are checked by it."""
        ...


def undisturbed(verifier: Verifier) -> Verifier:
    """The verifier to check experts' own actions by: itself, where nothing disturbs it."""
    return verifier.undisturbed if isinstance(verifier, DisturbedVerifier) else verifier


def verify_all(verifier: Verifier, cases: Sequence[Case]) -> list[Verdict]:
    """The verdicts on all cases, in order: at once where the verifier can, else one after the other."""
    if isinstance(verifier, BatchVerifier):
        return verifier.verify_many(cases)
    return [verifier.verify(case.state, case.expert, case.action) for case in cases]


def take_cost(verifier: Verifier) -> Mapping[str, float]:
    """`MeteredVerifier.take_cost`; nothing where judging is free."""
    return verifier.take_cost() if isinstance(verifier, MeteredVerifier) else {}
