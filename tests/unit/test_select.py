"""Eq. 5 at its boundaries, the named alternatives, and the counts; the oracle is the paper's formula over Fractions, written anew."""

from __future__ import annotations

import doctest
from decimal import Decimal
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pivotrl.config.schema import AllTurnsRule, Eq5Rule, RandomTurnsRule, WindowRule
from pivotrl.pivots import select
from pivotrl.pivots.select import ProfiledTurn, depth_bucket, select_pivots
from pivotrl.types import Domain


def turn(successes: int, k: int, name: str = "turn", quarantine: str | None = None) -> ProfiledTurn:
    return ProfiledTurn(name, Domain.TERMINAL, 0, (1.0,) * successes + (0.0,) * (k - successes), quarantine)


def eq5(lambda_diff: str) -> Eq5Rule:
    return Eq5Rule(rule="eq5", lambda_diff=Decimal(lambda_diff))


def decision(one: ProfiledTurn, rule: Eq5Rule | WindowRule | RandomTurnsRule | AllTurnsRule) -> str:
    return select_pivots([one], rule, run_seed=0).reasons[one.candidate_id]


@pytest.mark.parametrize(
    ("successes", "k", "lambda_diff", "expected"),
    [
        (0, 8, "0.6", "always fails"),
        (8, 8, "0.6", "always succeeds"),
        (1, 8, "0.6", "kept"),
        (4, 8, "0.5", "too easy"),
        (3, 8, "0.5", "kept"),
        (7, 8, "1", "kept"),
        (8, 8, "1", "always succeeds"),
        (6, 10, "0.6", "too easy"),
        (5, 10, "0.6", "kept"),
        (3, 10, "0.3", "too easy"),
        (7, 10, "0.7", "too easy"),
        (1, 10, "0.1", "too easy"),
        (1, 2, "0.5", "too easy"),
        (1, 2, "0.500000000000000001", "kept"),
        (1, 3, "0.333333333333333333", "too easy"),
        (1, 3, "0.333333333333333334", "kept"),
        (29, 50, "0.58", "too easy"),
    ],
)
def test_eq5_at_its_boundaries(successes: int, k: int, lambda_diff: str, expected: str) -> None:
    assert decision(turn(successes, k), eq5(lambda_diff)) == expected


def test_float_arithmetic_would_keep_a_row_that_sits_exactly_on_lambda() -> None:
    rewards = (0.1, 0.7)
    assert sum(rewards) / 2 < 0.4
    assert sum(map(Fraction, rewards)) / 2 < Fraction("0.4")
    graded = ProfiledTurn("turn", Domain.SWE, 0, rewards, None)
    assert graded.mean_reward == Fraction(2, 5)
    assert decision(graded, eq5("0.4")) == "too easy"


@given(successes=st.integers(0, 32), failures=st.integers(0, 32), lambda_thousandths=st.integers(1, 1000))
def test_eq5_equals_the_paper(successes: int, failures: int, lambda_thousandths: int) -> None:
    k = successes + failures
    if k == 0:
        return
    mean = Fraction(successes, k)
    variance = sum((Fraction(reward) - mean) ** 2 for reward in [1] * successes + [0] * failures) / k
    expected = variance > 0 and mean < Fraction(lambda_thousandths, 1000)
    rule = Eq5Rule(rule="eq5", lambda_diff=Decimal(lambda_thousandths) / 1000)
    assert (decision(turn(successes, k), rule) == "kept") is expected


@given(tenths=st.lists(st.integers(0, 10), min_size=1, max_size=12), lambda_tenths=st.integers(1, 10))
def test_eq5_of_graded_rewards_equals_the_paper(tenths: list[int], lambda_tenths: int) -> None:
    mean = Fraction(sum(tenths), 10 * len(tenths))
    expected = len(set(tenths)) > 1 and mean < Fraction(lambda_tenths, 10)
    graded = ProfiledTurn("turn", Domain.SWE, 0, tuple(tenth / 10 for tenth in tenths), None)
    assert (decision(graded, Eq5Rule(rule="eq5", lambda_diff=Decimal(lambda_tenths) / 10)) == "kept") is expected


@pytest.mark.parametrize(
    ("rewards", "expected"),
    [((0.0, 0.0), "always fails"), ((1.0, 1.0), "always succeeds"), ((0.5, 0.5), "always equal"), ((), "quarantined: no counted sample")],
)
def test_rows_without_variance_say_which_kind(rewards: tuple[float, ...], expected: str) -> None:
    assert decision(ProfiledTurn("turn", Domain.SWE, 0, rewards, None), eq5("1")) == expected


@pytest.mark.parametrize(("successes", "expected"), [(0, "outside window"), (2, "outside window"), (3, "kept"), (7, "kept"), (8, "outside window")])
def test_window_includes_both_ends(successes: int, expected: str) -> None:
    assert decision(turn(successes, 10), WindowRule(rule="window", low=Decimal("0.3"), high=Decimal("0.7"))) == expected


def test_quarantined_rows_are_never_kept() -> None:
    rules = [
        eq5("1"),
        WindowRule(rule="window", low=Decimal(0), high=Decimal(1)),
        RandomTurnsRule(rule="random", num_turns=9),
        AllTurnsRule(rule="all"),
    ]
    for rule in rules:
        assert decision(turn(1, 2, quarantine="prompt too long"), rule) == "quarantined: prompt too long"


def test_random_draw_ignores_the_profile_and_the_order_and_nests() -> None:
    turns = [turn(i % 9, 8, name=f"c{i}") for i in range(50)]
    ten = select_pivots(turns, RandomTurnsRule(rule="random", num_turns=10), run_seed=1)
    twenty = select_pivots(turns, RandomTurnsRule(rule="random", num_turns=20), run_seed=1)
    other_seed = select_pivots(turns, RandomTurnsRule(rule="random", num_turns=10), run_seed=2)
    backwards = select_pivots(turns[::-1], RandomTurnsRule(rule="random", num_turns=10), run_seed=1)
    other_profile = select_pivots([turn(0, 8, name=t.candidate_id) for t in turns], RandomTurnsRule(rule="random", num_turns=10), run_seed=1)
    assert len(ten.kept) == 10
    assert set(ten.kept) < set(twenty.kept)
    assert set(ten.kept) == set(backwards.kept) == set(other_profile.kept)
    assert set(ten.kept) != set(other_seed.kept)
    assert ten.dropped == {"not drawn": 40}


def test_all_keeps_turns_that_teach_nothing() -> None:
    selection = select_pivots([turn(0, 4, "a"), turn(4, 4, "b"), turn(2, 4, "c", quarantine="infra")], AllTurnsRule(rule="all"), run_seed=0)
    assert selection.kept == ("a", "b")


def test_counts_add_up_and_quarantined_rows_leave_the_uninformative_share() -> None:
    turns = [
        ProfiledTurn("a", Domain.SWE, 0, (1.0, 0.0), None),
        ProfiledTurn("b", Domain.SWE, 9, (0.0, 0.0), None),
        ProfiledTurn("c", Domain.SEARCH, 9, (1.0, 1.0), None),
        ProfiledTurn("d", Domain.SEARCH, 1, (0.0, 0.0), "infra"),
        ProfiledTurn("e", Domain.SEARCH, 1, (0.0, 0.0), None),
    ]
    selection = select_pivots(turns, eq5("1"), run_seed=0)
    assert selection.by_reason == {"always fails": 2, "kept": 1, "always succeeds": 1, "quarantined: infra": 1}
    assert selection.by_domain["swe"] == {"kept": 1, "always fails": 1}
    assert list(selection.by_turn_depth) == ["0", "1", "8-15"]
    assert selection.by_turn_depth["8-15"] == {"always fails": 1, "always succeeds": 1}
    assert (selection.uninformative.value, selection.uninformative.n) == (0.75, 4)
    assert 0.30 < selection.uninformative.low < 0.31


@given(st.integers(0, 10_000))
def test_depth_buckets_contain_their_turn(turn_index: int) -> None:
    low, _, high = depth_bucket(turn_index).partition("-")
    assert int(low) <= turn_index <= int(high or low)


def test_examples_in_the_docstrings_run() -> None:
    assert doctest.testmod(select).failed == 0
