"""A judge that goes down in the middle of a stage: nothing is scored 0, the stage stops with exit code 3, the same command ends as if undisturbed."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from fakes.bandit import bandit_tasks, first_token_verdict
from fakes.bandit_run import bandit_train_config, data_bytes, run_bandit
from fakes.characters import CharacterRenderer, completion
from fakes.judge_server import JudgeServer, Reply, judge_config, judge_server, shown
from fakes.runs import trajectory, write_ingest

from pivotrl import cli, pipeline, rundir
from pivotrl.config.schema import ProfileConfig, SamplingConfig
from pivotrl.errors import InfraLimitError
from pivotrl.identity import derive_seed
from pivotrl.pivots.dataset import ProfileStore
from pivotrl.profiling.measure import ProfileSettings
from pivotrl.profiling.profile import run_profile
from pivotrl.profiling.units import Ledger
from pivotrl.rollouts.local import LocalSampler
from pivotrl.rollouts.scripted import ScriptedEngine
from pivotrl.rundir import Stage, read_json
from pivotrl.training.groups import check_infra
from pivotrl.trajectories.store import CandidateStore, TrajectoryStore
from pivotrl.types import Completion, FinishReason, LocalRollout, Verdict
from pivotrl.verifiers.judge.verifier import JudgeVerifier

SEED, K = 11, 4
SAMPLING = SamplingConfig(temperature=1.0, max_new_tokens=200, truncated="zero")


def some_device(prompt_token_ids: tuple[int, ...], seed: int, _index: int) -> Sequence[int]:
    """Another device for each draw, so that the judge has something to say."""
    device = derive_seed(seed, "device") % 50
    return completion(f'<tool_call>\n{{"name": "open_ticket", "arguments": {{"device": "other {device}"}}}}\n</tool_call>')


def even(body: dict[str, Any]) -> Reply:
    """Both opinions alike: by the sum of the characters of both actions."""
    return Reply(f"VERDICT: {'SAME' if sum(map(ord, ''.join(shown(body)))) % 2 else 'DIFFERENT'}")


def profile(run: Path, server: JudgeServer, *, max_infra_frac: float = 0.05) -> dict[str, Any]:
    renderer: Any = CharacterRenderer()
    judge = JudgeVerifier(judge_config(max_attempts=1, give_up_after=4), endpoint=server.url, api_key=None, cache_dir=run / "judge_cache")
    config = ProfileConfig(num_samples=K, unit_candidates=3, max_infra_frac=max_infra_frac, max_resamples=1)
    return run_profile(
        Stage.open(run, "profile", config={}, inputs={}, seed=SEED),
        candidates=CandidateStore.open(run / "ingest"),
        trajectories=TrajectoryStore.open(run / "ingest"),
        sampler=LocalSampler(ScriptedEngine.from_function(some_device), renderer, judge, SAMPLING, SEED),
        renderer=renderer,
        settings=ProfileSettings(config, SAMPLING, max_prompt_tokens=400, run_seed=SEED),
        provenance={},
    )


def data(run: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in (run / "profile").iterdir() if path.is_file() and path.name != "timing.json"}


@pytest.fixture(autouse=True)
def fixed_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rundir, "source_commit", lambda: "fixed")


def test_a_profile_whose_judge_goes_down_stops_and_resumes_to_the_same_bytes(tmp_path: Path) -> None:
    for name in ("undisturbed", "disturbed"):
        write_ingest(tmp_path / name / "ingest", [trajectory(number) for number in range(3)])
    with judge_server(even) as server:
        profile(tmp_path / "undisturbed", server)
        total = len(server.requests)
    assert total > 40
    is_down, lock, left = threading.Event(), threading.Lock(), [total * 5 // 6]

    def dies(body: dict[str, Any]) -> Reply:
        with lock:
            left[0] -= 1
            if left[0] < 0:
                is_down.set()
        return Reply(status=503) if is_down.is_set() else even(body)

    run = tmp_path / "disturbed"
    with judge_server(dies) as server:
        with pytest.raises(InfraLimitError, match=r"verdicts of .*profile .*run the same command to resume"):
            profile(run, server)
        units = sorted(path.name for path in (run / "profile" / "units").glob("*.jsonl"))
        assert units == [f"{number:06d}.jsonl" for number in range(len(units))]
        assert 0 < len(units) < 3
        assert not Stage.is_done(run, "profile")
        is_down.clear()
        left[0], before = 10**9, len(server.requests)
        profile(run, server)
        assert len(server.requests) - before < total, "answers that were paid for are not asked for again"
    assert data(run) == data(tmp_path / "undisturbed")
    timing = read_json(run / "profile" / "timing.json")
    assert timing["rollout/judge_requests/sum"] == len(server.requests) - before
    assert timing["rollout/judge_cache_hits/sum"] > 0
    assert "judge_requests" not in (run / "profile" / "manifest.json").read_text()


def test_a_few_unreadable_answers_quarantine_their_rows_only(tmp_path: Path) -> None:
    write_ingest(tmp_path / "ingest", [trajectory(number) for number in range(3)])
    unreadable = "device 1 hums."

    def answer(body: dict[str, Any]) -> Reply:
        return Reply("I would rather not say.") if unreadable in body["messages"][1]["content"].lower() else even(body)

    with judge_server(answer) as server:
        summary = profile(tmp_path, server, max_infra_frac=1.0)
    kept = [one.profile for one in ProfileStore.open(tmp_path / "profile").iterate()]
    spoiled = [one for one in kept if one.quarantine_reason is not None]
    assert summary["quarantine"] == {"infra": 3}
    assert {one.candidate_id for one in spoiled} == {f"trajectory-1-turn-{turn}" for turn in range(3)}
    assert all(one.rewards_K == () for one in spoiled)
    assert all(len(one.rewards_K) == K for one in kept if one not in spoiled)


def rows_of(*, infra: int, ok: int, experts: int) -> list[dict[str, Any]]:
    verdicts = [*["infra"] * infra, *["ok"] * ok]
    rows = [{"rollouts": [{"num_tokens": 1, "verdict": kind} for kind in verdicts], "expert_was_infra": False}]
    return rows + [{"rollouts": [], "expert_was_infra": True}] * experts


def test_an_outage_stops_the_profile_at_its_first_unit_whatever_the_share_so_far() -> None:
    ledger = Ledger(num_samples=8)
    ledger.add(rows_of(infra=0, ok=10_000, experts=0))
    outage = rows_of(infra=33, ok=31, experts=0)
    ledger.add(outage)
    ledger.check(0.05)
    with pytest.raises(InfraLimitError, match="33 of 64 verdicts of one unit"):
        ledger.check_unit(outage, 0.05)
    ledger.check_unit(rows_of(infra=32, ok=32, experts=0), 0.05)
    ledger.check_unit(outage, 0.9)


def test_an_expert_that_could_not_be_judged_weighs_as_the_samples_it_cost() -> None:
    """One row of 8 verdicts and one lost row: half is lost, not one ninth."""
    ledger = Ledger(num_samples=8)
    ledger.add(rows_of(infra=0, ok=8, experts=1))
    ledger.check(0.5)
    with pytest.raises(InfraLimitError, match="8 of 16 verdicts"):
        ledger.check(0.49)


def test_a_run_whose_judge_goes_down_stops_and_resumes_to_the_same_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = bandit_train_config(num_steps=5, checkpoint_every=2)
    run_bandit(tmp_path / "undisturbed", config)
    num_judged = 0

    def dies(task: Any, completion_: Completion) -> Verdict:
        nonlocal num_judged
        num_judged += 1
        # 12 verdicts a step: down in the middle of step 3, the last checkpoint being step 2's.
        return Verdict.infra("judge unreachable") if num_judged > 42 else first_token_verdict(task, completion_)

    with monkeypatch.context() as patch:
        patch.setattr("fakes.bandit.first_token_verdict", dies)
        with pytest.raises(InfraLimitError, match=r"6 of 12 verdicts at step 3 .*most often: judge unreachable"):
            run_bandit(tmp_path / "disturbed", config)
    run_bandit(tmp_path / "disturbed", config)
    assert data_bytes(tmp_path / "disturbed") == data_bytes(tmp_path / "undisturbed")


def test_a_step_without_one_judged_rollout_is_stopped_under_any_limit() -> None:
    task = bandit_tasks(1)[0]
    lost = LocalRollout(task.candidate_id, 0, 1, Completion((5,), (-0.1,), FinishReason.STOP, 0), task.expert_action, Verdict.infra("judge down"))
    with pytest.raises(InfraLimitError, match="2 of 2 verdicts"):
        check_infra([[lost, lost]], max_infra_frac=1.0, where="step 0")
    assert check_infra([], max_infra_frac=0.0, where="step 0") == 0


def test_the_command_line_ends_with_3(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def stopped(*_: object) -> None:
        raise InfraLimitError("9 of 10 verdicts\nwere lost")

    monkeypatch.setattr(pipeline, "load", stopped)
    monkeypatch.setattr("sys.argv", ["pivotrl", "profile", "recipe"])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 3
    assert capsys.readouterr().err == "pivotrl: error: 9 of 10 verdicts were lost\n"
