"""A verifier with errors put in on purpose: what another one accepts is refused, and the other way round, with a stated probability.

For measuring what verifier noise costs. The errors belong to the pair of state and action, as those of a real verifier do: the same action in
the same state is judged the same way every time, in profiling and in training. Nothing is drawn, so the verifier is pure.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict

from pivotrl.config.verifiers import FlippedVerifierConfig
from pivotrl.identity import content_id, derive_seed
from pivotrl.types import Action, State, Verdict, VerdictKind
from pivotrl.verifiers.protocol import Case, Verifier, take_cost, verify_all

# derive_seed is uniform in [0, 2**62).
_SEED_RANGE = 1 << 62


class FlippedVerifier:
    """Reason ``flipped: <reason>`` and reward 1 - r in place of r; only judgements are flipped, never `invalid` or `infra`.

    Experts' own actions are checked by `undisturbed`: a row is not quarantined for noise.
    """

    def __init__(self, config: FlippedVerifierConfig, judge: Verifier) -> None:
        self._config, self._judge = config, judge

    @property
    def undisturbed(self) -> Verifier:
        """The verifier whose verdicts are flipped."""
        return self._judge

    def verify(self, state: State, expert: Action, action: Action) -> Verdict:
        return self.verify_many([Case(state, expert, action)])[0]

    def verify_many(self, cases: Sequence[Case]) -> list[Verdict]:
        """All cases at once, as the verifier below can."""
        verdicts = verify_all(self._judge, cases)
        return [self._flipped(verdict) if self._is_error(case) else verdict for case, verdict in zip(cases, verdicts, strict=True)]

    def take_cost(self) -> Mapping[str, float]:
        """Of the verifier below."""
        return take_cost(self._judge)

    def _is_error(self, case: Case) -> bool:
        return derive_seed(self._config.seed, "flip", _place(case)) < self._config.probability * _SEED_RANGE

    @staticmethod
    def _flipped(verdict: Verdict) -> Verdict:
        if verdict.kind is not VerdictKind.OK:
            return verdict
        return Verdict.ok(1.0 - verdict.reward, f"flipped: {verdict.reason}", **verdict.detail)


def _place(case: Case) -> str:
    parts = ([asdict(message) for message in case.state.messages], asdict(case.expert), asdict(case.action))
    try:
        return content_id(*parts)
    except TypeError:
        # Lone surrogates, which JSON cannot hold.
        return content_id(ascii(parts))
