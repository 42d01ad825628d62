"""The twins that test_twins.py does not run whole: each domain's graph on each family, from made-up episodes to a scored, converted checkpoint.

A file of its own, so that it runs beside the other. What is asked here of each is what differs by domain: which turns become pivots, what the
verifier accepts and refuses, the judge; and that training, evaluation and conversion take what comes of it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from fakes.judge_server import JudgeServer, judge_server, shown
from fakes.twin_runs import SAME, Finished, opinion, run_whole, scored_turns, steps_of, verified_tensors
from fakes.twins import save_tiny_checkpoint
from safetensors.torch import load_file

from pivotrl.rundir import read_json

WHOLE = [
    ("qwen3_30b_a3b", "swe"),
    ("qwen3_30b_a3b", "terminal"),
    ("qwen3_30b_a3b", "browsecomp"),
    ("nemotron3_super_120b", "tau2"),
    ("nemotron3_super_120b", "terminal"),
    ("nemotron3_super_120b", "browsecomp"),
]
# Every way in which the domain's verifier accepts an action of these episodes.
ACCEPTED = {
    "tau2": {"same calls", "same message"},
    "swe": {"same tool"},
    "terminal": {"same commands", "judged the same"},
    "browsecomp": {"same calls", "same answer"},
}
# Some in which it refuses one that is well-formed.
REFUSED = {
    "tau2": {"wrong tool", "wrong argument value", "different message", "spoke instead of calling"},
    "swe": {"wrong tool"},
    "terminal": {"judged different"},
    "browsecomp": {"wrong tool", "wrong argument value", "different answer"},
}


@dataclass(frozen=True, slots=True)
class Judged:
    """A finished twin, and the judge that was at hand."""

    twin: Finished
    judge: JudgeServer


@pytest.fixture(scope="module", params=WHOLE, ids=lambda one: "/".join(one))
def judged(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Judged]:
    family, domain = request.param
    root = tmp_path_factory.mktemp("twin")
    with judge_server(opinion) as judge, pytest.MonkeyPatch.context() as patch:
        patch.setenv("PIVOTRL_JUDGE_ENDPOINT", judge.url)
        yield Judged(run_whole(root, family, domain, save_tiny_checkpoint(root / "hf", family)), judge)


def _profile(twin: Finished) -> list[dict[str, Any]]:
    return pq.read_table(twin.run / "profile" / "rollouts.parquet").to_pylist()


@pytest.mark.slow
def test_the_verifier_accepts_every_expert_and_judges_rollouts_in_each_of_its_ways(judged: Judged) -> None:
    twin = judged.twin
    rollouts = _profile(twin)
    assert len(rollouts) == 48 * 16
    assert {row["verdict"] for row in rollouts} == {"ok", "invalid"}, "nothing is the infrastructure's fault"
    assert {row["reason"] for row in rollouts if row["reward"] == 1} == ACCEPTED[twin.domain]
    assert {row["reason"] for row in rollouts if row["verdict"] == "ok" and row["reward"] == 0} >= REFUSED[twin.domain]
    assert read_json(twin.run / "profile" / "manifest.json")["summary"]["num_quarantined"] == 0


@pytest.mark.slow
def test_the_judge_is_asked_where_commands_differ_and_again_the_other_way_round_where_it_finds_them_the_same(judged: Judged) -> None:
    """Its answers decide: the profile holds both of them (above). After a first no the second answer could change nothing."""
    requests = judged.judge.requests
    assert bool(requests) is (judged.twin.domain == "terminal")
    assert all(first != second for first, second in map(shown, requests))
    same = {shown(body) for body in requests if opinion(body).text == SAME}
    assert same == {(second, first) for first, second in same}
    assert len(same) < len(set(map(shown, requests))) or not requests


@pytest.mark.slow
def test_a_step_is_made_of_pivots_that_the_published_rule_keeps(judged: Judged) -> None:
    summary = read_json(judged.twin.run / "select" / "manifest.json")["summary"]
    assert summary["by_reason"]["kept"] >= 4, "a step takes four different pivots"
    assert set(summary["by_reason"]) <= {"kept", "always succeeds", "always fails", "too easy"}


@pytest.mark.slow
def test_training_is_one_policy_behind_and_moves_the_policy(judged: Judged) -> None:
    steps = steps_of(judged.twin.run)
    assert [row["sync/policy_age_steps/max"] for row in steps] == [0] + [1] * 10
    has_signal = [row["rollout/group_zero_variance/frac"] < 1 for row in steps]
    assert [row["optim/grad_norm/mean"] > 0 for row in steps] == has_signal
    assert sum(has_signal) >= 8, "a tiny policy may fail all of a step's rollouts, seldom"
    assert all(row["data/non_finite/count"] == row["rollout/verifier_error/frac"] == 0 for row in steps)
    # bfloat16 sends a token near a tie to another expert now and then; on the mean of a step it hardly shows.
    assert max(row["objective/logprob_mismatch/mean"] for row in steps) < 0.05


@pytest.mark.slow
def test_pi_0_and_the_result_are_scored_on_the_same_turns_and_the_result_converts(judged: Judged, tmp_path: Path) -> None:
    twin = judged.twin
    held_out = read_json(twin.run / "profile" / "manifest.json")["summary"]["num_held_out"]
    suites = read_json(twin.run / "eval" / "scores.json")["suites"]
    scored = 4 * min(8, held_out)
    assert scored > 0
    assert {(row["name"], row["checkpoint"], row["n"]) for row in suites} == {("held_out", "reference", scored), ("held_out", "trained", scored)}
    assert scored_turns(twin.run) == scored_turns(twin.reference.parents[1])
    assert (twin.run / "report" / "index.html").is_file()
    trained = twin.run / "train" / "hf"
    assert verified_tensors(trained, tmp_path / "megatron", "megatron", config_dir=None) == len(load_file(trained / "model.safetensors"))
