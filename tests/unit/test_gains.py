"""Format gain and decision gain against numbers worked out by hand, and the identity on any data."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pivotrl.evaluation.gains import Attempt, profile_attempts, split_gain
from pivotrl.pivots.dataset import PROFILE_COLUMNS, PROFILES, ROLLOUTS
from pivotrl.pivots.parquet import write_rows
from pivotrl.profiling.units import ROLLOUT_COLUMNS

UNREADABLE = None


def attempts(candidate: str, *rewards: float | None, cluster: str | None = None) -> list[Attempt]:
    """One attempt per reward; None is an action that could not be read."""
    return [Attempt(candidate, cluster or candidate, reward or 0.0, reward is not UNREADABLE) for reward in rewards]


def test_both_factors_change() -> None:
    """f 1/2 -> 1, d 1/2 -> 3/4: total 3/4 - 1/4; format 1/2 * 5/8; decision 1/4 * 3/4."""
    found = split_gain(attempts("a", 1, 0, None, None), attempts("a", 1, 1, 1, 0), seed=1)
    assert found is not None
    assert (found.total.value, found.format.value, found.decision.value) == (0.5, 0.3125, 0.1875)
    assert (found.well_formed_before, found.well_formed_after, found.num_one_sided) == (0.5, 1.0, 0)


def test_the_same_reward_difference_can_be_all_format_or_all_decision() -> None:
    before = attempts("a", 1, None) + attempts("b", 1, None)
    only_format = split_gain(before, attempts("a", 1, 1) + attempts("b", 1, 1), seed=1)
    only_decision = split_gain(attempts("a", 1, 0) + attempts("b", 1, 0), attempts("a", 1, 1) + attempts("b", 1, 1), seed=1)
    assert only_format is not None
    assert only_decision is not None
    assert (only_format.total.value, only_format.format.value, only_format.decision.value) == (0.5, 0.5, 0.0)
    assert (only_decision.total.value, only_decision.format.value, only_decision.decision.value) == (0.5, 0.0, 0.5)


def test_a_format_gain_can_hide_a_decision_loss() -> None:
    """f 1/4 -> 1, d 1 -> 1/2: +1/4 in all, of it format 3/4 * 3/4 = 9/16 and decision -1/2 * 5/8 = -5/16."""
    found = split_gain(attempts("a", 1, None, None, None), attempts("a", 1, 1, 0, 0), seed=1)
    assert found is not None
    assert (found.total.value, found.format.value, found.decision.value) == (0.25, 0.5625, -0.3125)


@pytest.mark.parametrize(("early", "late", "total"), [((None, None), (1, 0), 0.5), ((1, 0), (None, None), -0.5)])
def test_where_nothing_could_be_read_on_one_side_the_difference_is_formats(early: tuple, late: tuple, total: float) -> None:
    found = split_gain(attempts("a", *early), attempts("a", *late), seed=1)
    assert found is not None
    assert (found.total.value, found.format.value, found.decision.value, found.num_one_sided) == (total, total, 0.0, 1)


def test_candidates_weigh_the_same_and_only_shared_ones_count() -> None:
    """a: +1 (format); b: 0 with three attempts; c and d are on one side only. Pooling the rows would give 1/4, not 1/2."""
    before = attempts("a", None) + attempts("b", 1, 1, 1) + attempts("c", 0)
    after = attempts("a", 1) + attempts("b", 1, 1, 1) + attempts("d", 1)
    found = split_gain(before, after, seed=1)
    assert found is not None
    assert (found.total.value, found.total.n) == (0.5, 2)
    assert split_gain(attempts("c", 1), attempts("d", 1), seed=1) is None


def test_splitting_per_candidate_sees_through_a_change_of_mix() -> None:
    """Nobody decides better; the hard candidate merely becomes readable. Pooled, d would fall from 1 to 1/2 and decision would be -3/8."""
    before = attempts("easy", 1, 1) + attempts("hard", None, None)
    after = attempts("easy", 1, 1) + attempts("hard", 0, 0)
    found = split_gain(before, after, seed=1)
    assert found is not None
    assert (found.total.value, found.format.value, found.decision.value) == (0.0, 0.0, 0.0)


def test_intervals_resample_clusters() -> None:
    """Four candidates of one trajectory are one observation: no spread to see. As four clusters the interval has width."""
    early = [one for name in "abcd" for one in attempts(name, 0, 0, cluster="t")]
    late = [one for name, reward in zip("abcd", (0, 1, 0, 1), strict=True) for one in attempts(name, reward, reward, cluster="t")]
    together = split_gain(early, late, seed=1)
    apart = split_gain(*[[Attempt(a.candidate_id, a.candidate_id, a.reward, a.is_well_formed) for a in side] for side in (early, late)], seed=1)
    assert together is not None
    assert apart is not None
    assert (together.total.low, together.total.high) == (0.5, 0.5)
    assert apart.total.low < 0.5 < apart.total.high


_REWARDS = st.lists(st.sampled_from([None, 0.0, 0.25, 1.0]), min_size=1, max_size=5)


@settings(max_examples=100)
@given(sides=st.lists(st.tuples(_REWARDS, _REWARDS), min_size=1, max_size=6))
def test_the_parts_sum_to_the_difference_of_mean_rewards(sides: list[tuple[list[float | None], list[float | None]]]) -> None:
    before = [one for index, (early, _) in enumerate(sides) for one in attempts(str(index), *early)]
    after = [one for index, (_, late) in enumerate(sides) for one in attempts(str(index), *late)]
    found, swapped = split_gain(before, after, seed=3), split_gain(after, before, seed=3)
    assert found is not None
    assert swapped is not None
    mean = lambda rewards: sum(reward or 0.0 for reward in rewards) / len(rewards)  # noqa: E731
    expected = sum(mean(late) - mean(early) for early, late in sides) / len(sides)
    assert found.total.value == pytest.approx(expected, abs=1e-12)
    assert found.format.value + found.decision.value == pytest.approx(expected, abs=1e-12)
    assert swapped.format.value == pytest.approx(-found.format.value, abs=1e-12)


def test_a_reward_for_an_unreadable_action_is_refused() -> None:
    with pytest.raises(ValueError, match="could not be read"):
        Attempt("a", "a", 1.0, is_well_formed=False)


def test_profiles_give_their_counted_rollouts(tmp_path: Path) -> None:
    """An infra verdict and an excluded sample have no counted reward and are not attempts."""
    profile = dict.fromkeys(PROFILE_COLUMNS)
    write_rows(tmp_path / PROFILES, PROFILE_COLUMNS, [{**profile, "candidate_id": "a", "task_id": "t"}])
    rollout = {**dict.fromkeys(ROLLOUT_COLUMNS), "candidate_id": "a"}
    verdicts = [("ok", 1.0), ("invalid", 0.0), ("infra", None), ("invalid", None)]
    write_rows(tmp_path / ROLLOUTS, ROLLOUT_COLUMNS, [{**rollout, "verdict": kind, "counted_reward": reward} for kind, reward in verdicts])
    assert profile_attempts(tmp_path) == [Attempt("a", "t", 1.0, True), Attempt("a", "t", 0.0, False)]
