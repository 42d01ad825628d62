"""The ingest stage: files of any supported format to trajectories.parquet, candidates.parquet and audit.json.

Consumes the named paths; produces the three files below the stage directory. Streams: a few rows are in memory, and a few hundred bytes per kept
trajectory for deduplication. A broken file or row is counted with its reason and never stops the run. Files are grouped into work units
(`parts.py`) that are redone whole after a kill, so a resumed run ends with the bytes of an undisturbed one; units rather than one temporary file,
because redoing thousands of large files for one kill is hours.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pivotrl.config.schema import IngestConfig
from pivotrl.errors import UserError
from pivotrl.identity import content_id, file_id
from pivotrl.pivots.candidates import eligible_turns, extract_candidates
from pivotrl.progress import ProgressBar, progress_bar
from pivotrl.rundir import RESUME_KEY, Stage, read_json, write_json
from pivotrl.trajectories import registry, store
from pivotrl.trajectories.audit import UNKNOWN_FORMAT, FormatCounts, audit_json, sum_counts
from pivotrl.trajectories.decontaminate import DecontaminationList
from pivotrl.trajectories.dedupe import Fingerprint, IdSet, NearDuplicates, fingerprints
from pivotrl.trajectories.encoded import Encoded
from pivotrl.trajectories.files import discover, printable_name
from pivotrl.trajectories.parts import PARTS, Part, clean_up, merge, retire_parts
from pivotrl.trajectories.plan import ReadTask, plan_tasks, work_units
from pivotrl.trajectories.prepare import LeftOut, Prepared, no_cycle_collection, prepared_rows
from pivotrl.trajectories.source import RowDropped, RowQuarantined
from pivotrl.trajectories.streams import MB, Meter, metered
from pivotrl.trajectories.tools import load_tools
from pivotrl.types import Outcome, Tool, Trajectory

AUDIT = "audit.json"
# Small files share a work unit up to this size; a larger file is a unit of its own.
_PART_BYTES = 32 << 20
_OUTCOME_GROUPS = {outcome.value: number for number, outcome in enumerate(Outcome)}
# Rows whose texts are hashed together: more of them gain nothing, and they are all in memory.
_BATCH_ROWS = 32
_BATCH_BYTES = 1 << 18


def ingest_inputs(config: IngestConfig, paths: Sequence[Path]) -> dict[str, str]:
    """Content hashes of everything the stage reads, by name: what `Stage.open` wants. Reads every file once.

    Raises:
        UserError: for a path that does not exist, an unknown format, or a list of tools or tasks that cannot be read: before a directory is made.
    """
    _require_paths(paths)
    if config.format != registry.AUTO:
        registry.adapter(config.format)
    files = [(printable_name(file.name), file_id(file.path) if os.access(file.path, os.R_OK) else "unreadable") for file in discover(paths).files]
    inputs = {"files": content_id(files)}
    if config.tools is not None:
        inputs["tools"] = content_id(load_tools(Path(config.tools)))
    if config.decontamination is not None:
        DecontaminationList.load(Path(config.decontamination))
        inputs["decontamination"] = file_id(Path(config.decontamination))
    return inputs


def run_ingest(stage: Stage, config: IngestConfig, *, paths: Sequence[Path], run_seed: int) -> dict[str, Any]:
    """Runs or resumes the stage, finishes it, and returns the audit.

    Args:
        config: `tools` and `decontamination` are paths whose placeholders are already replaced; `paths` of the config are ignored.
        paths: files and directories to read.

    Raises:
        UserError: where a named path does not exist, or nothing at all was kept (audit.json then says why).
    """
    _require_paths(paths)
    outputs = (store.TRAJECTORIES, store.CANDIDATES, AUDIT)
    is_merged = all((stage.path / name).exists() for name in outputs) and not (stage.path / PARTS).exists()
    audit = read_json(stage.path / AUDIT) if is_merged else _ingest(stage, config, paths, run_seed)
    clean_up(stage.path)
    stage.finish(outputs=outputs, summary=_summary(audit))
    return audit


def _ingest(stage: Stage, config: IngestConfig, paths: Sequence[Path], run_seed: int) -> dict[str, Any]:
    discovery = discover(paths)
    ingester = _Ingester(config, run_seed)
    (stage.path / PARTS).mkdir(exist_ok=True)
    unknown = FormatCounts()
    tasks = plan_tasks(discovery.files, config.format, unknown)
    groups = list(work_units(tasks, max_bytes=_PART_BYTES))
    parts = [Part(stage.path, number) for number in range(len(groups))]
    done: list[dict[str, FormatCounts]] = []
    num_unread_files = 0
    left = sum(task.num_bytes for part, group in zip(parts, groups, strict=True) for task in group if not part.is_done)
    with progress_bar("ingest", left / MB, "MB") as bar, no_cycle_collection():
        for part, group in zip(parts, groups, strict=True):
            if ingester.is_full:
                num_unread_files += sum(len(task.unit.paths) for task in group)
            elif part.is_done:
                ingester.restore(part)
                done.append(part.counts())
            else:
                done.append(ingester.process(part, group, bar))
    used = parts[: len(done)]
    formats = sum_counts([{UNKNOWN_FORMAT: unknown} if unknown.files else {}, *done], (*registry.FORMATS, UNKNOWN_FORMAT))
    audit = audit_json(formats, skipped=discovery.skipped, num_unread_files=num_unread_files)
    write_json(stage.path / AUDIT, audit)
    if not any(counts.kept for counts in formats.values()):
        # Nothing to resume: the directory is free for a corrected command.
        retire_parts(stage.path)
        clean_up(stage.path)
        (stage.path / RESUME_KEY).unlink(missing_ok=True)
        raise _nothing_kept(paths, audit, num_files=len(discovery.files))
    merge(stage.path, used)
    retire_parts(stage.path)
    return audit


class _Ingester:
    """The state that runs through all work units: what was kept so far. `process` writes one unit, `restore` recalls one that is done."""

    def __init__(self, config: IngestConfig, run_seed: int) -> None:
        self._config, self._run_seed = config, run_seed
        self._tools: tuple[Tool, ...] | None = load_tools(Path(config.tools)) if config.tools is not None else None
        self._forbidden = DecontaminationList.load(Path(config.decontamination)) if config.decontamination is not None else None
        self._near = NearDuplicates(config.near_duplicate_threshold) if config.near_duplicate_threshold < 1 else None
        self._trajectory_ids, self._candidate_ids = IdSet(), IdSet()
        self._num_kept = 0

    @property
    def is_full(self) -> bool:
        return self._config.max_trajectories is not None and self._num_kept >= self._config.max_trajectories

    def restore(self, part: Part) -> None:
        for trajectory_id, outcome, mark in part.kept():
            self._num_kept += 1
            self._trajectory_ids.add([trajectory_id])
            if self._near is not None and mark is not None:
                self._near.add(mark, group=_OUTCOME_GROUPS[outcome])
        for ids in part.candidate_ids():
            self._candidate_ids.add(ids)

    def process(self, part: Part, tasks: Sequence[ReadTask], bar: ProgressBar) -> dict[str, FormatCounts]:
        counts: dict[str, FormatCounts] = {}
        for task in tasks:
            meter = Meter(bar, task.num_bytes)
            with metered(meter.count):
                self._read(part, task, counts.setdefault(task.adapter.name, FormatCounts()))
            meter.finish(f"{self._num_kept:,} trajectories kept")
            if self.is_full:
                break
        part.finish(counts)
        return counts

    def _read(self, part: Part, task: ReadTask, counts: FormatCounts) -> None:
        counts.files += len(task.unit.paths)
        batch: list[Prepared | LeftOut] = []
        num_bytes = 0
        for item in prepared_rows(task, self._tools, domain=self._config.domain):
            batch.append(item)
            num_bytes += item.texts.num_bytes if isinstance(item, Prepared) else 0
            if len(batch) >= _BATCH_ROWS or num_bytes >= _BATCH_BYTES:
                self._settle(part, task, batch, counts)
                batch, num_bytes = [], 0
                if self.is_full:
                    return
        self._settle(part, task, batch, counts)

    def _settle(self, part: Part, task: ReadTask, batch: Sequence[Prepared | LeftOut], counts: FormatCounts) -> None:
        """Keeps, drops or quarantines rows in order; rows beyond `max_trajectories` count as unread."""
        ready = [item for item in batch if isinstance(item, Prepared)]
        marks = iter(fingerprints([(item.texts.said, item.texts.seen) for item in ready]) if self._near is not None else [None] * len(ready))
        for item in batch:
            mark = next(marks) if isinstance(item, Prepared) else None
            if self.is_full:
                return
            counts.rows += 1
            try:
                if isinstance(item, LeftOut):
                    raise item.error
                self._take(part, item, mark, counts)
            except RowDropped as dropped:
                counts.dropped[dropped.reason] += 1
            except RowQuarantined as broken:
                line = item.line if isinstance(item, LeftOut) else None
                counts.quarantine(broken.reason, file=printable_name(broken.file or task.unit.name), line=line)

    def _take(self, part: Part, item: Prepared, mark: Fingerprint | None, counts: FormatCounts) -> None:
        """Writes a trajectory that is to be kept.

        Raises:
            RowDropped: for one that is not.
        """
        trajectory = item.trajectory
        counts.assistant_turns += item.num_expert_turns
        counts.harness_turns += item.num_harness_turns
        counts.repairs.update(item.repairs)
        counts.secrets.update(item.secrets)
        is_remembered = self._admit(item, mark)
        part.add(trajectory, item.encoded.all_messages, mark if is_remembered else None)
        self._take_candidates(part, trajectory, item.encoded, counts)
        self._num_kept += 1
        counts.kept += 1
        counts.kept_assistant_turns += item.num_expert_turns
        counts.outcomes[trajectory.outcome.value] += 1
        counts.domains[trajectory.domain.value] += 1
        counts.tool_origins[trajectory.tool_origin.value] += 1

    def _take_candidates(self, part: Part, trajectory: Trajectory, encoded: Encoded, counts: FormatCounts) -> None:
        if trajectory.outcome.value not in self._config.outcomes:
            eligible, excluded = eligible_turns(trajectory)
            counts.turns_excluded.update(excluded)
            counts.turns_excluded[f"outcome {trajectory.outcome.value}"] += len(eligible)
            return
        extraction = extract_candidates(trajectory, encoded, held_out_frac=self._config.held_out_frac, run_seed=self._run_seed)
        counts.turns_excluded.update(extraction.excluded)
        is_new = self._candidate_ids.add([candidate.id for candidate in extraction.candidates])
        for candidate, action, new in zip(extraction.candidates, extraction.encoded_actions, is_new, strict=True):
            if new:
                part.add_candidate(candidate, action)
                counts.candidates[candidate.split.value] += 1
            else:
                counts.turns_excluded["duplicate candidate"] += 1

    def _admit(self, item: Prepared, mark: Fingerprint | None) -> bool:
        """Remembers a trajectory that is to be kept; whether its fingerprint is remembered too.

        Raises:
            RowDropped: for a contaminated one, a copy, or a near-copy of one with the same outcome.
        """
        trajectory = item.trajectory
        if self._forbidden is not None:
            reason = self._forbidden.match(trajectory.task_id, item.texts.whole())
            if reason is not None:
                raise RowDropped(reason)
        if not self._trajectory_ids.add([trajectory.id])[0]:
            raise RowDropped("exact duplicate")
        if self._near is None or mark is None or not mark.said.num_shingles:
            return False
        if not self._near.admit(mark, group=_OUTCOME_GROUPS[trajectory.outcome.value]):
            raise RowDropped("near duplicate")
        return True


def _require_paths(paths: Sequence[Path]) -> None:
    if not paths:
        raise UserError("no path to ingest", rule="ingest reads at least one file or directory", fix="name one")
    for path in paths:
        if not path.exists():
            raise UserError(f"{path} does not exist", rule="every path to ingest is a file or directory", fix="correct the path")


def _nothing_kept(paths: Sequence[Path], audit: Mapping[str, Any], *, num_files: int) -> UserError:
    where = ", ".join(map(str, paths[:3])) + (" ..." if len(paths) > 3 else "")
    reasons: Counter[str] = Counter(audit["skipped"])
    for entry in audit["formats"].values():
        reasons.update(entry["dropped"])
        reasons.update(entry["quarantined"])
    why = ", ".join(f"{reason} ({count})" for reason, count in reasons.most_common(3)) or "there is no file"
    return UserError(
        f"nothing was kept of {num_files} files below {where}: {why}",
        rule="at least one trajectory must be readable",
        fix="see audit.json in the ingest directory, or name the format with --format",
    )


def _summary(audit: Mapping[str, Any]) -> dict[str, Any]:
    entries = audit["formats"].values()
    return {
        "trajectories": {key: sum(entry["trajectories"][key] for entry in entries) for key in ("present", "kept", "dropped", "quarantined")},
        "candidates": {split: sum(entry["candidates"].get(split, 0) for entry in entries) for split in ("train", "held_out")},
    }
