"""Work units of the profile stage: which candidates, in which order, one JSONL file per unit, merged to Parquet at the end.

A unit is written atomically or not at all, so a killed worker redoes at most one. Candidates keep the order of the
trajectories' turns, in a unit and from unit to unit: each prompt extends the one before, and an engine's prefix cache holds it.
The merged files hold the units' rows in order; profiles.parquet is written last and its presence means that the units are no
longer needed.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import batched
from pathlib import Path
from typing import Any

from pivotrl.artifacts import UnitRow, read_artifact_lines
from pivotrl.errors import InfraLimitError
from pivotrl.identity import derive_seed
from pivotrl.pivots.dataset import PROFILE_COLUMNS, PROFILES, ROLLOUTS, action_text, profile_row
from pivotrl.pivots.parquet import write_rows
from pivotrl.profiling.measure import Measured, ProfileSample, ProfileSettings
from pivotrl.profiling.shards import WHOLE, Shard
from pivotrl.rundir import read_json, write_json
from pivotrl.trajectories.store import CandidateStore
from pivotrl.types import Candidate, Split, VerdictKind

UNITS = "units"
# Beyond it a unit is no measurement that some failures thinned out, but an outage.
_MAX_UNIT_INFRA_FRAC = 0.5

ROLLOUT_COLUMNS = {
    "candidate_id": "string",
    "sample_index": "int32",
    "attempt": "int32",
    "seed": "int64",
    "counted_reward": "float64",
    "reward": "float64",
    "verdict": "string",
    "reason": "string",
    "finish_reason": "string",
    "policy_version": "int32",
    "parse": "string",
    "num_tokens": "int32",
    "token_ids": "list:int32",
    "action": "string",
}
"""rollouts.parquet: every completion that was paid for. `counted_reward` is null where the sample left the statistics."""


def unit_path(stage_dir: Path, index: int) -> Path:
    """profile/units/NNNNNN.jsonl."""
    return stage_dir / UNITS / f"{index:06d}.jsonl"


def locks_path(stage_dir: Path) -> Path:
    """The file of the units' locks; goes with the units."""
    return stage_dir / UNITS / ".locks"


class Work:
    """The candidates that the recipe asks for, cut into units."""

    def __init__(self, candidates: CandidateStore, settings: ProfileSettings) -> None:
        self._candidates, self._settings = candidates, settings

    def units(self, numbers: Collection[int] | None = None) -> Iterator[tuple[int, tuple[Candidate, ...]]]:
        """Units with their numbers, in order; only the named ones where given."""
        chosen = choose(self._eligible(), self._settings.profile.max_candidates, run_seed=self._settings.run_seed)
        units = enumerate(batched(chosen, self._settings.profile.unit_candidates))
        return ((number, unit) for number, unit in units if numbers is None or number in numbers)

    def numbers(self, shard: Shard) -> frozenset[int]:
        """The units of one shard. Costs a pass over the candidates unless the shard is everything."""
        return frozenset(range(self.num_units)) if shard == WHOLE else shard.units([trajectory_id for _, trajectory_id in self._firsts])

    def drawn(self, num_candidates: int, purpose: str) -> frozenset[int]:
        """So many whole units that they hold `num_candidates`, drawn by the hash of their first candidate: a sample of the stage's real work."""
        order = sorted((derive_seed(self._settings.run_seed, "profile", purpose, first), number) for number, (first, _) in enumerate(self._firsts))
        return frozenset(number for _, number in order[: -(-num_candidates // self._settings.profile.unit_candidates)])

    def num_candidates(self, numbers: Collection[int]) -> int:
        """Candidates in the named units: all are full but the last of the stage."""
        size, last = self._settings.profile.unit_candidates, self.num_units - 1
        return len(numbers) * size - (self.num_units * size - self._num_chosen if last in numbers else 0)

    @property
    def num_units(self) -> int:
        return -(-self._num_chosen // self._settings.profile.unit_candidates)

    @property
    def num_not_asked_for(self) -> int:
        """Candidates that `profile.expert_actions` leaves out."""
        return len(self._candidates) - self._num_eligible

    @property
    def _num_chosen(self) -> int:
        maximum = self._settings.profile.max_candidates
        return self._num_eligible if maximum is None else min(maximum, self._num_eligible)

    @cached_property
    def _firsts(self) -> list[tuple[str, str]]:
        """Candidate and trajectory that each unit begins with."""
        return [(unit[0].id, unit[0].trajectory_id) for _, unit in self.units()]

    @cached_property
    def _num_eligible(self) -> int:
        """Costs a pass over the candidates only where the recipe leaves some out."""
        is_all = self._settings.profile.expert_actions == "all" and self._settings.with_held_out
        return len(self._candidates) if is_all else sum(1 for _ in self._eligible())

    def _eligible(self) -> Iterator[Candidate]:
        wants_calls = self._settings.profile.expert_actions == "calls"
        return (
            candidate
            for candidate in self._candidates.iterate()
            if (candidate.expert_action.tool_calls or not wants_calls) and (self._settings.with_held_out or candidate.split is Split.TRAIN)
        )


def choose(candidates: Iterable[Candidate], max_candidates: int | None, *, run_seed: int) -> Iterator[Candidate]:
    """The candidates to profile, in the order given, which keeps turns of one trajectory (a shared prefix) together.

    With `max_candidates`, those first in hash order: the choice depends neither on file order nor on the split, and a
    larger maximum contains a smaller one. Memory grows with the maximum, not with the number of candidates.
    """
    if max_candidates is None:
        return iter(candidates)
    hashed = ((derive_seed(run_seed, "profile", "choose", candidate.id), position, candidate) for position, candidate in enumerate(candidates))
    chosen = heapq.nsmallest(max_candidates, hashed, key=lambda entry: entry[:2])
    return (candidate for _, _, candidate in sorted(chosen, key=lambda entry: entry[1]))


def unit_rows(measured: Iterable[Measured]) -> list[dict[str, Any]]:
    """The rows of one unit file: a profile with all its completions."""
    return [
        {
            "profile": profile_row(one.profiled),
            "rollouts": [_rollout_row(sample) for sample in one.samples],
            "expert_was_infra": one.expert_was_infra,
        }
        for one in measured
    ]


def merge(stage_dir: Path, num_units: int) -> None:
    """Writes rollouts.parquet, then profiles.parquet, from all units."""
    paths = [unit_path(stage_dir, index) for index in range(num_units)]

    def rows() -> Iterator[UnitRow]:
        return (row for path in paths for row in read_artifact_lines(path, UnitRow))

    write_rows(stage_dir / ROLLOUTS, ROLLOUT_COLUMNS, (rollout for row in rows() for rollout in row["rollouts"]))
    write_rows(stage_dir / PROFILES, PROFILE_COLUMNS, (row["profile"] for row in rows()))


def add_timing(stage_dir: Path, shard: Shard, timing: Mapping[str, float]) -> None:
    """Books what a worker took, beside the units; calls of one shard add up."""
    path, total = stage_dir / UNITS / f".timing-{shard.index}-of-{shard.count}.json", Counter[str](timing)
    total.update(read_json(path) if path.exists() else {})
    write_json(path, total)


def total_timing(stage_dir: Path) -> dict[str, float]:
    """The sum over all workers."""
    total = Counter[str]()
    for path in sorted((stage_dir / UNITS).glob(".timing-*.json")):
        total.update(read_json(path))
    return dict(total)


@dataclass(slots=True)
class Ledger:
    """What the stage has paid so far, and how much of it the infrastructure spoiled.

    An expert that could not be judged weighs as the K samples that were not drawn for it: a stage must not lose half its rows unnoticed.
    """

    num_samples: int
    """K."""
    turns: int = 0
    tokens: int = 0
    verdicts: int = 0
    infra_verdicts: int = 0

    def add(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Counts the rows of one unit."""
        for row in rows:
            rollouts = row["rollouts"]
            self.turns += len(rollouts)
            self.tokens += sum(rollout["num_tokens"] for rollout in rollouts)
            self.verdicts += len(rollouts)
            self.infra_verdicts += sum(rollout["verdict"] == VerdictKind.INFRA for rollout in rollouts)
            if row["expert_was_infra"]:
                self.verdicts += self.num_samples
                self.infra_verdicts += self.num_samples

    def check(self, max_infra_frac: float) -> None:
        """Stops the stage where the infrastructure spoils too much.

        Raises:
            InfraLimitError: where more than `max_infra_frac` of all verdicts are infra.
        """
        if self.infra_verdicts > max_infra_frac * self.verdicts:
            raise InfraLimitError(
                f"{self.infra_verdicts} of {self.verdicts} verdicts of the profile are the infrastructure's fault; "
                f"profile.max_infra_frac allows {max_infra_frac:g}; repair the engine or the verifier and run the same command to resume"
            )

    def check_unit(self, rows: Sequence[Mapping[str, Any]], max_infra_frac: float) -> None:
        """Stops the stage at an outage that the share over all units would notice only after many lost rows.

        Raises:
            InfraLimitError: where more than half of one unit's verdicts (or `max_infra_frac`, if that is more) are infra.
        """
        unit = Ledger(self.num_samples)
        unit.add(rows)
        if unit.infra_verdicts > max(max_infra_frac, _MAX_UNIT_INFRA_FRAC) * unit.verdicts:
            raise InfraLimitError(
                f"{unit.infra_verdicts} of {unit.verdicts} verdicts of one unit of the profile are the infrastructure's fault, more than half; "
                "repair the engine or the verifier and run the same command to resume"
            )

    @property
    def note(self) -> str:
        """Cost so far, for the progress line."""
        return f"{self.turns:,} turns, {self.tokens:,} tokens"


def _rollout_row(sample: ProfileSample) -> dict[str, Any]:
    rollout = sample.rollout
    return {
        "candidate_id": rollout.candidate_id,
        "sample_index": rollout.sample_index,
        "attempt": sample.attempt,
        "seed": rollout.seed,
        "counted_reward": sample.counted_reward,
        "reward": rollout.verdict.reward,
        "verdict": rollout.verdict.kind.value,
        "reason": rollout.verdict.reason,
        "finish_reason": rollout.completion.finish_reason.value,
        "policy_version": rollout.completion.policy_version,
        "parse": rollout.action.parse.value,
        "num_tokens": len(rollout.completion.token_ids),
        "token_ids": list(rollout.completion.token_ids),
        "action": action_text(rollout.action),
    }
