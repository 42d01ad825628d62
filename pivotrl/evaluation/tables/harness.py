"""Result files of public harnesses as attempts, or as a total where a file lists no tasks: one small reader per format.

Each reader's docstring names the source of its format. What a harness counts as failed is failed here (an agent's error, a trial without a
verdict), so that the mean is the harness' own; what it leaves out is left out. Reads files, knows no arms; called by sources.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from pivotrl.config.tables import FileSource
from pivotrl.config.yaml_text import read_yaml_file
from pivotrl.errors import UserError
from pivotrl.evaluation.tables.estimates import Total


@dataclass(frozen=True, slots=True)
class TaskAttempt:
    """One attempt at one task."""

    task: str
    family: str
    score: float
    """In [0, 1]."""


@dataclass(frozen=True, slots=True)
class Reading:
    """What one set of files holds: attempts, or one total per file."""

    attempts: tuple[TaskAttempt, ...]
    totals: tuple[Total, ...]
    files: tuple[Path, ...]


class _Shape(Exception):
    """A file is not what its format says; the message names the rule."""


def read_harness(paths: Sequence[Path], source: FileSource) -> Reading:
    """All files of one source for one domain and seed.

    Raises:
        UserError: for a file that is missing, unreadable or not of the format, or a score outside [0, 1].
    """
    attempts: list[TaskAttempt] = []
    totals: list[Total] = []
    files: list[Path] = []
    for path in paths:
        for file in _files(path, source):
            try:
                found = list(_READERS[source.format](_load(file), source))
            except (_Shape, KeyError, TypeError, AttributeError, IndexError, ValueError, OSError) as error:
                reason = f"no key {error}" if isinstance(error, KeyError) else str(error)
                raise UserError(
                    f"{file} is not a result file of {source.format}: {reason}",
                    rule="a source's format must be the one its harness writes (docs/tables.md)",
                    fix="correct the path or the format",
                ) from error
            files.append(file)
            attempts += [one for one in found if isinstance(one, TaskAttempt)]
            totals += [one for one in found if isinstance(one, Total)]
    values = [one.score for one in attempts] + [one.value for one in totals]
    if bad := next((value for value in values if not 0 <= value <= 1), None):
        raise UserError(
            f"a score of {paths[0]} is {bad}",
            rule="scores are shares in [0, 1]",
            fix="name another metric, or set `scale: percent` where the file states percent",
        )
    return Reading(tuple(attempts), tuple(totals), tuple(files))


def _files(path: Path, source: FileSource) -> list[Path]:
    if not path.exists():
        raise UserError(f"{path} does not exist", rule="every named result file must exist", fix="correct the path in the specification")
    if path.is_file():
        return [path]
    found = sorted(path.glob("*/result.json")) if source.format == "harbor" else []
    if not found:
        raise UserError(
            f"{path} is a directory without result files of {source.format}",
            rule="a directory is read for `harbor` alone: a job with one folder per trial",
            fix="name the result file itself",
        )
    return found


def _load(file: Path) -> Any:
    if file.suffix in (".yml", ".yaml"):
        return read_yaml_file(file)
    data = file.read_bytes()
    if file.suffix == ".jsonl":
        return [orjson.loads(line) for line in data.split(b"\n") if line.strip()]
    return orjson.loads(data)


def _tau2(value: Any, source: FileSource) -> Iterator[TaskAttempt]:
    """tau2-bench `Results` (sierra-research/tau2-bench, src/tau2/data_model/simulation.py): `simulations[].reward_info.reward`.

    The domain of `info.environment_info` is the family. A simulation without reward_info was never judged and is left out.
    """
    del source
    family = str(value["info"]["environment_info"]["domain_name"])
    for simulation in value["simulations"]:
        if simulation.get("reward_info") is not None:
            yield TaskAttempt(f"{family}/{simulation['task_id']}", family, float(simulation["reward_info"]["reward"]))


def _swe_bench(value: Any, source: FileSource) -> Iterator[TaskAttempt]:
    """SWE-bench run report, schema_version 2 (SWE-bench/SWE-bench, swebench/harness/reporting.py): `resolved_ids` over all instances.

    Instances that were not submitted, had an empty patch or an error are unresolved, as in the share that the leaderboard prints. Family: repository.
    """
    del source
    resolved = set(value["resolved_ids"])
    kinds = ("completed_ids", "incomplete_ids", "empty_patch_ids", "submitted_ids", "unresolved_ids", "error_ids")
    instances = resolved.union(*(value.get(kind, ()) for kind in kinds))
    if len(instances) != value["total_instances"]:
        raise _Shape(f"total_instances is {value['total_instances']} but its lists name {len(instances)}")
    for instance in sorted(instances):
        yield TaskAttempt(instance, instance.rpartition("-")[0], float(instance in resolved))


def _terminal_bench(value: Any, source: FileSource) -> Iterator[TaskAttempt]:
    """Terminal-Bench 1.x results.json (laude-institute/terminal-bench, terminal_bench/harness/models.py): `results[].is_resolved`, null is no."""
    del source
    for result in value["results"]:
        yield TaskAttempt(str(result["task_id"]), "", float(bool(result["is_resolved"])))


def _harbor(value: Any, source: FileSource) -> Iterator[TaskAttempt]:
    """Harbor (Terminal-Bench 2): a trial's result.json (`verifier_result.rewards`) or a job's (`stats.evals[].reward_stats`).

    Source: harbor's models/trial/result.py and models/job/result.py. A trial without rewards ended in an exception and scores 0, as in the job's
    mean. In a job's file a trial is named TASK__SUFFIX. The reward is the one that `metric` names, else `reward`, else the only one.
    """
    if "task_name" in value:
        rewards = (value.get("verifier_result") or {}).get("rewards") or {}
        yield TaskAttempt(str(value["task_name"]), "", float(rewards[_one(rewards, source.metric or "reward", "reward")]) if rewards else 0.0)
        return
    for evaluation in value["stats"]["evals"].values():
        rewards = evaluation.get("reward_stats") or {}
        scored: dict[str, float] = {}
        for reward, trials in (rewards[_one(rewards, source.metric or "reward", "reward")] if rewards else {}).items():
            scored.update(dict.fromkeys(trials, float(reward)))
        failed = {trial for trials in (evaluation.get("exception_stats") or {}).values() for trial in trials}
        for trial in sorted(failed | set(scored)):
            yield TaskAttempt(trial.rpartition("__")[0] or trial, "", scored.get(trial, 0.0))


def _browsecomp(value: Any, source: FileSource) -> Iterator[TaskAttempt | Total]:
    """BrowseComp by openai/simple-evals (one JSON of means: `score`, the share its grader accepts), or by BrowseComp-Plus
    (texttron/BrowseComp-Plus, scripts_evaluation/evaluate_run.py: `per_query_metrics[].correct`), or JSONL rows {query_id, correct}.

    The first lists no questions, so it has a total with neither n nor spread.
    """
    del source
    if isinstance(value, dict) and "per_query_metrics" not in value:
        yield Total(float(value["score"]), None, 0)
        return
    for row in value if isinstance(value, list) else value["per_query_metrics"]:
        yield TaskAttempt(str(row["query_id"]), "", float(bool(row["correct"])))


def _lm_eval(value: Any, source: FileSource) -> Iterator[TaskAttempt | Total]:
    """lm-evaluation-harness (EleutherAI, lm_eval/loggers/evaluation_tracker.py): results_*.json, or samples_*.jsonl of --log_samples.

    A metric is NAME,FILTER as in `results`. Samples give every document a score; results give a total with its stated standard error and n.
    """
    if isinstance(value, list):
        name, _, which = (source.metric or _only({metric for row in value for metric in row["metrics"]}, "metric")).partition(",")
        rows = [row for row in value if not which or row.get("filter", "none") == which]
        if not rows:
            raise _Shape(f"no sample has the filter {which!r}")
        for row in rows:
            yield TaskAttempt(f"{source.task or source.benchmark or ''}/{row['doc_id']}", "", float(row[name]))
        return
    results: Mapping[str, Any] = value["results"]
    task = source.task or _only(results, "task")
    scores = results[task]
    metric = source.metric or _only([key for key in scores if "," in key and "_stderr" not in key], "metric")
    name, comma, which = metric.partition(",")
    stderr = scores.get(f"{name}_stderr{comma}{which}")
    counted = value.get("n-samples", {}).get(task, {})
    yield _scaled(scores[metric], stderr if isinstance(stderr, int | float) else None, int(counted.get("effective", 0)), source)


def _nemo_evaluator(value: Any, source: FileSource) -> Iterator[Total]:
    """NeMo Evaluator results.yml (NVIDIA-NeMo/Evaluator, api_dataclasses.EvaluationResult): `results.tasks.T.metrics.M.scores.S` with `stats`.

    `metric` is M/S. `groups` is read where the task is not among `tasks`.
    """
    results = value.get("results", value)
    tasks = {**(results.get("groups") or {}), **(results.get("tasks") or {})}
    metrics = tasks[source.task or _only(tasks, "task")]["metrics"]
    scores = {f"{metric}/{name}": score for metric, found in metrics.items() for name, score in found["scores"].items()}
    score = scores[source.metric or _only(scores, "metric")]
    stats = score.get("stats") or {}
    yield _scaled(score["value"], stats.get("stderr"), int(stats.get("count") or 0), source)


def _scaled(value: Any, stderr: float | None, n: int, source: FileSource) -> Total:
    unit = 100.0 if source.scale == "percent" else 1.0
    known = None if stderr is None or not math.isfinite(stderr) else stderr / unit
    return Total(float(value) / unit, known, n)


def _one(named: Mapping[str, Any], name: str, what: str) -> str:
    return name if name in named else _only(named, what)


def _only(names: Any, what: str) -> str:
    found = sorted(names)
    if len(found) != 1:
        raise _Shape(f"it has {len(found)} {what}s ({', '.join(found[:6])}), so `{what}` must name one")
    return found[0]


_READERS: Mapping[str, Callable[[Any, FileSource], Iterator[TaskAttempt | Total]]] = {
    "tau2": _tau2,
    "swe_bench": _swe_bench,
    "terminal_bench": _terminal_bench,
    "harbor": _harbor,
    "browsecomp": _browsecomp,
    "lm_eval": _lm_eval,
    "nemo_evaluator": _nemo_evaluator,
}
