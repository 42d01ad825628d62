"""Readers of harness result files on invented files of the same shape; tau2-bench's also on the shared files, counted with plain json."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pivotrl.config.tables import FileSource
from pivotrl.errors import UserError
from pivotrl.evaluation.tables.estimates import Total
from pivotrl.evaluation.tables.harness import Reading, read_harness


def source(format_name: str, **options: Any) -> FileSource:
    return FileSource.model_validate({"type": "file", "arm": "a", "paths": ["unused"], "format": format_name, **options})


def read(folder: Path, name: str, value: Any, of: FileSource) -> Reading:
    path = folder / name
    path.write_text(value if isinstance(value, str) else json.dumps(value))
    return read_harness([path], of)


def shown(reading: Reading) -> list[tuple[str, str, float]]:
    return [(one.task, one.family, one.score) for one in reading.attempts]


def tau2(domain: str, *rows: tuple[str, int, float | None]) -> dict[str, Any]:
    simulations = [
        {"id": f"{task}-{trial}", "task_id": task, "trial": trial, "termination_reason": "user_stop", "messages": []}
        | {"reward_info": None if reward is None else {"reward": reward, "db_check": None}}
        for task, trial, reward in rows
    ]
    return {"timestamp": "", "info": {"num_trials": 2, "environment_info": {"domain_name": domain}}, "tasks": [], "simulations": simulations}


def test_tau2_bench(tmp_path: Path) -> None:
    """A simulation that was never judged is no attempt; task ids of two domains do not meet."""
    paths = []
    for domain, rows in {"airline": [("0", 0, 1.0), ("0", 1, 0.0), ("7", 0, None)], "retail": [("0", 0, 0.0)]}.items():
        paths.append(tmp_path / f"{domain}.json")
        paths[-1].write_text(json.dumps(tau2(domain, *rows)))
    reading = read_harness(paths, source("tau2"))
    assert shown(reading) == [("airline/0", "airline", 1.0), ("airline/0", "airline", 0.0), ("retail/0", "retail", 0.0)]
    assert reading.files == tuple(paths)


def swe_report(**lists: list[str]) -> dict[str, Any]:
    kinds = ("completed", "incomplete", "empty_patch", "submitted", "resolved", "unresolved", "error")
    report: dict[str, Any] = {f"{kind}_ids": lists.get(kind, []) for kind in kinds}
    return {**report, "total_instances": len({one for ids in lists.values() for one in ids}), "schema_version": 2}


def test_swe_bench(tmp_path: Path) -> None:
    """Everything that is not resolved counts as failed: errors, empty patches, instances never submitted."""
    report = swe_report(
        submitted=["a__a-1", "a__a-2", "b__b-10", "b__b-11"],
        completed=["a__a-1", "a__a-2"],
        resolved=["a__a-2"],
        unresolved=["a__a-1"],
        empty_patch=["b__b-10"],
        error=["b__b-11"],
        incomplete=["c__c-5"],
    )
    found = shown(read(tmp_path, "report.json", report, source("swe_bench")))
    assert found == [("a__a-1", "a__a", 0.0), ("a__a-2", "a__a", 1.0), ("b__b-10", "b__b", 0.0), ("b__b-11", "b__b", 0.0), ("c__c-5", "c__c", 0.0)]
    with pytest.raises(UserError, match="total_instances is 7 but its lists name 5"):
        read(tmp_path, "cut.json", {**report, "total_instances": 7}, source("swe_bench"))


def test_terminal_bench(tmp_path: Path) -> None:
    results = [
        {"trial_name": f"t.{i}", "task_id": task, "is_resolved": done} for i, (task, done) in enumerate([("fix", True), ("fix", None), ("mv", False)])
    ]
    assert shown(read(tmp_path, "results.json", {"results": results, "accuracy": 1 / 3}, source("terminal_bench"))) == [
        ("fix", "", 1.0),
        ("fix", "", 0.0),
        ("mv", "", 0.0),
    ]


def test_harbor_job_by_trials_and_by_its_summary(tmp_path: Path) -> None:
    """Both give the same attempts; a trial that ended in an exception scores 0, one that was rewarded before it counts its reward."""
    trials = {"fix__Ab1": ("fix", 1.0), "fix__Cd2": ("fix", 0.0), "a__b__Xy": ("a__b", None)}
    for name, (task, reward) in trials.items():
        (tmp_path / "job" / name).mkdir(parents=True)
        verdict = None if reward is None else {"rewards": {"reward": reward, "seconds": 3.0}}
        (tmp_path / "job" / name / "result.json").write_text(json.dumps({"task_name": task, "trial_name": name, "verifier_result": verdict}))
    by_trials = read_harness([tmp_path / "job"], source("harbor"))
    stats = {"reward_stats": {"reward": {"1.0": ["fix__Ab1"], "0.0": ["fix__Cd2"]}}, "exception_stats": {"Timeout": ["a__b__Xy", "fix__Ab1"]}}
    job = {"n_total_trials": 3, "stats": {"n_trials": 3, "n_errors": 2, "evals": {"agent__model": stats}}}
    by_summary = read(tmp_path, "result.json", job, source("harbor"))
    assert sorted(shown(by_trials)) == sorted(shown(by_summary)) == [("a__b", "", 0.0), ("fix", "", 0.0), ("fix", "", 1.0)]


def test_browsecomp(tmp_path: Path) -> None:
    summary = {"LLM": "x", "Accuracy (%)": 50.0, "per_query_metrics": [{"query_id": "1", "correct": True}, {"query_id": "2", "correct": False}]}
    assert shown(read(tmp_path, "evaluation_summary.json", summary, source("browsecomp"))) == [("1", "", 1.0), ("2", "", 0.0)]
    rows = '{"query_id": 4, "correct": true}\n{"query_id": 5, "correct": false}\n'
    assert shown(read(tmp_path, "rows.jsonl", rows, source("browsecomp"))) == [("4", "", 1.0), ("5", "", 0.0)]
    means = read(tmp_path, "simple_evals.json", {"is_correct": 0.113, "is_incorrect": 0.887, "score": 0.113}, source("browsecomp"))
    assert means.totals == (Total(0.113, None, 0),)


def test_lm_eval(tmp_path: Path) -> None:
    results = {
        "results": {"gsm8k": {"alias": "gsm8k", "exact_match,strict-match": 0.84, "exact_match_stderr,strict-match": 0.016, "em,none": 0.1}},
        "n-samples": {"gsm8k": {"original": 1319, "effective": 500}},
    }
    of = source("lm_eval", metric="exact_match,strict-match")
    assert read(tmp_path, "results.json", results, of).totals == (Total(0.84, 0.016, 500),)
    with pytest.raises(UserError, match=r"has 2 metrics .* so `metric` must name one"):
        read(tmp_path, "results.json", results, source("lm_eval"))
    samples = [
        {"doc_id": i, "filter": which, "metrics": ["exact_match"], "exact_match": float(i == 1)} for i in range(2) for which in ("strict-match", "x")
    ]
    text = "\n".join(map(json.dumps, samples))
    assert shown(read(tmp_path, "samples.jsonl", text, source("lm_eval", metric="exact_match,strict-match", task="gsm8k"))) == [
        ("gsm8k/0", "", 0.0),
        ("gsm8k/1", "", 1.0),
    ]


def test_nemo_evaluator(tmp_path: Path) -> None:
    page = """
results:
  groups: {}
  tasks:
    ifbench:
      metrics:
        score: {scores: {micro: {value: 52.04, stats: {count: 300, stderr: 2.9}}}}
"""
    (total,) = read(tmp_path, "results.yml", page, source("nemo_evaluator", scale="percent")).totals
    assert (total.value, total.stderr, total.n) == (pytest.approx(0.5204), pytest.approx(0.029), 300)
    with pytest.raises(UserError, match=r"a score of .* is 52.04; scores are shares in \[0, 1\]; .*`scale: percent`"):
        read(tmp_path, "results.yml", page, source("nemo_evaluator"))


@pytest.mark.parametrize("format_name", ["tau2", "swe_bench", "terminal_bench", "harbor", "browsecomp", "lm_eval", "nemo_evaluator"])
@pytest.mark.parametrize("text", ['{"other": 1}', "[1, 2]", "null", "{cut", '{"results": [1], "simulations": 3, "stats": []}'])
def test_a_file_of_another_format_is_a_user_error(tmp_path: Path, format_name: str, text: str) -> None:
    with pytest.raises(UserError, match=rf"is not a result file of {format_name}"):
        read(tmp_path, "file.json", text, source(format_name))


def test_missing_files_are_user_errors(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="does not exist"):
        read_harness([tmp_path / "absent.json"], source("tau2"))
    with pytest.raises(UserError, match="is a directory without result files of harbor"):
        read_harness([tmp_path], source("harbor"))


def test_shared_tau2_files(shared_data: Path) -> None:
    """Solved tasks and families of the real files, counted here without product code."""
    paths = sorted((shared_data / "tau2").glob("*.json"))
    reading = read_harness(paths, source("tau2"))
    expected = {}
    for path in paths:
        document = json.loads(path.read_text())
        judged = [one for one in document["simulations"] if one["reward_info"]]
        expected[document["info"]["environment_info"]["domain_name"]] = (len(judged), sum(one["reward_info"]["reward"] for one in judged))
    found = {family: [one.score for one in reading.attempts if one.family == family] for family in expected}
    assert {family: (len(scores), sum(scores)) for family, scores in found.items()} == expected
    assert len(reading.attempts) == 130
