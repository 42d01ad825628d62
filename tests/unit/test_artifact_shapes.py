"""Wrong-shaped JSON of a run directory ends as a user's error that names the file, in every verb that reads it, and never in a traceback.

Every artifact of a small finished run is mutated at every key down to the third: taken out, a number, a list; also as a whole. A verb may do
without what was changed, or refuse it by name; keys that it needs are listed apart and must be refused.
"""

from __future__ import annotations

import copy
import shutil
from collections.abc import Callable, Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any, cast

import orjson
import pytest
from fakes.runs import write_whole_run
from fakes.table_runs import write_arm

from pivotrl.artifacts import EvalUnit, GenerationConfig, JobsRecord, UnitRow, check_shape, read_artifact
from pivotrl.config.schema import Eq5Rule
from pivotrl.config.tables import TablesConfig
from pivotrl.errors import UserError
from pivotrl.evaluation.summary import final_table, turns_used
from pivotrl.evaluation.tables.sources import read_results
from pivotrl.launching.slurm import JOBS, recorded
from pivotrl.observability.readings import read_run
from pivotrl.observability.report import render_page
from pivotrl.pivots.dataset import PivotStore
from pivotrl.pivots.parquet import read_rows, write_rows
from pivotrl.profiling.selection import run_select
from pivotrl.rundir import Stage, output_hash, read_json, write_json, write_jsonl
from pivotrl.training.pivot_sets import PIVOT_SETS, set_dir
from pivotrl.verbs.reprofile import print_lineage

# Every key that is read lies within; below are settings and counts that are shown as they stand.
_MAX_DEPTH = 3
_OTHERS: tuple[object, ...] = (None, [], {}, "x", -1.5, [1])


def _report(run: Path) -> None:
    render_page(read_run(run))


def _select_again(run: Path) -> None:
    shutil.rmtree(run / "select")
    stage = Stage.open(run, "select", config={}, inputs={"profile": output_hash(run / "profile")}, seed=7)
    run_select(stage, run / "profile", Eq5Rule(rule="eq5", lambda_diff=Decimal("0.6")), run_seed=7)


def _pivots(run: Path) -> None:
    output_hash(run / "select")
    PivotStore.open(run / "select")


def _jobs(run: Path) -> None:
    recorded(run / "launch")


def _result(run: Path) -> None:
    final_table(run)


def _tables(run: Path) -> None:
    read_results(_SPECIFICATION, spec=run / "spec.yaml")
    turns_used(run / "desk" / "sft-0")


_SPECIFICATION = TablesConfig.model_validate(
    {
        "name": "one arm",
        "root": "{spec}",
        "domains": [{"name": "desk", "title": "desk"}],
        "results": [{"type": "run", "arm": "sft", "domains": ["desk"], "seeds": [0], "path": "{domain}/{arm}-{seed}"}],
    }
)
# Files that a verb may read, and keys that it cannot do without.
VERBS: dict[str, tuple[Callable[[Path], None], tuple[str, ...], tuple[tuple[str, str], ...]]] = {
    "lineage": (
        print_lineage,
        ("profile/manifest.json", "select/selection.json", "train/ledger.jsonl", "pivot_sets/00000002/declined.json"),
        (
            ("profile/manifest.json", "summary"),
            ("profile/manifest.json", "summary.cost.turns"),
            ("profile/manifest.json", "summary.provenance.policy_hash"),
            ("select/selection.json", "num_pivots"),
            ("train/ledger.jsonl", "0.step"),
            ("pivot_sets/00000002/declined.json", "why"),
        ),
    ),
    "report": (
        _report,
        (
            *("profile/manifest.json", "profile/timing.json", "select/selection.json", "train/metrics.jsonl", "train/rollouts.jsonl"),
            *("train/validation.jsonl", "train/manifest.json", "eval/scores.json", "ingest/manifest.json"),
        ),
        (),
    ),
    "run": (
        _result,
        ("eval/scores.json", "profile/manifest.json", "train/metrics.jsonl"),
        (("eval/scores.json", "suites.0.n"), ("eval/scores.json", "differences"), ("profile/manifest.json", "summary.cost")),
    ),
    "select": (_select_again, ("profile/manifest.json",), (("profile/manifest.json", "outputs"), ("profile/manifest.json", "summary.provenance"))),
    "train": (
        _pivots,
        ("select/manifest.json", "select/selection.json"),
        (("select/manifest.json", "outputs"), ("select/selection.json", "provenance")),
    ),
    "status": (_jobs, ("launch/jobs.json",), (("launch/jobs.json", "slurm_conf"), ("launch/jobs.json", "submissions.0.job_id"))),
}
TABLE_FILES = ("eval/manifest.json", "eval/units/world-trained.json", "train/metrics.jsonl", "profile/manifest.json")


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("finished") / "run"
    run.mkdir()
    write_whole_run(run)
    (run / "eval" / "_SUCCESS").touch()
    manifest = read_json(run / "profile" / "manifest.json")
    manifest["summary"]["provenance"]["policy_hash"] = "p0licyhash"
    write_json(run / "profile" / "manifest.json", manifest)
    write_jsonl(run / "train" / "ledger.jsonl", [{"step": 0, "pivot_set": "0"}, {"step": 1}])
    declined = set_dir(run / PIVOT_SETS, 2)
    (declined / "profile").mkdir(parents=True)
    write_json(declined / "profile" / "manifest.json", manifest)
    write_json(declined / "declined.json", {"reason": "asked for", "why": "2 pivots are left"})
    (run / "launch").mkdir()
    job = {"stage": "train", "job_id": "7", "num_shards": 1, "depends_on": None, "command": ["sbatch"], "submitted_at": "2026-01-01T00:00:00"}
    write_json(run / "launch" / JOBS, {"cluster": "c", "slurm_conf": None, "path": "/usr/bin", "submissions": [job]})
    return run


def _mutations(value: Any) -> Iterator[tuple[str, Any]]:
    """(what was done, the changed value): the whole replaced, every key taken out, and replaced; of lists the first element."""
    yield from ((f"all is {other!r}", other) for other in _OTHERS)
    for path in _paths(value):
        words = ".".join(map(str, path))
        yield f"without {words}", _changed(value, path)
        yield f"{words} is -1.5", _changed(value, path, -1.5)
        yield f"{words} is a list", _changed(value, path, [1])


def _paths(value: Any, above: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    if len(above) == _MAX_DEPTH:
        return
    children = list(value.items()) if isinstance(value, dict) else list(enumerate(value))[:1] if isinstance(value, list) else []
    for key, child in cast("list[tuple[Any, Any]]", children):
        yield (*above, key)
        yield from _paths(child, (*above, key))


def _changed(value: Any, path: tuple[Any, ...], *replacement: object) -> Any:
    changed = copy.deepcopy(value)
    owner = changed
    for key in path[:-1]:
        owner = owner[key]
    if replacement:
        owner[path[-1]] = replacement[0]
    else:
        del owner[path[-1]]
    return changed


def _read(path: Path) -> Any:
    return [orjson.loads(line) for line in path.read_bytes().splitlines()] if path.suffix == ".jsonl" else read_json(path)


def _write(path: Path, value: Any) -> None:
    if path.suffix == ".jsonl":
        path.write_bytes(b"".join(orjson.dumps(row) + b"\n" for row in (value if isinstance(value, list) else [value])))
    else:
        write_json(path, value)


def _refusals(verb: Callable[[Path], None], original: Path, file: str, tmp_path: Path) -> dict[str, str]:
    """What the verb said of every mutation that it refused; any other exception is the test's failure, with the mutation named."""
    run, said = shutil.copytree(original, tmp_path / "run"), dict[str, str]()
    for what, changed in _mutations(_read(original / file)):
        if (original / "select").exists():
            # The verb `select` makes it anew.
            shutil.rmtree(run / "select", ignore_errors=True)
            shutil.copytree(original / "select", run / "select")
        _write(run / file, changed)
        try:
            verb(run)
        except UserError as error:
            said[what] = str(error)
        except Exception as error:  # noqa: BLE001 (which mutation it was is what the failure must say)
            pytest.fail(f"{file}, {what}: {type(error).__name__}: {error}")
    return said


@pytest.mark.parametrize(("verb", "file"), [(verb, file) for verb, (_, files, _) in VERBS.items() for file in files])
def test_every_mutation_is_refused_by_name_or_done_without(verb: str, file: str, finished: Path, tmp_path: Path) -> None:
    work, _, needed = VERBS[verb]
    work(shutil.copytree(finished, tmp_path / "whole"))
    said = _refusals(work, finished, file, tmp_path)
    assert all(file in words for words in said.values()), said
    for key in (key for name, key in needed if name == file):
        assert key.rpartition(".")[2] in said[f"without {key}"]
        assert file in said[f"{key} is -1.5"]


@pytest.mark.parametrize("file", TABLE_FILES)
def test_tables_refuse_every_mutation_by_name_or_do_without(file: str, tmp_path: Path) -> None:
    original = tmp_path / "original"
    write_arm(original / "desk" / "sft-0", "sft", 0, curve=(0.4, 0.5))
    said = _refusals(_tables, original, f"desk/sft-0/{file}", tmp_path)
    assert said
    assert all(file in words for words in said.values())


def test_a_unit_of_eval_and_of_profile_is_refused_by_key(tmp_path: Path) -> None:
    item = {"item": "a#0", "cluster": "a", "facet": "", "score": 1.0, "num_turns": 1}
    write_json(tmp_path / "unit.json", {"items": [item, {**item, "score": "high"}], "samples": []})
    with pytest.raises(UserError, match=r"unit.json: items.1.score is 'high'"):
        read_artifact(tmp_path / "unit.json", EvalUnit)
    with pytest.raises(UserError, match=r"rollouts.0.verdict is missing"):
        check_shape({"profile": {}, "rollouts": [{"num_tokens": 1}], "expert_was_infra": False}, UnitRow, source="x")
    write_json(tmp_path / "jobs.json", [])
    with pytest.raises(UserError, match=r"jobs.json holds list"):
        read_artifact(tmp_path / "jobs.json", JobsRecord)


def test_a_set_that_the_run_does_not_hold_is_named(finished: Path, tmp_path: Path) -> None:
    run = shutil.copytree(finished, tmp_path / "run")
    write_jsonl(run / "train" / "ledger.jsonl", [{"step": 0, "pivot_set": "00000009"}])
    with pytest.raises(UserError, match=r"ledger.jsonl: pivot_set is '00000009'"):
        print_lineage(run)


def test_a_missing_column_is_named(tmp_path: Path) -> None:
    write_rows(tmp_path / "rows.parquet", {"one": "string"}, [{"one": "a"}])
    with pytest.raises(UserError, match=r"rows.parquet has no column 'two'"):
        list(read_rows(tmp_path / "rows.parquet", ("one", "two")))


def test_end_tokens_of_a_checkpoint_are_one_id_some_or_none(tmp_path: Path) -> None:
    path = tmp_path / "generation_config.json"
    for allowed in ({}, {"eos_token_id": None}, {"eos_token_id": 2}, {"eos_token_id": [2, 3]}):
        write_json(path, allowed)
        assert read_artifact(path, GenerationConfig) == allowed
    for refused in ("2", [2, "3"], 2.5, {"id": 2}):
        write_json(path, {"eos_token_id": refused})
        with pytest.raises(UserError, match=r"generation_config.json: eos_token_id"):
            read_artifact(path, GenerationConfig)
