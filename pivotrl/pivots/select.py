"""Which profiled turns become pivots: Eq. 5 in exact arithmetic, and the named alternatives it is compared with.

Pure: profiled turns in, a kept-or-dropped decision with a reason per turn out. No file, no clock, no float comparison: for
0/1 rewards the rule is integers, for graded rewards it is `Fraction`s, and lambda_diff is the decimal that the recipe wrote.
Called by `profiling/select.py`; the caller decides which split is selected from.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction
from typing import assert_never

from pivotrl.config.schema import AllTurnsRule, Eq5Rule, RandomTurnsRule, SelectConfig, WindowRule
from pivotrl.identity import derive_seed
from pivotrl.pivots.statistics import Interval, wilson_interval
from pivotrl.types import Domain

KEPT = "kept"
ALWAYS_FAILS = "always fails"
ALWAYS_SUCCEEDS = "always succeeds"
ALWAYS_EQUAL = "always equal"
TOO_EASY = "too easy"
OUTSIDE_WINDOW = "outside window"
NOT_DRAWN = "not drawn"
QUARANTINED = "quarantined: "

type Decision = Callable[[int, int], bool]
"""Whether a candidate with (samples, successes) is kept."""


@dataclass(frozen=True, slots=True)
class ProfiledTurn:
    """What selection may look at: a profile without its tokens.

    >>> turn = ProfiledTurn("a", Domain.SEARCH, turn_index=0, rewards_K=(1.0, 0.0, 0.0, 0.0), quarantine_reason=None)
    >>> turn.mean_reward
    Fraction(1, 4)
    """

    candidate_id: str
    domain: Domain
    turn_index: int
    rewards_K: tuple[float, ...]
    """Rewards of the counted samples; K is its length."""
    quarantine_reason: str | None

    @property
    def mean_reward(self) -> Fraction:
        """mu(s) of Eq. 4, exact, each reward read as the decimal it prints as (0.3 is 3/10, not the nearest binary fraction)."""
        if all(reward in (0, 1) for reward in self.rewards_K):
            return Fraction(sum(map(int, self.rewards_K)), len(self.rewards_K))
        return sum((Fraction(repr(float(reward))) for reward in self.rewards_K), start=Fraction(0)) / len(self.rewards_K)

    @property
    def has_variance(self) -> bool:
        """var(s) > 0 of Eq. 4, decided by comparing rewards, never by a float threshold."""
        return len(set(self.rewards_K)) > 1


@dataclass(frozen=True, slots=True)
class Selection:
    """The decision for every turn, in the order given, and the counts that the report prints."""

    kept: tuple[str, ...]
    """Candidate ids of the pivots."""
    reasons: Mapping[str, str]
    """Candidate id to `KEPT` or the drop reason."""
    by_reason: Mapping[str, int]
    """Decision to number of turns, `KEPT` included; largest first."""
    by_domain: Mapping[str, Mapping[str, int]]
    """Domain to decision to number of turns."""
    by_turn_depth: Mapping[str, Mapping[str, int]]
    """Depth bucket (`depth_bucket`) to decision to number of turns."""
    uninformative: Interval
    """Share of profiled, not quarantined turns whose rewards are all equal (the paper's 71 %), with its Wilson interval."""

    @property
    def dropped(self) -> dict[str, int]:
        """Drop reason to number of turns."""
        return {reason: count for reason, count in self.by_reason.items() if reason != KEPT}


def select_pivots(turns: Sequence[ProfiledTurn], config: SelectConfig, *, run_seed: int) -> Selection:
    """D_adv of Eq. 5, or of the recipe's other rule, with a reason for every turn that is not in it.

    >>> turns = [ProfiledTurn(str(k), Domain.SWE, 0, (1.0,) * k + (0.0,) * (4 - k), None) for k in range(5)]
    >>> selection = select_pivots(turns, Eq5Rule(rule="eq5", lambda_diff=Decimal("0.75")), run_seed=0)
    >>> selection.kept
    ('1', '2')
    >>> selection.dropped
    {'always fails': 1, 'too easy': 1, 'always succeeds': 1}
    """
    drawn = _drawn(turns, config, run_seed)
    reasons = {turn.candidate_id: decide(turn, config, drawn=drawn) for turn in turns}
    judged = [turn for turn in turns if _quarantine(turn) is None]
    return Selection(
        kept=tuple(turn.candidate_id for turn in turns if reasons[turn.candidate_id] == KEPT),
        reasons=reasons,
        by_reason=_counted(reasons[turn.candidate_id] for turn in turns),
        by_domain=_crossed((turn.domain.value, reasons[turn.candidate_id]) for turn in turns),
        by_turn_depth=_crossed(
            (depth_bucket(turn.turn_index), reasons[turn.candidate_id]) for turn in sorted(turns, key=lambda turn: turn.turn_index)
        ),
        uninformative=wilson_interval(sum(not turn.has_variance for turn in judged), len(judged)),
    )


def decide(turn: ProfiledTurn, config: SelectConfig, *, drawn: frozenset[str]) -> str:
    """`KEPT` or the drop reason of one turn; `drawn` are the ids that the random rule drew."""
    if (quarantine := _quarantine(turn)) is not None:
        return QUARANTINED + quarantine
    match config:
        case Eq5Rule():
            return _decide_eq5(turn, config.lambda_diff)
        case WindowRule():
            return KEPT if Fraction(config.low) <= turn.mean_reward <= Fraction(config.high) else OUTSIDE_WINDOW
        case RandomTurnsRule():
            return KEPT if turn.candidate_id in drawn else NOT_DRAWN
        case AllTurnsRule():
            return KEPT
        case _:
            assert_never(config)


def decision_of(config: SelectConfig) -> Decision:
    """The rule on 0/1 rewards alone, without the random rule's draw; also what stopping early would decide.

    >>> keeps = decision_of(Eq5Rule(rule="eq5", lambda_diff=Decimal("0.6")))
    >>> keeps(16, 9), keeps(16, 10), keeps(16, 0), keeps(3, 2)
    (True, False, False, False)
    """

    def keeps(samples: int, successes: int) -> bool:
        rewards_K = (1.0,) * successes + (0.0,) * (samples - successes)
        return decide(ProfiledTurn("", Domain.SWE, 0, rewards_K, None), config, drawn=frozenset()) == KEPT

    return keeps


def depth_bucket(turn_index: int) -> str:
    """Turn depth in doubling buckets, so that a 200-turn trajectory needs nine rows, not 200.

    >>> [depth_bucket(turn) for turn in (0, 1, 2, 3, 4, 7, 8, 100)]
    ['0', '1', '2-3', '2-3', '4-7', '4-7', '8-15', '64-127']
    """
    if turn_index < 2:
        return str(turn_index)
    low = 1 << (turn_index.bit_length() - 1)
    return f"{low}-{2 * low - 1}"


def _decide_eq5(turn: ProfiledTurn, lambda_diff: Decimal) -> str:
    if not turn.has_variance:
        return {0.0: ALWAYS_FAILS, 1.0: ALWAYS_SUCCEEDS}.get(turn.rewards_K[0], ALWAYS_EQUAL)
    return KEPT if turn.mean_reward < Fraction(lambda_diff) else TOO_EASY


def _quarantine(turn: ProfiledTurn) -> str | None:
    """A turn without a counted sample has no profile, whatever its row says: it cannot be judged by any rule."""
    return turn.quarantine_reason or (None if turn.rewards_K else "no counted sample")


def _drawn(turns: Sequence[ProfiledTurn], config: SelectConfig, run_seed: int) -> frozenset[str]:
    """The random rule's ids: the first `num_turns` in hash order, so that the draw of 100 is part of the draw of 200."""
    if not isinstance(config, RandomTurnsRule):
        return frozenset()
    assert config.num_turns is not None, "the caller has replaced `as_many_as` by its number"
    eligible = (turn.candidate_id for turn in turns if _quarantine(turn) is None)
    in_hash_order = sorted(eligible, key=lambda candidate_id: (derive_seed(run_seed, "select", candidate_id), candidate_id))
    return frozenset(in_hash_order[: config.num_turns])


def _counted(reasons: Iterable[str]) -> dict[str, int]:
    return dict(Counter(reasons).most_common())


def _crossed(pairs: Iterable[tuple[str, str]]) -> dict[str, dict[str, int]]:
    table: dict[str, Counter[str]] = {}
    for row, reason in pairs:
        table.setdefault(row, Counter())[reason] += 1
    return {row: dict(counts.most_common()) for row, counts in table.items()}
