"""Which pivots a step learns from: the set that `select` made, and those that profiling again with a later policy made.

Set 0 is RUN/profile and RUN/select. A later one is RUN/pivot_sets/<step>/ with the same two stage directories (or declined.json,
where the policy left too few pivots), in force from that step until the next. A step's set is a function of these
directories and of the step, so a resumed run learns from the same ones; sets of steps that a resumed run has not reached yet
belong to a lost future and are removed. One writer, the process that trains (or `pivotrl reprofile` while nothing trains).

With `train.max_policy_age: 1` a round is sampled while the one before is learned from. What is due after step c is then in force from the round
after the one that c begins: the same policy, that of the checkpoint of step c, profiles again in both cases.
"""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from pivotrl.config.reprofile import ReprofileConfig
from pivotrl.errors import UserError
from pivotrl.rollouts.local import LocalTask
from pivotrl.rundir import Stage, write_json

PIVOT_SETS = "pivot_sets"
DECLINED = "declined.json"
FIRST_SET = "0"


@dataclass(frozen=True, slots=True)
class PivotSet:
    """Pivots with the step from which on they are learned from."""

    name: str
    """`FIRST_SET`, or the name of the directory: the step, eight digits."""
    from_step: int
    tasks: tuple[LocalTask, ...]


class PivotSets:
    """All sets of one run.

    Args:
        root: RUN/pivot_sets; need not exist.
        first: the pivots of RUN/select.
        load: a finished select directory to its pivots.
        make: (directory of the set, step, policy hash, reason) profiles and selects again with the policy that the engine holds.
        reason: why to profile again at (step, since when the set in force has been), or None.
        min_pivots: sets with fewer are declined.
        sampled_ahead: optimizer steps between the policy that samples a round and the round's own step; 0 where they are the same.
    """

    def __init__(
        self,
        root: Path,
        first: Sequence[LocalTask],
        *,
        load: Callable[[Path], Sequence[LocalTask]],
        make: Callable[[Path, int, str, str], None],
        reason: Callable[[int, int], str | None],
        min_pivots: int,
        sampled_ahead: int = 0,
    ) -> None:
        self._root, self._load, self._make, self._reason, self._min_pivots = root, load, make, reason, min_pivots
        self._sampled_ahead = sampled_ahead
        self._first = PivotSet(FIRST_SET, 0, tuple(first))
        # Later sets; one thread samples from a set while another learns from the one before.
        self._held: dict[int, PivotSet] = {}
        self._holding = threading.Lock()
        self._reached: int | None = None
        self._policy_hash = ""

    def published(self, policy_hash: str) -> None:
        """Notes the policy that the engine holds from now on."""
        self._policy_hash = policy_hash

    def at(self, step: int) -> PivotSet:
        """The set to sample a step's round from, made first where the recipe asks for it; steps are asked for in order."""
        if step != self._reached:
            if self._reached is None:
                remove_after(self._root, step)
            since = max(self._attempts_until(step), default=0)
            if step not in attempts(self._root) and (reason := self._reason(step - self._sampled_ahead, since)) is not None:
                self.remake(step, reason)
            self._reached = step
        return self.in_force(step)

    def in_force(self, step: int) -> PivotSet:
        """The set of a step whose round was sampled; makes none."""
        newest = max((start for start in self._attempts_until(step) if not (set_dir(self._root, start) / DECLINED).exists()), default=0)
        if newest == self._first.from_step:
            return self._first
        with self._holding:
            if newest not in self._held:
                directory = set_dir(self._root, newest)
                self._held[newest] = PivotSet(directory.name, newest, tuple(self._load(directory / "select")))
                self._held = {start: self._held[start] for start in sorted(self._held)[-2:]}
            return self._held[newest]

    def remake(self, step: int, reason: str) -> None:
        """Makes the set of a step with the published policy, or declines it where too few pivots are left."""
        directory = set_dir(self._root, step)
        try:
            self._make(directory, step, self._policy_hash, reason)
            num_pivots = len(self._load(directory / "select"))
            if num_pivots < self._min_pivots:
                raise UserError(f"{num_pivots} pivots are left", rule=f"a step takes {self._min_pivots}", fix="")
        except UserError as error:
            # A run whose signal is spent goes on with the pivots it has; only select knows that none is left.
            if not Stage.is_done(directory, "profile"):
                raise
            write_json(directory / DECLINED, {"reason": reason, "why": error.problem})

    def _attempts_until(self, step: int) -> list[int]:
        return [start for start in attempts(self._root) if start <= step]


def set_dir(root: Path, step: int) -> Path:
    """RUN/pivot_sets/<step>."""
    return root / f"{step:08d}"


def attempts(root: Path) -> list[int]:
    """Steps at which profiling again was finished, declined sets included, in order."""
    return sorted(int(path.name) for path in _directories(root) if Stage.is_done(path, "select") or (path / DECLINED).exists())


def remove_after(root: Path, step: int) -> None:
    """Removes finished and unfinished sets of later steps."""
    for path in _directories(root):
        if int(path.name) > step:
            shutil.rmtree(path)


def _directories(root: Path) -> list[Path]:
    """One per step; what else lies there (a file of a desktop's or a file system's) is not ours."""
    return [path for path in root.iterdir() if path.name.isdecimal() and path.is_dir()] if root.is_dir() else []


def spent_reason(
    config: ReprofileConfig, metrics: Sequence[Mapping[str, Any]], validations: Sequence[Mapping[str, Any]], *, since: int, step: int
) -> str | None:
    """Why the set in force since a step has no more to teach at another, or None: a function of what the run wrote until then.

    Args:
        metrics: rows of metrics.jsonl.
        validations: rows of validation.jsonl.
    """
    if config.every_steps is not None and step - since >= config.every_steps:
        return f"{step - since} steps, due every {config.every_steps}"
    rounds = [row for row in metrics if since <= row["step"] < step and row.get("rollout/reward/std") is not None]
    size = config.window_rounds
    if len(rounds) >= 2 * size:
        for name, share, value in (
            ("reward std", config.reward_std_frac, lambda row: row["rollout/reward/std"]),
            ("informative share", config.informative_frac, lambda row: 1 - row["rollout/group_zero_variance/frac"]),
        ):
            start, now = (sum(map(value, part)) / size for part in (rounds[:size], rounds[-size:]))
            if share is not None and now < share * start:
                return f"{name} {now:.4g}, below {share:g} of {start:.4g}"
    means = [row["value"] for row in validations if since <= row["step"] <= step]
    if config.saturated_validations is not None and means:
        best = max(range(len(means)), key=lambda index: (means[index], -index))
        if len(means) - 1 - best >= config.saturated_validations:
            return f"no new best in {len(means) - 1 - best} validations"
    return None


def is_due(step: int, *, every: int, updates_per_rollout: int) -> bool:
    """Whether a checkpoint was taken at the end of the round before."""
    return step > 0 and step // every > (step - updates_per_rollout) // every


@dataclass(frozen=True, slots=True)
class Lineage:
    """One set of a run and what was learned from it."""

    name: str
    from_step: int
    num_steps: int
    """Rounds in the ledger that learned from it."""
    to_step: int | None
    """First step of the next set, or None."""


def lineage(starts: Mapping[str, int], ledger: Sequence[Mapping[str, Any]]) -> list[Lineage]:
    """The sets in order, with the steps that the ledger says learned from them.

    Args:
        starts: set name to its first step, in order.
        ledger: rows of ledger.jsonl.
    """
    steps: dict[str, set[int]] = {name: set() for name in starts}
    for row in ledger:
        steps[row.get("pivot_set", FIRST_SET)].add(row["step"])
    ends = [end for _, end in pairwise(starts.values())] + [None]
    return [Lineage(name, start, len(steps[name]), end) for (name, start), end in zip(starts.items(), ends, strict=True)]
