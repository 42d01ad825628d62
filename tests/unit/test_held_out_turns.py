"""The held-out turns that an SFT baseline is scored on: those that a profile of the same data keeps, found without one."""

from __future__ import annotations

from pathlib import Path

from pivotrl import build, pipeline
from pivotrl.evaluation.suites import choose_held_out
from pivotrl.pivots.dataset import ProfileStore
from pivotrl.rundir import read_json
from pivotrl.types import Split
from pivotrl.verbs.held_out import held_out_tasks

TINY = Path(__file__).resolve().parents[1] / "golden" / "tiny_recipe"
# Some held-out turns are left out for each reason: message turns, prompts that are too long, those beyond max_candidates.
WORDS = ("sft.num_steps=2", "ingest.held_out_frac=0.5", "profile.max_candidates=40", "profile.expert_actions=calls", "render.max_prompt_tokens=54")
SUITE = "eval.suites=[{type: held_out, num_candidates: 4, num_samples: 1}]"
BASELINE = ("eval.of=sft", "eval.diagnostics=null", SUITE)


def test_a_baseline_is_scored_on_the_turns_that_a_profile_keeps(tmp_path: Path) -> None:
    pivotrl, baseline = (pipeline.load(TINY, [*WORDS, *more]) for more in ((), BASELINE))
    for stage in ("ingest", "sft", "profile", "select"):
        pipeline.run_stage(stage, pivotrl, tmp_path)
    profiled = [one for one in ProfileStore.open(tmp_path / "profile").iterate() if one.candidate.split is Split.HELD_OUT]
    kept = [one for one in profiled if one.profile.quarantine_reason is None]
    assert len(profiled) > len(kept) > 4

    reference = build.reference_checkpoint(pivotrl, tmp_path)
    after_profile, trajectory_of = held_out_tasks(pivotrl, tmp_path, reference)
    expected = choose_held_out(after_profile, 4)
    found, trajectory_of_baseline = held_out_tasks(baseline, tmp_path, reference)
    assert found == expected
    assert {task.candidate_id: trajectory_of_baseline[task.candidate_id] for task in found} == {
        task.candidate_id: trajectory_of[task.candidate_id] for task in expected
    }

    pipeline.run_stage("eval", baseline, tmp_path)
    rows = read_json(tmp_path / "eval" / "scores.json")["suites"]
    assert [(row["name"], row["checkpoint"], row["n"]) for row in rows] == [("held_out", "reference", 4), ("held_out", "trained", 4)]
