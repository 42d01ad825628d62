"""The trajectories: every row of every file read and converted as `ingest` would, without writing anything.

Gives the sample of expert turns that rendering, parsing and verification are checked on. Memory: a few bytes per turn, and the sample.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from pivotrl.actions.terminus2 import TOOL_NAME
from pivotrl.config.schema import IngestConfig
from pivotrl.doctor.findings import Findings
from pivotrl.identity import canonical_json, derive_seed, running_id
from pivotrl.pivots.candidates import extract_candidates
from pivotrl.progress import progress_bar
from pivotrl.trajectories import registry
from pivotrl.trajectories.audit import FormatCounts
from pivotrl.trajectories.decontaminate import DecontaminationList
from pivotrl.trajectories.dedupe import IdSet
from pivotrl.trajectories.files import discover
from pivotrl.trajectories.plan import plan_tasks
from pivotrl.trajectories.prepare import LeftOut, Prepared, prepared_rows
from pivotrl.trajectories.source import RowQuarantined
from pivotrl.trajectories.store import encode_message
from pivotrl.trajectories.streams import MB, Meter, metered
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


def check_data(config: IngestConfig, paths: Sequence[Path], findings: Findings, *, run_seed: int, sample_size: int) -> Seen:
    """Reads everything.

    Args:
        config: `tools` and `decontamination` are paths whose placeholders are already replaced.
        paths: files and directories, which exist.
    """
    reader = _Reader(config, findings, run_seed, sample_size)
    with findings.refused_by("data-settings", "ingest"):
        reader.open()
        reader.read(paths)
    reader.conclude(paths)
    return reader.seen


class _Reader:
    """One pass over all rows."""

    def __init__(self, config: IngestConfig, findings: Findings, run_seed: int, sample_size: int) -> None:
        self._config, self._findings, self._run_seed, self._sample_size = config, findings, run_seed, sample_size
        self.seen = Seen()
        self._tools: tuple[Tool, ...] | None = None
        self._broken: list[str] = []
        self._num_broken, self._num_duplicates, self._first_duplicate = 0, 0, ""
        self._dropped: Counter[str] = Counter()
        self._ids, self._candidate_ids, self._train_states = IdSet(), IdSet(), IdSet()
        self._held_out_states: dict[str, str] = {}
        self._unoffered: Counter[str] = Counter()
        self._first_unoffered: dict[str, str] = {}
        self._chosen: list[tuple[int, str, Trajectory, Candidate]] = []

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
        with progress_bar("data", sum(task.num_bytes for task in tasks) / MB, "MB") as bar:
            for task in tasks:
                meter = Meter(bar, task.num_bytes)
                with metered(meter.count):
                    for item in prepared_rows(task, self._tools, domain=self._config.domain):
                        self._take(item, task.unit.name)
                meter.finish()

    def _take(self, item: Prepared | LeftOut, unit_name: str) -> None:
        self.seen.num_rows += 1
        if isinstance(item, LeftOut):
            if isinstance(item.error, RowQuarantined):
                self._left_out(f"{item.error.file or unit_name}{f':{item.line}' if item.line else ''}: {item.error.reason}")
            else:
                self._dropped[item.error.reason] += 1
            return
        trajectory = item.trajectory
        where = f"{trajectory.source_file} row {trajectory.source_index}"
        if not self._ids.add([trajectory.id])[0]:
            self._num_duplicates += 1
            self._first_duplicate = self._first_duplicate or where
            return
        self.seen.num_trajectories += 1
        if trajectory.outcome.value not in self._config.outcomes:
            self._dropped[f"outcome {trajectory.outcome.value}"] += 1
            return
        self._take_turns(trajectory, where)

    def _take_turns(self, trajectory: Trajectory, where: str) -> None:
        encoded = [encode_message(message) for message in trajectory.messages]
        extraction = extract_candidates(trajectory, encoded_messages=encoded, held_out_frac=self._config.held_out_frac, run_seed=self._run_seed)
        offered = {tool.name for tool in trajectory.tools}
        is_new = self._candidate_ids.add([candidate.id for candidate in extraction.candidates])
        states = _state_ids(trajectory, encoded, extraction.candidates)
        for candidate, new, state in zip(extraction.candidates, is_new, states, strict=True):
            if candidate.split is Split.TRAIN:
                self._train_states.add([state])
            else:
                self._held_out_states.setdefault(state, f"{where}, turn {candidate.turn_index}")
            for call in candidate.expert_action.tool_calls:
                if offered and call.name not in offered and call.name != TOOL_NAME:
                    self._unoffered[call.name] += 1
                    self._first_unoffered.setdefault(call.name, f"{where}, turn {candidate.turn_index}")
            if new:
                self._choose(trajectory, candidate)

    def _choose(self, trajectory: Trajectory, candidate: Candidate) -> None:
        """Counts a candidate, and keeps it in the sample while its draw is among the smallest."""
        self.seen.candidates[candidate.split.value] += 1
        # A heap of negated draws: the largest draw of the sample is on top.
        entry = (-derive_seed(0, "doctor sample", candidate.id), candidate.id, trajectory, candidate)
        if len(self._chosen) < self._sample_size:
            heapq.heappush(self._chosen, entry)
        elif entry[:2] > self._chosen[0][:2]:
            heapq.heapreplace(self._chosen, entry)

    def _left_out(self, place: str) -> None:
        self._num_broken += 1
        if len(self._broken) < _SHOWN_ROWS:
            self._broken.append(place)

    def conclude(self, paths: Sequence[Path]) -> None:
        """Findings about the whole."""
        seen, findings = self.seen, self._findings
        seen.sample = [(trajectory, candidate) for _, _, trajectory, candidate in sorted(self._chosen, key=lambda one: one[:2])]
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


def _state_ids(trajectory: Trajectory, encoded: Sequence[bytes], candidates: Sequence[Candidate]) -> Iterator[str]:
    """Content id of each candidate's state: tools and messages before the turn."""
    running, num_hashed = running_id(canonical_json(trajectory.tools)), 0
    for candidate in candidates:
        for message in encoded[num_hashed : candidate.message_index]:
            running.update(message)
        num_hashed = candidate.message_index
        yield running.copy().hexdigest()
