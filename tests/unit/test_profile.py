"""Profiles against Eq. 4 written anew, every way into quarantine, resampling, truncation, and the cost ledger."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from decimal import Decimal
from pathlib import Path
from statistics import mean, pvariance
from typing import Any, Literal

import pytest
from fakes.characters import CharacterRenderer, completion
from fakes.runs import candidates_of, trajectory, write_ingest
from hypothesis import given
from hypothesis import strategies as st

from pivotrl.config.schema import Eq5Rule, ProfileConfig, SamplingConfig, ToolCallVerifierConfig
from pivotrl.errors import InfraLimitError, UserError
from pivotrl.identity import derive_seed
from pivotrl.pivots.dataset import PivotStore, ProfileStore, exact_moments
from pivotrl.pivots.parquet import read_rows
from pivotrl.profiling.measure import ProfileSettings
from pivotrl.profiling.profile import run_profile
from pivotrl.profiling.selection import run_select
from pivotrl.profiling.tasks import local_tasks
from pivotrl.profiling.units import choose
from pivotrl.rollouts.engine import EngineError
from pivotrl.rollouts.local import LocalSampler
from pivotrl.rollouts.scripted import Script, ScriptedEngine
from pivotrl.rundir import Stage, read_json
from pivotrl.trajectories.store import CandidateStore, TrajectoryStore
from pivotrl.types import Action, Message, Origin, ParseOutcome, Role, Split, State, ToolCall, Trajectory, Verdict
from pivotrl.verifiers.tool_call import ToolCallVerifier

SEED = 5
FLAKY = "flaky judge"


class FlakyVerifier(ToolCallVerifier):
    """The tool-call verifier behind a judge that is down for one text."""

    def __init__(self) -> None:
        super().__init__(ToolCallVerifierConfig(type="tool_call", message="any"))

    def verify(self, state: State, expert: Action, action: Action) -> Verdict:
        return Verdict.infra("judge down") if action.content == FLAKY else super().verify(state, expert, action)


def settings(*, k: int = 4, truncated: Literal["zero", "exclude", "mask"] = "zero", max_prompt_tokens: int = 1000, **profile: Any) -> ProfileSettings:
    sampling = SamplingConfig(temperature=1.0, max_new_tokens=120, truncated=truncated)
    return ProfileSettings(ProfileConfig(num_samples=k, **profile), sampling, max_prompt_tokens, SEED)


def right_call(prompt_token_ids: Sequence[int]) -> tuple[int, ...]:
    """The expert's call in the state of a prompt."""
    prompt = "".join(map(chr, prompt_token_ids))
    device, turn = prompt.split("Device ")[1].split()[0], prompt.count("tool: ")
    return completion(f'<tool_call>\n{{"name": "open_ticket", "arguments": {{"device": "{device}-{turn}"}}}}\n</tool_call>')


def profile(run: Path, script: Script, how: ProfileSettings) -> dict[str, Any]:
    renderer: Any = CharacterRenderer()
    stage = Stage.open(run, "profile", config={}, inputs={}, seed=SEED)
    return run_profile(
        stage,
        candidates=CandidateStore.open(run / "ingest"),
        trajectories=TrajectoryStore.open(run / "ingest"),
        sampler=LocalSampler(ScriptedEngine.from_function(script), renderer, FlakyVerifier(), how.sampling, SEED),
        renderer=renderer,
        settings=how,
        provenance={"policy": "p0"},
    )


def by_sample(pattern: str) -> Script:
    """A script from one letter per sample: r right, w wrong, m malformed, t talk, l too long."""
    texts = {
        "w": "<tool_call>\n" + '{"name": "open_ticket", "arguments": {"device": "x"}}\n</tool_call>',
        "m": "<tool_call>{",
        "t": "No.",
        "l": "x" * 500,
    }

    def script(prompt: tuple[int, ...], _seed: int, index: int) -> Sequence[int]:
        return right_call(prompt) if pattern[index] == "r" else completion(texts[pattern[index]])

    return script


def test_profiles_follow_eq_4_and_the_summary_counts_them(tmp_path: Path) -> None:
    write_ingest(tmp_path / "ingest", [trajectory(0), trajectory(1)])
    summary = profile(tmp_path, by_sample("rrwmtw"), settings(k=6, unit_candidates=4))
    profiles = list(ProfileStore.open(tmp_path / "profile").iterate())
    assert [one.candidate.id for one in profiles] == [f"trajectory-{n}-turn-{t}" for n in (0, 1) for t in range(3)]
    for one in profiles:
        rewards = one.profile.rewards_K
        assert rewards == (1.0, 1.0, 0.0, 0.0, 0.0, 0.0)
        assert (one.profile.successes, one.profile.num_malformed, one.profile.num_truncated) == (2, 1, 0)
        assert one.profile.quarantine_reason is None
        assert "".join(map(chr, one.profile.prompt_token_ids)).endswith("assistant: ")
    row = next(read_rows(tmp_path / "profile" / "profiles.parquet"))
    assert row["mean_reward"] == pytest.approx(mean([1, 1, 0, 0, 0, 0]))
    assert row["reward_variance"] == pytest.approx(pvariance([1, 1, 0, 0, 0, 0]))
    assert (summary["num_candidates"], summary["num_profiled"], summary["num_successes"]) == (6, 6, 12)
    assert (summary["malformed_frac"]["value"], summary["malformed_frac"]["n"]) == (pytest.approx(1 / 6), 36)
    assert summary["absent_frac"]["value"] == pytest.approx(1 / 6)
    rollouts = list(read_rows(tmp_path / "profile" / "rollouts.parquet"))
    prompts = sum(len(one.profile.prompt_token_ids) for one in profiles)
    assert summary["cost"] == {"turns": 36, "prompt_tokens": prompts, "completion_tokens": sum(len(r["token_ids"]) for r in rollouts)}
    assert summary["provenance"]["policy"] == "p0"
    assert summary["provenance"]["template_hash"] == "template-hash"
    assert summary["provenance"]["sampling"] == {"temperature": 1.0, "max_new_tokens": 120, "truncated": "zero"}
    assert read_json(tmp_path / "profile" / "manifest.json")["summary"] == summary


def test_every_completion_is_kept_with_its_seed_and_verdict(tmp_path: Path) -> None:
    write_ingest(tmp_path / "ingest", [trajectory(0, num_turns=1)])
    profile(tmp_path, by_sample("rwmt"), settings())
    rollouts = list(read_rows(tmp_path / "profile" / "rollouts.parquet"))
    assert [(row["sample_index"], row["attempt"], row["reward"], row["counted_reward"]) for row in rollouts] == [
        (0, 0, 1, 1),
        *((i, 0, 0, 0) for i in (1, 2, 3)),
    ]
    assert [row["seed"] for row in rollouts] == [derive_seed(SEED, "profile", 0, "trajectory-0-turn-0", index) for index in range(4)]
    assert rollouts[0]["token_ids"] == list(right_call(next(ProfileStore.open(tmp_path / "profile").iterate()).profile.prompt_token_ids))
    assert rollouts[2]["verdict"] == "invalid"
    assert len({row["reason"] for row in rollouts}) == 4


@pytest.mark.parametrize(
    ("truncated", "rewards", "num_truncated"),
    [("zero", (1.0, 0.0, 0.0, 1.0), 2), ("mask", (1.0, 0.0, 0.0, 1.0), 2), ("exclude", (1.0, 1.0), 2)],
)
def test_truncated_samples(truncated: Literal["zero", "exclude", "mask"], rewards: tuple[float, ...], num_truncated: int, tmp_path: Path) -> None:
    write_ingest(tmp_path / "ingest", [trajectory(0, num_turns=1)])
    summary = profile(tmp_path, by_sample("rllr"), settings(truncated=truncated))
    only = next(ProfileStore.open(tmp_path / "profile").iterate()).profile
    assert (only.rewards_K, only.num_truncated, only.num_samples) == (rewards, num_truncated, len(rewards))
    assert summary["truncated_frac"]["value"] == 0.5


def test_a_row_whose_samples_are_all_excluded_is_quarantined(tmp_path: Path) -> None:
    write_ingest(tmp_path / "ingest", [trajectory(0, num_turns=1)])
    summary = profile(tmp_path, by_sample("llll"), settings(truncated="exclude"))
    assert summary["quarantine"] == {"no counted sample": 1}
    assert summary["mean_reward"]["value"] is None


def odd_trajectory() -> Trajectory:
    """One expert turn that cannot be read, one that follows an assistant message, one that is fine."""
    good = trajectory(7, num_turns=1)
    broken = ToolCall("open_ticket", '{"device": ')
    messages = (
        *good.messages[:2],
        Message(Role.ASSISTANT, "", (broken,), origin=Origin.MODEL, parse=ParseOutcome.MALFORMED),
        Message(Role.ASSISTANT, "Hm.", origin=Origin.MODEL),
        Message(Role.USER, "Device 7 still hums."),
        Message(Role.ASSISTANT, "", (ToolCall("open_ticket", '{"device": "7-0"}'),), origin=Origin.MODEL, parse=ParseOutcome.PARSED),
    )
    return replace(good, messages=messages)


def test_quarantined_rows_cost_no_turn_and_say_why(tmp_path: Path) -> None:
    write_ingest(tmp_path / "ingest", [odd_trajectory(), trajectory(0, num_turns=1)])
    summary = profile(tmp_path, by_sample("rrww"), settings(max_prompt_tokens=75))
    reasons = {one.candidate.id: one.profile.quarantine_reason for one in ProfileStore.open(tmp_path / "profile").iterate()}
    assert reasons["trajectory-0-turn-0"] is None
    assert str(reasons["trajectory-7-turn-0"]).startswith("expert rejected: ")
    assert reasons["trajectory-7-turn-1"] == "unrenderable state: chat template: roles must alternate"
    assert reasons["trajectory-7-turn-2"] == "prompt too long"
    assert summary["cost"]["turns"] == 4
    assert (summary["num_candidates"], summary["num_profiled"], summary["num_quarantined"]) == (4, 1, 3)


def fails_once(places: frozenset[int], *, attempts: int) -> Script:
    """Infra at the named places of the first `attempts` attempts, right elsewhere."""
    seeds = {
        derive_seed(SEED, "profile", attempt, "trajectory-0-turn-0", index if attempt == 0 else rank)
        for attempt in range(attempts)
        for rank, index in enumerate(sorted(places))
    }
    return lambda prompt, seed, _: completion(FLAKY) if seed in seeds else right_call(prompt)


def test_infra_verdicts_are_drawn_again_with_another_seed(tmp_path: Path) -> None:
    write_ingest(tmp_path / "ingest", [trajectory(0, num_turns=1)])
    summary = profile(tmp_path, fails_once(frozenset({1, 3}), attempts=2), settings(max_resamples=2, max_infra_frac=0.5))
    rollouts = [(row["sample_index"], row["attempt"], row["verdict"]) for row in read_rows(tmp_path / "profile" / "rollouts.parquet")]
    assert rollouts == [
        (0, 0, "ok"),
        (1, 0, "infra"),
        (1, 1, "infra"),
        (1, 2, "ok"),
        (2, 0, "ok"),
        (3, 0, "infra"),
        (3, 1, "infra"),
        (3, 2, "ok"),
    ]
    assert next(ProfileStore.open(tmp_path / "profile").iterate()).profile.rewards_K == (1.0,) * 4
    assert (summary["cost"]["turns"], summary["infra_frac"]["value"], summary["truncated_frac"]["n"]) == (8, 0.5, 4)
    assert len({row["seed"] for row in read_rows(tmp_path / "profile" / "rollouts.parquet")}) == 8


def test_infra_verdicts_never_become_reward_zero(tmp_path: Path) -> None:
    write_ingest(tmp_path / "ingest", [trajectory(0, num_turns=1)])
    summary = profile(tmp_path, fails_once(frozenset({2}), attempts=3), settings(max_resamples=2, max_infra_frac=1.0))
    only = next(ProfileStore.open(tmp_path / "profile").iterate()).profile
    assert (only.quarantine_reason, only.rewards_K) == ("infra", (1.0, 1.0, 1.0))
    assert summary["quarantine"] == {"infra": 1}


def test_a_dead_engine_stops_the_stage_and_the_same_command_resumes_it(tmp_path: Path) -> None:
    write_ingest(tmp_path / "ingest", [trajectory(number) for number in range(3)])
    calls = 0

    def dies_in_the_third_unit(prompt: tuple[int, ...], seed: int, index: int) -> Sequence[int]:
        nonlocal calls
        calls += 1
        if calls > 16:
            raise EngineError("out of memory")
        return by_sample("rwrw")(prompt, seed, index)

    how = settings(unit_candidates=2)
    with pytest.raises(InfraLimitError, match=r"24 of 40 verdicts .* profile.max_infra_frac allows 0.05"):
        profile(tmp_path, dies_in_the_third_unit, how)
    assert sorted(path.name for path in (tmp_path / "profile" / "units").glob("*.jsonl")) == ["000000.jsonl", "000001.jsonl"]
    assert not Stage.is_done(tmp_path, "profile")
    summary = profile(tmp_path, by_sample("rwrw"), how)
    assert (summary["num_profiled"], summary["infra_frac"]["value"]) == (9, 0.0)
    assert not (tmp_path / "profile" / "units").exists()


def test_message_turns_are_left_out_and_counted_where_the_recipe_asks_for_calls(tmp_path: Path) -> None:
    spoken = trajectory(1, num_turns=1)
    speaks = replace(spoken, messages=(*spoken.messages[:2], Message(Role.ASSISTANT, "Bring it in.", origin=Origin.MODEL)))
    write_ingest(tmp_path / "ingest", [trajectory(0, num_turns=2), speaks])
    summary = profile(tmp_path, by_sample("rwrw"), settings(expert_actions="calls", max_candidates=5))
    assert [one.candidate.id for one in ProfileStore.open(tmp_path / "profile").iterate()] == ["trajectory-0-turn-0", "trajectory-0-turn-1"]
    assert (summary["num_candidates"], summary["num_not_asked_for"]) == (2, {"message turns": 1})


@given(st.permutations(range(40)), st.integers(1, 39))
def test_the_choice_of_candidates_ignores_file_order_and_nests(order: list[int], size: int) -> None:
    candidates = [candidate for number in range(10) for candidate in candidates_of(trajectory(number, num_turns=4), held_out_frac=0.3)]
    chosen = [one.id for one in choose(candidates, size, run_seed=1)]
    shuffled = {one.id for one in choose([candidates[index] for index in order], size, run_seed=1)}
    more = {one.id for one in choose(candidates, size + 1, run_seed=1)}
    assert len(chosen) == size
    assert set(chosen) == shuffled < more
    assert chosen == [one.id for one in candidates if one.id in shuffled]


def test_pivots_and_held_out_tasks_come_back_as_they_were_profiled(tmp_path: Path) -> None:
    write_ingest(tmp_path / "ingest", [trajectory(number) for number in range(8)], held_out_frac=0.4)
    profile(tmp_path, by_sample("rwww"), settings())
    stage = Stage.open(tmp_path, "select", config={}, inputs={}, seed=SEED)
    summary = run_select(stage, tmp_path / "profile", Eq5Rule(rule="eq5", lambda_diff=Decimal("0.5")), run_seed=SEED)
    store, trajectories = PivotStore.open(tmp_path / "select"), TrajectoryStore.open(tmp_path / "ingest")
    profiles = {one.candidate.id: one for one in ProfileStore.open(tmp_path / "profile").iterate()}
    held_out = [one for one in profiles.values() if one.candidate.split is Split.HELD_OUT]
    assert 0 < len(held_out) < 24
    assert {one.candidate_id for one in store.held_out} == {one.candidate.id for one in held_out}
    assert len(store.pivots) == summary["num_pivots"] == 24 - len(held_out)
    assert {one.candidate_id for one in store.pivots}.isdisjoint(one.candidate_id for one in store.held_out)
    assert store.provenance["tokenizer_hash"] == "tokenizer-hash"
    for task, pivot in zip(local_tasks(store.pivots, trajectories), store.pivots, strict=True):
        assert task.prompt_token_ids == profiles[pivot.candidate_id].profile.prompt_token_ids
        assert task.prompt_token_ids == CharacterRenderer().render_prompt(task.state)
        assert task.expert_action == profiles[pivot.candidate_id].candidate.expert_action
        assert (pivot.mean_reward, pivot.successes, pivot.num_samples) == (0.25, 1, 4)
    decisions = list(read_rows(tmp_path / "select" / "decisions.parquet"))
    assert {row["decision"] for row in decisions} == {"kept", "held out"}
    assert [row["candidate_id"] for row in decisions] == list(profiles)


def test_select_says_what_to_do_where_nothing_is_left(tmp_path: Path) -> None:
    write_ingest(tmp_path / "ingest", [trajectory(0)])
    profile(tmp_path, by_sample("wwww"), settings())
    stage = Stage.open(tmp_path, "select", config={}, inputs={}, seed=SEED)
    with pytest.raises(UserError, match=r"select kept none of 3 profiled turns \(always fails: 3\)"):
        run_select(stage, tmp_path / "profile", Eq5Rule(rule="eq5", lambda_diff=Decimal("0.5")), run_seed=SEED)


@given(st.lists(st.floats(0, 1), min_size=1, max_size=32))
def test_moments_equal_the_population_formula(rewards: list[float]) -> None:
    value, variance = exact_moments(tuple(rewards))
    assert math.isclose(value or 0.0, mean(rewards), abs_tol=1e-12)
    assert math.isclose(variance or 0.0, pvariance(rewards), abs_tol=1e-12)
