"""A small invented run directory: every stage's files as the real writers leave them, without a model.

The numbers are chosen, not sampled, so that tests can state what the report must show.
"""

from __future__ import annotations

from collections.abc import Sequence
from decimal import Decimal
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from pivotrl.config.schema import Eq5Rule
from pivotrl.observability.sinks import MetricSink
from pivotrl.pivots.candidates import split_of
from pivotrl.pivots.dataset import PROFILE_COLUMNS, PROFILES, ProfiledCandidate, profile_row
from pivotrl.pivots.parquet import write_rows
from pivotrl.profiling.selection import run_select
from pivotrl.rundir import Stage, write_json, write_jsonl
from pivotrl.trajectories.store import CANDIDATE_SCHEMA, CANDIDATES, TRAJECTORIES, TRAJECTORY_SCHEMA, candidate_columns, encode, trajectory_columns
from pivotrl.types import Action, Candidate, Domain, Message, Origin, Outcome, ParseOutcome, Profile, Role, Tool, ToolCall, ToolOrigin, Trajectory

HOSTILE_TEXT = "</pre><script>alert('from a completion')</script><img src=x onerror=alert(1)>"
TOOLS = (Tool("open_ticket", "Open a repair ticket", {"type": "object", "properties": {"device": {"type": "string"}}, "required": ["device"]}),)


def trajectory(number: int, *, num_turns: int = 3) -> Trajectory:
    """A repair desk's conversation with one call per turn; all trajectories differ from their first message on."""
    messages = [Message(Role.SYSTEM, "You run the repair desk."), Message(Role.USER, f"Device {number} hums.")]
    for turn in range(num_turns):
        call = ToolCall("open_ticket", f'{{"device": "{number}-{turn}"}}', f"call_{turn}")
        messages.append(Message(Role.ASSISTANT, "", (call,), origin=Origin.MODEL, parse=ParseOutcome.PARSED))
        messages.append(Message(Role.TOOL, f"ticket {number}{turn} opened", tool_call_id=f"call_{turn}", name="open_ticket"))
    return Trajectory(
        id=f"trajectory-{number}",
        source_format="invented",
        source_file="desk.jsonl",
        source_index=number,
        task_id=f"task-{number}",
        domain=Domain.CONVERSATIONAL,
        outcome=Outcome.SUCCESS,
        reward=1.0,
        messages=tuple(messages),
        tools=TOOLS,
        tool_origin=ToolOrigin.ROW,
    )


def candidates_of(source: Trajectory, *, held_out_frac: float) -> list[Candidate]:
    """Every assistant turn of an invented trajectory, with an id that can be read."""
    turns = [index for index, message in enumerate(source.messages) if message.role is Role.ASSISTANT]
    return [
        Candidate(
            id=f"{source.id}-turn-{turn}",
            trajectory_id=source.id,
            task_id=source.task_id,
            domain=source.domain,
            message_index=index,
            turn_index=turn,
            split=split_of(source.task_id, held_out_frac=held_out_frac, run_seed=0),
            expert_action=Action(source.messages[index].content, source.messages[index].tool_calls, None, ParseOutcome.PARSED),
        )
        for turn, index in enumerate(turns)
    ]


def write_ingest(directory: Path, trajectories: Sequence[Trajectory], *, held_out_frac: float = 0.0) -> list[Candidate]:
    """trajectories.parquet and candidates.parquet in `directory`, as ingest leaves them; returns the candidates."""
    directory.mkdir(parents=True, exist_ok=True)
    candidates = [candidate for one in trajectories for candidate in candidates_of(one, held_out_frac=held_out_frac)]
    columns = trajectory_columns(trajectories, [encode(one.messages) for one in trajectories])
    pq.write_table(pa.table(columns, schema=TRAJECTORY_SCHEMA), directory / TRAJECTORIES)
    pq.write_table(
        pa.table(candidate_columns(candidates, [encode(one.expert_action) for one in candidates]), schema=CANDIDATE_SCHEMA), directory / CANDIDATES
    )
    return candidates


def profiled(candidate: Candidate, successes: int, k: int, *, quarantine_reason: str | None = None) -> ProfiledCandidate:
    """A candidate with a 0/1 profile."""
    rewards_K = (1.0,) * successes + (0.0,) * (k - successes)
    return ProfiledCandidate(candidate, Profile(candidate.id, (1, 2, 3), rewards_K, successes, 0, 0, quarantine_reason))


def write_profile(run: Path, profiles: Sequence[ProfiledCandidate]) -> None:
    """A finished profile stage without rollouts."""
    stage = Stage.open(run, "profile", config={}, inputs={"ingest": "abc"}, seed=7)
    write_rows(stage.path / PROFILES, PROFILE_COLUMNS, map(profile_row, profiles))
    share = {"value": 0.25, "low": 0.2, "high": 0.31, "n": 96}
    summary = {
        "num_candidates": len(profiles),
        "num_held_out": 0,
        "num_profiled": sum(one.profile.quarantine_reason is None for one in profiles),
        "quarantine": {"prompt too long": sum(one.profile.quarantine_reason is not None for one in profiles)},
        "malformed_frac": share,
        "cost": {"turns": 96, "prompt_tokens": 1_200, "completion_tokens": 4_321},
        "provenance": {"policy": "p0licyhash", "sampling": {"temperature": 1.0}},
    }
    stage.finish(outputs=[PROFILES], summary=summary)


def write_train(run: Path, pivot_id: str, *, num_steps: int = 5) -> None:
    """A finished train stage: rising reward, one group of four rollouts per step, hostile text in the worst of them."""
    stage = Stage.open(run, "train", config={"num_steps": num_steps}, inputs={}, seed=7)
    rollouts = []
    with MetricSink(stage.path) as sink:
        for step in range(num_steps):
            sink.write(
                step,
                {
                    "rollout/reward/mean": 0.2 + 0.1 * step,
                    "rollout/reward/std": 0.4 - 0.05 * step,
                    "rollout/group_zero_variance/frac": 0.1 * step,
                    "rollout/malformed/frac": 0.02,
                    "rollout/response_tokens/sum": 100,
                    "rollout/prompt_tokens/sum": 30,
                    "rollout/wasted_tokens/sum": 10 * step,
                    "objective/kl_reference/mean": float("nan") if step == 2 else 0.001 * step,
                    "perf/env_turns/sum": 4 * (step + 1),
                },
            )
            for index, reward in enumerate((0.0, 1.0, 1.0, 0.0)):
                text = HOSTILE_TEXT if index == 0 else f"answer {index} of step {step}"
                reason = "wrong tool" if reward == 0 else "same call"
                rollouts.append(
                    {"step": step, "pivot_id": pivot_id, "sample_index": index, "text": text, "reward": reward}
                    | {"verdict": "ok", "reason": reason, "finish_reason": "stop", "num_tokens": 25}
                )
    write_jsonl(stage.path / "rollouts.jsonl", rollouts)
    write_jsonl(stage.path / "validation.jsonl", [{"step": s, "value": 0.3 + 0.1 * s, "low": 0.2, "high": 0.8, "n": 40} for s in (0, 4)])
    stage.finish(outputs=["metrics.jsonl"], summary={})


def write_whole_run(run: Path) -> None:
    """All stages that the report reads: 4 trajectories, 12 candidates, 11 usable profiles, 4 informative, 3 pivots."""
    candidates = write_ingest(run / "ingest", [trajectory(number) for number in range(4)])
    Stage.open(run, "ingest", config={}, inputs={}, seed=7).finish(outputs=[TRAJECTORIES, CANDIDATES], summary={})
    successes = [0, 0, 0, 0, 0, 1, 2, 2, 7, 8, 8]
    profiles = [profiled(candidate, count, 8) for candidate, count in zip(candidates, successes, strict=False)]
    write_profile(run, [*profiles, profiled(candidates[-1], 0, 8, quarantine_reason="prompt too long")])
    select = Stage.open(run, "select", config={}, inputs={}, seed=7)
    run_select(select, run / "profile", Eq5Rule(rule="eq5", lambda_diff=Decimal("0.6")), run_seed=7)
    write_train(run, candidates[6].id)
    scores = [
        {"name": "held_out", "checkpoint": "reference", "score": 0.55, "n": 120, "low": 0.47, "high": 0.63, "seeds": [7]},
        {"name": "held_out", "checkpoint": "trained", "score": 0.93, "n": 120, "low": 0.88, "high": 0.97, "seeds": [7]},
    ]
    scores[1]["detail"] = {"calls": {"score": 0.9, "low": 0.8, "high": 0.95, "n": 60}}
    difference = {"name": "held_out", "difference": 0.38, "low": 0.29, "high": 0.46, "n": 120, "wins": 50, "losses": 4, "sign_test_p": 1e-9}
    parts = {"format": {"value": 0.08, "low": 0.03, "high": 0.12, "n": 30}, "decision": {"value": 0.3, "low": 0.22, "high": 0.39, "n": 30}}
    difference["gain"] = {**parts, "well_formed_before": 0.875, "well_formed_after": 0.99, "num_one_sided": 2}
    (run / "eval").mkdir()
    write_json(run / "eval" / "scores.json", {"suites": scores, "differences": [difference], "turns": 240})
