"""The trajectories: every row of every file read and converted as `ingest` would, without writing anything.

Gives the sample of expert turns that rendering, parsing and verification are checked on. Memory: a few bytes per turn, and the sample.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from pivotrl.config.schema import IngestConfig
from pivotrl.doctor.findings import Findings
from pivotrl.doctor.rows import Row, Settings, rows_of, usual_processes
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
        self._held_out_states: dict[str, str] = {}
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

    def _take(self, rows: Sequence[Row]) -> set[int]:
        """Counts the rows of one task; the numbers of those that are no copies of earlier ones."""
        self.seen.num_rows += len(rows)
        readable: list[Row] = []
        for row in rows:
            if row.broken:
                self._left_out(row.broken)
            elif not row.trajectory_id:
                self._dropped[row.dropped] += 1
            else:
                readable.append(row)
        kept: set[int] = set()
        for row, is_new in zip(readable, self._ids.add([row.trajectory_id for row in readable]), strict=True):
            if not is_new:
                self._num_duplicates += 1
                self._first_duplicate = self._first_duplicate or row.where
                continue
            self.seen.num_trajectories += 1
            if row.dropped:
                self._dropped[row.dropped] += 1
                continue
            kept.add(row.number)
            self._take_turns(row)
        return kept

    def _take_turns(self, row: Row) -> None:
        split = Split.HELD_OUT if row.turns.is_held_out else Split.TRAIN
        states = [f"{state:016x}" for state in row.turns.states]
        if split is Split.TRAIN:
            self._train_states.add(states)
        else:
            for state, turn in zip(states, row.turns.numbers, strict=True):
                self._held_out_states.setdefault(state, f"{row.where}, turn {turn}")
        for name, turn in row.unoffered:
            self._unoffered[name] += 1
            self._first_unoffered.setdefault(name, f"{row.where}, turn {turn}")
        self.seen.candidates[split.value] += sum(self._candidate_ids.add([f"{one:016x}" for one in row.turns.candidates]))

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
        held_out = list(self._held_out_states)
        # `add` says of each whether it is new; asking twice about one state is not possible, a dict has it once.
        leaked = [state for state, is_new in zip(held_out, self._train_states.add(held_out), strict=True) if not is_new]
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
