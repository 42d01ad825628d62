"""What a verifier is: r_func of Eq. 6 as a pure function with three-state verdicts, or an abstention inside a cascade."""

from __future__ import annotations

from typing import Protocol

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
