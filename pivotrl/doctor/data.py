"""The trajectories: every row of every file read and converted as `ingest` would, without writing anything.

Gives the sample of expert turns that rendering, parsing and verification are checked on. Memory: a few bytes per turn, and the sample.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from pivotrl.config.schema import IngestConfig
from pivotrl.doctor.findings import Findings
from pivotrl.doctor.rows import Rows, Settings, rows_of, usual_processes
from pivotrl.progress import progress_bar
from pivotrl.trajectories import registry
from pivotrl.trajectories.audit import FormatCounts
from pivotrl.trajectories.decontaminate import DecontaminationList
from pivotrl.trajectories.dedupe import IdSet
from pivotrl.trajectories.files import discover
from pivotrl.trajectories.plan import plan_tasks
from pivotrl.trajectories.streams import MB
from pivotrl.trajectories.tools import load_tools
from pivotrl.types import Candidate, Split, Tool, Trajectory

TOLERATED_FRAC = 0.05
"""Share of rows or sampled turns that may be unusable: below it they are set apart and counted, so a finding is a warning; above, an error."""
_SHOWN_ROWS = 5


@dataclass(slots=True)
class Seen:
    """What was read."""

    sample: list[tuple[Trajectory, Candidate]] = field(default_factory=list[tuple[Trajectory, Candidate]])
    """Expert turns of both splits, the same ones at every call."""
    num_rows: int = 0
    num_trajectories: int = 0
    candidates: Counter[str] = field(default_factory=Counter[str])
    """By split."""


def check_data(
    config: IngestConfig, paths: Sequence[Path], findings: Findings, *, run_seed: int, sample_size: int, num_processes: int | None = None
) -> Seen:
    """Reads everything.

    Args:
        config: `tools` and `decontamination` are paths whose placeholders are already replaced.
        paths: files and directories, which exist.
        num_processes: that read large data; None: `usual_processes`. They change nothing that is found.
    """
    reader = _Reader(config, findings, run_seed, sample_size, num_processes or usual_processes())
    with findings.refused_by("data-settings", "ingest"):
        reader.open()
        reader.read(paths)
    reader.conclude(paths)
    return reader.seen


class _Reader:
    """One pass over all rows."""

    def __init__(self, config: IngestConfig, findings: Findings, run_seed: int, sample_size: int, num_processes: int) -> None:
        self._config, self._findings, self._run_seed, self._sample_size = config, findings, run_seed, sample_size
        self._num_processes = num_processes
        self.seen = Seen()
        self._tools: tuple[Tool, ...] | None = None
        self._broken: list[str] = []
        self._num_broken, self._num_duplicates, self._first_duplicate = 0, 0, ""
        self._dropped: Counter[str] = Counter()
        self._ids, self._candidate_ids, self._train_states = IdSet(), IdSet(), IdSet()
        self._held_out_states: dict[int, str] = {}
        self._unoffered: Counter[str] = Counter()
        self._first_unoffered: dict[str, str] = {}
        self._chosen: list[tuple[int, int, int, Trajectory, Candidate]] = []

    def open(self) -> None:
        """Raises UserError for an unknown format or a list of tools or tasks that cannot be read."""
        if self._config.format != registry.AUTO:
            registry.adapter(self._config.format)
        if self._config.tools is not None:
            self._tools = load_tools(Path(self._config.tools))
        if self._config.decontamination is not None:
            DecontaminationList.load(Path(self._config.decontamination))

    def read(self, paths: Sequence[Path]) -> None:
        files, unread = discover(paths).files, FormatCounts()
        tasks = plan_tasks(files, self._config.format, unread)
        self.seen.num_rows += unread.rows
        for entry in unread.listed:
            self._left_out(f"{entry['file']}: {entry['reason']}")
        self._num_broken += unread.rows - len(unread.listed)
        settings = Settings(self._config, self._tools, self._run_seed, self._sample_size, self._num_processes)
        with progress_bar("data", sum(task.num_bytes for task in tasks) / MB, "MB") as bar:
            for number, (rows, drawn) in enumerate(rows_of(tasks, settings, bar)):
                kept = self._take(rows)
                self._chosen += [(draw, number, row, trajectory, candidate) for draw, row, trajectory, candidate in drawn if row in kept]
                self._keep_smallest()

    def _take(self, rows: Rows) -> set[int]:
        """Counts the rows of one task; the numbers of those that count: no copies of earlier ones, no outcome that is left out."""
        self.seen.num_rows += rows.num_rows
        for _, place in rows.broken:
            self._left_out(place)
        is_new_R = self._ids.add_keys(rows.ids_R)
        self.seen.num_trajectories += int(is_new_R.sum())
        copies = np.flatnonzero(~is_new_R)
        if len(copies):
            self._num_duplicates += len(copies)
            self._first_duplicate = self._first_duplicate or rows.places_R[int(copies[0])]
        copied = set(rows.numbers_R[copies].tolist())
        self._dropped.update(reason for number, reason in rows.dropped if number not in copied)
        is_kept_R = is_new_R & rows.is_counted_R
        self._take_turns(rows, is_kept_R)
        kept = set(rows.numbers_R[is_kept_R].tolist())
        places = dict(zip(rows.numbers_R.tolist(), rows.places_R, strict=True)) if rows.unoffered else {}
        for number, name, turn in rows.unoffered:
            if number in kept:
                self._unoffered[name] += 1
                self._first_unoffered.setdefault(name, f"{places[number]}, turn {turn}")
        return kept

    def _take_turns(self, rows: Rows, is_kept_R: NDArray[np.bool_]) -> None:
        is_kept_T = is_kept_R[rows.rows_T]
        rows_T, turns_T, states_T = rows.rows_T[is_kept_T], rows.turns_T[is_kept_T], rows.states_T[is_kept_T]
        is_held_out_T = rows.is_held_out_R[rows_T]
        is_new_T = self._candidate_ids.add_keys(rows.ids_T[is_kept_T])
        for split, is_its_R, is_its_T in (
            (Split.TRAIN, ~rows.is_held_out_R, ~is_held_out_T),
            (Split.HELD_OUT, rows.is_held_out_R, is_held_out_T),
        ):
            if (is_its_R & is_kept_R).any():
                self.seen.candidates[split.value] += int((is_new_T & is_its_T).sum())
        self._train_states.add_keys(states_T[~is_held_out_T])
        for position in np.flatnonzero(is_held_out_T).tolist():
            state = int(states_T[position])
            if state not in self._held_out_states:
                self._held_out_states[state] = f"{rows.places_R[int(rows_T[position])]}, turn {turns_T[position]}"

    def _keep_smallest(self) -> None:
        """Of the turns drawn so far those with the smallest draws, each once, as the first row has it."""
        first: dict[str, tuple[int, int, int, Trajectory, Candidate]] = {}
        for entry in sorted(self._chosen, key=lambda one: one[:3]):
            first.setdefault(entry[-1].id, entry)
        self._chosen = list(first.values())[: self._sample_size]

    def _left_out(self, place: str) -> None:
        self._num_broken += 1
        if len(self._broken) < _SHOWN_ROWS:
            self._broken.append(place)

    def conclude(self, paths: Sequence[Path]) -> None:
        """Findings about the whole."""
        seen, findings = self.seen, self._findings
        seen.sample = [(trajectory, candidate) for *_, trajectory, candidate in reversed(self._chosen)]
        findings.figures |= {"rows": seen.num_rows, "trajectories": seen.num_trajectories, "candidates": dict(seen.candidates)}
        if self._broken:
            report = findings.error if self._num_broken > TOLERATED_FRAC * seen.num_rows else findings.warn
            report(
                "data-rows",
                f"{self._num_broken:,} of {seen.num_rows:,} rows or files cannot be read; {'; '.join(self._broken)}",
                where=self._broken[0].split(": ", 1)[0],
                rule="every row is a trajectory of a known format; ingest sets the others apart and goes on",
                fix="fetch or write the file again, name ingest.format, or leave the rows out knowingly",
            )
        if not seen.candidates.total():
            reasons = ", ".join(f"{reason} ({count:,})" for reason, count in self._dropped.most_common(3))
            findings.error(
                "data-empty",
                f"{seen.num_rows:,} rows give no expert turn{f': {reasons}' if reasons else ''}",
                where=", ".join(map(str, paths[:3])),
                rule="there must be something to learn from",
                fix="correct ingest.paths, ingest.format or ingest.outcomes",
            )
        if self._num_duplicates:
            findings.warn(
                "data-duplicates",
                f"{self._num_duplicates:,} trajectories are exact copies of earlier ones",
                where=self._first_duplicate,
                rule="ingest keeps the first of equal trajectories",
                fix="nothing to do if that is known; else name each file once",
            )
        for name, count in self._unoffered.most_common(_SHOWN_ROWS):
            findings.error(
                "tool-missing",
                f"the expert calls {name!r} on {count:,} turns whose tools do not include it",
                where=self._first_unoffered[name],
                rule="a policy that is not shown a tool cannot learn to call it",
                fix="give the tool list of the harness as ingest.tools, or correct the rows' tools",
            )
        self._check_leak()

    def _check_leak(self) -> None:
        held_out = np.fromiter(self._held_out_states, np.uint64, len(self._held_out_states))
        # Whatever is not new is in the set; asking twice about one state is not possible, a dict has it once.
        leaked = held_out[~self._train_states.add_keys(held_out)].tolist()
        if not leaked:
            return
        report = self._findings.error if len(leaked) > TOLERATED_FRAC * len(held_out) else self._findings.warn
        report(
            "leak",
            f"{len(leaked):,} of {len(held_out):,} held-out states are training states too",
            where=self._held_out_states[leaked[0]],
            rule="held-out scores must come from states that training never saw; the split is by task id",
            fix="give the rows of one task the same task id, or drop the copies",
        )
