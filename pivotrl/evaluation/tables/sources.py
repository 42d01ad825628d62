"""From a specification to scores: which files belong to an arm, domain and seed, what each task scored in them.

The only part of the tables that knows the layout of a run's `eval` stage. Everything read is remembered by path and content hash.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from pivotrl.artifacts import ScoredItem, ScoredUnit, StageManifest, read_artifact
from pivotrl.config.tables import DomainTable, FileSource, RunSource, TablesConfig
from pivotrl.errors import UserError
from pivotrl.evaluation.named import UNITS
from pivotrl.evaluation.tables.estimates import Seeds, TaskScore, Total
from pivotrl.evaluation.tables.harness import TaskAttempt, read_harness
from pivotrl.identity import file_id
from pivotrl.rundir import MANIFEST, Stage

OWN = None
"""The benchmark of a training domain itself."""


@dataclass(frozen=True, slots=True)
class Scores:
    """An arm trained on one domain, on one benchmark: task scores by seed, and the files that hold them."""

    seeds: Seeds
    files: tuple[str, ...]


@dataclass(slots=True)
class Results:
    """Everything a specification names, read once."""

    config: TablesConfig
    root: Path
    scores: dict[tuple[str, str, str | None], Scores]
    """By (arm, domain, benchmark); benchmark None is the domain's own."""
    runs: dict[tuple[str, str, int], Path]
    """Run directory by (arm, domain, seed)."""
    hashes: dict[str, str] = field(default_factory=dict[str, str])
    """Content hash of every file read, by its path below the root."""
    missing: list[tuple[str, str, int]] = field(default_factory=list[tuple[str, str, int]])
    """(arm, domain, seed) of runs that are not there, where that is allowed."""

    def of(self, arm: str, domain: str, benchmark: str | None) -> Scores:
        """What there is; no seeds where it was not run."""
        return self.scores.get((arm, domain, benchmark), Scores({}, ()))

    def domain(self, name: str) -> DomainTable:
        """A domain's settings."""
        return next(one for one in self.config.domains if one.name == name)

    def read(self, file: Path) -> str:
        """Notes a file as read and gives its name below the root."""
        name = str(file.relative_to(self.root)) if file.is_relative_to(self.root) else str(file)
        if name not in self.hashes:
            self.hashes[name] = file_id(file)
        return name


def read_results(config: TablesConfig, *, spec: Path, allows_missing: bool = False) -> Results:
    """Reads every named run directory and file.

    Args:
        allows_missing: a run whose eval is not finished is noted as missing.

    Raises:
        UserError: for a missing or unfinished run, a suite that was not evaluated, a file of another format, or the same result named twice.
    """
    root = Path(config.root.replace("{spec}", str(spec.parent)))
    results = Results(config, root, {}, {})
    for source in config.results:
        for domain in source.domains or [one.name for one in config.domains]:
            for seed in source.seeds:
                if isinstance(source, RunSource):
                    if allows_missing and not Stage.is_done(run_directory(results.root, source, domain, seed), "eval"):
                        results.missing.append((source.arm, domain, seed))
                        continue
                    _read_run(results, source, domain, seed)
                else:
                    _read_files(results, source, domain, seed)
    return results


def run_directory(root: Path, source: RunSource, domain: str, seed: int) -> Path:
    """Where a source's run lies."""
    return root / _filled(source.path, source.arm, domain, seed)


def _read_run(results: Results, source: RunSource, domain: str, seed: int) -> None:
    run = run_directory(results.root, source, domain, seed)
    stage = Stage.require(run, "eval")
    results.runs[source.arm, domain, seed] = run
    evaluated = read_artifact(stage / MANIFEST, StageManifest)["seed"]
    suite = results.domain(domain).suite
    file = _unit(stage, suite, source.checkpoint)
    _add(results, source.arm, domain, OWN, seed, _tasks_of_run(read_artifact(file, ScoredUnit)["items"], evaluated), [results.read(file)])
    apart = results.config.out_of_domain
    if apart is None:
        return
    file = _unit(stage, apart.suite, source.checkpoint)
    tasks, name = _tasks_of_run(read_artifact(file, ScoredUnit)["items"], evaluated), results.read(file)
    for benchmark in apart.benchmarks:
        if found := [one for one in tasks if one.family == benchmark.name]:
            _add(results, source.arm, domain, benchmark.name, seed, found, [name])


def _unit(stage: Path, suite: str, checkpoint: str) -> Path:
    file = stage / UNITS / f"{suite}-{checkpoint}.json"
    if not file.exists():
        have = ", ".join(sorted(path.stem for path in (stage / UNITS).glob("*.json"))) or "nothing"
        raise UserError(
            f"{stage} has no scores of the suite {suite!r} on the {checkpoint} checkpoint",
            rule=f"it holds {have}",
            fix="name one of its suites in the specification, or evaluate that suite",
        )
    return file


def _tasks_of_run(items: Iterable[ScoredItem], evaluated: int) -> list[TaskScore]:
    """Task scores of one suite: attempts ``TASK#k`` of a task are averaged.

    An item that is its own cluster (a skill's question) is drawn from the evaluation's seed, so only evaluations with that seed share it.
    """
    attempts: dict[tuple[str, str, str], list[float]] = {}
    for item in items:
        is_drawn = item["item"] == item["cluster"]
        task = f"{item['item']}@{evaluated}" if is_drawn else str(item["item"]).rpartition("#")[0]
        attempts.setdefault((task, task if is_drawn else str(item["cluster"]), str(item["facet"])), []).append(float(item["score"]))
    return [TaskScore(*key, math.fsum(scores) / len(scores), len(scores)) for key, scores in attempts.items()]


def _read_files(results: Results, source: FileSource, domain: str, seed: int) -> None:
    paths = [results.root / _filled(path, source.arm, domain, seed) for path in source.paths]
    reading = read_harness(paths, source)
    if len(reading.totals) > 1 or (reading.totals and reading.attempts):
        raise UserError(
            f"{source.arm} on {source.benchmark or domain}, seed {seed}: {len(paths)} files without tasks",
            rule="a file that lists no tasks stands alone: its parts cannot be weighed",
            fix="name one file per seed, or the files that list samples",
        )
    files = [results.read(file) for file in reading.files]
    found = reading.totals[0] if reading.totals else _averaged(reading.attempts)
    _add(results, source.arm, domain, source.benchmark, seed, found, files)


def _averaged(attempts: Iterable[TaskAttempt]) -> list[TaskScore]:
    by_task: dict[tuple[str, str], list[float]] = {}
    for attempt in attempts:
        by_task.setdefault((attempt.task, attempt.family), []).append(attempt.score)
    return [TaskScore(task, task, family, math.fsum(scores) / len(scores), len(scores)) for (task, family), scores in sorted(by_task.items())]


def _add(results: Results, arm: str, domain: str, benchmark: str | None, seed: int, found: Sequence[TaskScore] | Total, files: Sequence[str]) -> None:
    before = results.of(arm, domain, benchmark)
    if seed in before.seeds:
        raise UserError(
            f"{arm} on {benchmark or domain} has two results for seed {seed} of domain {domain}",
            rule="a result belongs to one arm, domain, benchmark and seed",
            fix="name trials of one seed as several `paths` of one source, or give them seeds of their own",
        )
    if not isinstance(found, Total) and not found:
        raise UserError(
            f"{', '.join(files)} holds no scored task of {benchmark or domain}",
            rule="a result needs at least one",
            fix="correct the path",
        )
    results.scores[arm, domain, benchmark] = Scores({**before.seeds, seed: found}, (*before.files, *files))


def _filled(path: str, arm: str, domain: str, seed: int) -> str:
    return path.replace("{arm}", arm).replace("{domain}", domain).replace("{seed}", str(seed))
