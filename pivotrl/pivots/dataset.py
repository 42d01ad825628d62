"""Profiles and pivots on disk: one Parquet schema each, typed records on both sides, streaming reads.

`profile` writes profile/profiles.parquet, `select` reads it and writes select/pivots.parquet, select/held_out.parquet and
select/decisions.parquet; train and eval open the last directory with `PivotStore`. Pivots carry the prompt's token ids, so
nothing downstream renders again. Knows neither engines nor rollouts: `profiling/tasks.py` turns pivots into tasks.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

from pivotrl.artifacts import Selection, read_artifact
from pivotrl.pivots.parquet import count_rows, read_rows, write_rows
from pivotrl.pivots.select import ProfiledTurn
from pivotrl.trajectories.store import decode_action, encode
from pivotrl.types import Action, Candidate, Domain, Pivot, Profile, Split, State, Trajectory

PROFILES = "profiles.parquet"
ROLLOUTS = "rollouts.parquet"
PIVOTS = "pivots.parquet"
HELD_OUT = "held_out.parquet"
DECISIONS = "decisions.parquet"
SELECTION = "selection.json"

_CANDIDATE_COLUMNS = {
    "candidate_id": "string",
    "trajectory_id": "string",
    "task_id": "string",
    "domain": "string",
    "message_index": "int32",
    "turn_index": "int32",
    "split": "string",
    "expert_action": "string",
}
PROFILE_COLUMNS = {
    **_CANDIDATE_COLUMNS,
    "prompt_token_ids": "list:int32",
    "num_prompt_tokens": "int32",
    "rewards": "list:float64",
    "num_samples": "int32",
    "successes": "int32",
    "mean_reward": "float64",
    "reward_variance": "float64",
    "num_truncated": "int32",
    "num_malformed": "int32",
    "quarantine_reason": "string",
}
"""profiles.parquet: the candidate, its prompt, and Eq. 4. `rewards` are the counted ones, so K is their number."""
PIVOT_COLUMNS = {
    "candidate_id": "string",
    "trajectory_id": "string",
    "message_index": "int32",
    "turn_index": "int32",
    "domain": "string",
    "prompt_token_ids": "list:int32",
    "expert_action": "string",
    "num_samples": "int32",
    "successes": "int32",
    "mean_reward": "float64",
}
"""pivots.parquet and held_out.parquet."""
_DECISION_COLUMNS = {"candidate_id": "string", "split": "string", "decision": "string"}
_TURN_COLUMNS = ("candidate_id", "domain", "turn_index", "split", "rewards", "quarantine_reason")


@dataclass(frozen=True, slots=True)
class ProfiledCandidate:
    """A candidate with its profile: one row of profiles.parquet."""

    candidate: Candidate
    profile: Profile


@dataclass(frozen=True, slots=True)
class ProfileStore:
    """A finished profile directory."""

    path: Path

    @staticmethod
    def open(profile_dir: Path) -> ProfileStore:
        """The profiles of a finished `profile` stage."""
        return ProfileStore(profile_dir / PROFILES)

    def __len__(self) -> int:
        return count_rows(self.path)

    def iterate(self, candidate_ids: Collection[str] | None = None) -> Iterator[ProfiledCandidate]:
        """Profiles in the order they were made, turns of one trajectory beside each other; only the named ones where given."""
        return map(
            profile_from_row, read_rows(self.path, tuple(PROFILE_COLUMNS), keep=None if candidate_ids is None else ("candidate_id", candidate_ids))
        )

    def turns(self) -> Iterator[tuple[Split, ProfiledTurn]]:
        """What selection reads, without prompts: a hundred times less memory than the profiles."""
        for row in read_rows(self.path, _TURN_COLUMNS):
            rewards_K = tuple(row["rewards"])
            yield (
                Split(row["split"]),
                ProfiledTurn(row["candidate_id"], Domain(row["domain"]), row["turn_index"], rewards_K, row["quarantine_reason"]),
            )


@dataclass(frozen=True, slots=True)
class PivotStore:
    """A finished select directory: what to train on, what to validate on, and which policy it is valid for."""

    pivots: tuple[Pivot, ...]
    held_out: tuple[Pivot, ...]
    """Profiled, not quarantined candidates of the held-out split, unselected: an unbiased sample of states."""
    provenance: Mapping[str, Any]
    """Hashes of policy, verifier, tokenizer and template, and the generation settings that profiled the set."""

    @staticmethod
    def open(select_dir: Path) -> PivotStore:
        """The pivots of a finished `select` stage."""
        return PivotStore(
            tuple(map(pivot_from_row, read_rows(select_dir / PIVOTS, tuple(PIVOT_COLUMNS)))),
            tuple(map(pivot_from_row, read_rows(select_dir / HELD_OUT, tuple(PIVOT_COLUMNS)))),
            read_artifact(select_dir / SELECTION, Selection)["provenance"],
        )


def write_pivots(path: Path, profiled: Iterable[ProfiledCandidate]) -> int:
    """Writes pivots.parquet or held_out.parquet from the kept profiles and returns how many."""
    return write_rows(path, PIVOT_COLUMNS, map(_pivot_row, profiled))


def write_decisions(path: Path, decisions: Iterable[tuple[str, Split, str]]) -> int:
    """Writes decisions.parquet: candidate id, split, and `kept` or the drop reason."""
    return write_rows(path, _DECISION_COLUMNS, (dict(zip(_DECISION_COLUMNS, decision, strict=True)) for decision in decisions))


def profile_row(profiled: ProfiledCandidate) -> dict[str, Any]:
    """A row of profiles.parquet, with mean and population variance (Eq. 4) computed exactly and rounded once."""
    candidate, profile = profiled.candidate, profiled.profile
    mean, variance = exact_moments(profile.rewards_K)
    return {
        "candidate_id": candidate.id,
        "trajectory_id": candidate.trajectory_id,
        # A lone surrogate, which UTF-8 cannot hold, becomes an escape; the task id only labels a cluster from here on.
        "task_id": candidate.task_id.encode("utf-8", "backslashreplace").decode(),
        "domain": candidate.domain.value,
        "message_index": candidate.message_index,
        "turn_index": candidate.turn_index,
        "split": candidate.split.value,
        "expert_action": action_text(candidate.expert_action),
        "prompt_token_ids": list(profile.prompt_token_ids),
        "num_prompt_tokens": len(profile.prompt_token_ids),
        "rewards": list(profile.rewards_K),
        "num_samples": profile.num_samples,
        "successes": profile.successes,
        "mean_reward": mean,
        "reward_variance": variance,
        "num_truncated": profile.num_truncated,
        "num_malformed": profile.num_malformed,
        "quarantine_reason": profile.quarantine_reason,
    }


def profile_from_row(row: Mapping[str, Any]) -> ProfiledCandidate:
    """The record of a row that `profile_row` made."""
    candidate = Candidate(
        id=row["candidate_id"],
        trajectory_id=row["trajectory_id"],
        task_id=row["task_id"],
        domain=Domain(row["domain"]),
        message_index=row["message_index"],
        turn_index=row["turn_index"],
        split=Split(row["split"]),
        expert_action=action_of_text(row["expert_action"]),
    )
    profile = Profile(
        candidate_id=row["candidate_id"],
        prompt_token_ids=tuple(row["prompt_token_ids"]),
        rewards_K=tuple(row["rewards"]),
        successes=row["successes"],
        num_truncated=row["num_truncated"],
        num_malformed=row["num_malformed"],
        quarantine_reason=row["quarantine_reason"],
    )
    return ProfiledCandidate(candidate, profile)


def pivot_from_row(row: Mapping[str, Any]) -> Pivot:
    """The pivot of a row of pivots.parquet or held_out.parquet."""
    return Pivot(
        candidate_id=row["candidate_id"],
        trajectory_id=row["trajectory_id"],
        message_index=row["message_index"],
        turn_index=row["turn_index"],
        domain=Domain(row["domain"]),
        prompt_token_ids=tuple(row["prompt_token_ids"]),
        expert_action=action_of_text(row["expert_action"]),
        num_samples=row["num_samples"],
        successes=row["successes"],
        mean_reward=row["mean_reward"],
    )


def pivot_state(trajectory: Trajectory, pivot: Pivot) -> State:
    """s_t of a pivot: what the expert saw, and the policy will see, before it acts.

    Raises:
        ValueError: where the pivot is of another trajectory.
    """
    if pivot.trajectory_id != trajectory.id:
        raise ValueError(f"pivot {pivot.candidate_id} belongs to trajectory {pivot.trajectory_id}, not to {trajectory.id}")
    return State(trajectory.messages[: pivot.message_index], trajectory.tools, trajectory.tool_origin)


def action_text(action: Action) -> str:
    """An action as one JSON object, arguments kept as the text that was written; valid UTF-8 even where the action is not.

    >>> from pivotrl.types import ParseOutcome, ToolCall
    >>> action = Action("", (ToolCall("find", '{"q": '),), None, ParseOutcome.MALFORMED)
    >>> action_of_text(action_text(action)) == action
    True
    """
    return encode(action).decode()


def action_of_text(text: str) -> Action:
    """The action that `action_text` wrote."""
    return decode_action(text.encode())


def exact_moments(rewards_K: tuple[float, ...]) -> tuple[float | None, float | None]:
    """Mean and population variance of Eq. 4, or None where no sample was counted.

    >>> exact_moments((1.0, 0.0, 0.0, 0.0))
    (0.25, 0.1875)
    """
    if not rewards_K:
        return None, None
    k = len(rewards_K)
    if all(reward in (0, 1) for reward in rewards_K):
        successes = sum(map(int, rewards_K))
        return successes / k, successes * (k - successes) / (k * k)
    exact = [Fraction(reward) for reward in rewards_K]
    mean = sum(exact, start=Fraction(0)) / k
    return float(mean), float(sum(((reward - mean) ** 2 for reward in exact), start=Fraction(0)) / k)


def _pivot_row(profiled: ProfiledCandidate) -> dict[str, Any]:
    row = profile_row(profiled)
    return {name: row[name] for name in PIVOT_COLUMNS}
