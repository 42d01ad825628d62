"""Run directories: the marker comes last, a manifest has no clock, and another config cannot write into finished output."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from pivotrl.errors import UserError
from pivotrl.identity import content_id, derive_seed, file_id
from pivotrl.metrics import check_name, register
from pivotrl.rundir import SUCCESS, Stage, atomic_write, open_parquet, output_hash, read_json, read_jsonl, write_jsonl


def _stage(run: Path, config: dict[str, int]) -> Stage:
    return Stage.open(run, "select", config=config, inputs={"profile": "ab"}, seed=3)


def test_manifest_is_the_same_at_another_time(tmp_path: Path) -> None:
    manifests = []
    for name in ("a", "b"):
        stage = _stage(tmp_path / name, {"k": 1})
        atomic_write(stage.path / "data.bin", b"xyz")
        time.sleep(0.02)
        stage.finish(outputs=["data.bin"], summary={"kept": 2})
        manifests.append((stage.path / "manifest.json").read_bytes())
    assert manifests[0] == manifests[1]
    manifest = read_json(tmp_path / "a" / "select" / "manifest.json")
    assert manifest["outputs"] == {"data.bin": file_id(tmp_path / "a" / "select" / "data.bin")}
    assert manifest["summary"] == {"kept": 2}
    assert output_hash(tmp_path / "a" / "select") == output_hash(tmp_path / "b" / "select")


def test_success_is_written_last_and_required(tmp_path: Path) -> None:
    stage = _stage(tmp_path, {"k": 1})
    with pytest.raises(UserError, match=SUCCESS):
        Stage.require(tmp_path, "select")
    with pytest.raises(FileNotFoundError):
        stage.finish(outputs=["absent"], summary={})
    assert not Stage.is_done(tmp_path, "select")
    stage.finish(outputs=[], summary={})
    assert Stage.require(tmp_path, "select") == stage.path


def test_another_config_does_not_mix_into_a_directory(tmp_path: Path) -> None:
    _stage(tmp_path, {"k": 1})
    _stage(tmp_path, {"k": 1})
    with pytest.raises(UserError, match="another config"):
        _stage(tmp_path, {"k": 2})


def test_jsonl_keeps_line_separators_inside_strings(tmp_path: Path) -> None:
    rows = [{"text": "a\u2028b\u2029c\u0085d\ne"}]
    write_jsonl(tmp_path / "rows.jsonl", rows)
    assert list(read_jsonl(tmp_path / "rows.jsonl")) == rows


def test_seeds_depend_on_the_place_and_fit_an_engine() -> None:
    seeds = {derive_seed(run, "rollout", step, "p", sample) for run in range(3) for step in range(20) for sample in range(20)}
    assert len(seeds) == 3 * 20 * 20
    assert all(0 <= seed < 2**62 for seed in seeds)
    assert content_id("a", "b") != content_id("ab")


@pytest.mark.parametrize("name", ["reward", "rollout/reward", "other/reward/mean", "rollout/reward/median", "rollout/reward/mean"])
def test_metric_names_follow_the_grammar_once(name: str) -> None:
    with pytest.raises(ValueError, match="metric name"):
        register(name, "meaning")


def test_an_unregistered_metric_is_an_error() -> None:
    with pytest.raises(KeyError, match="not registered"):
        check_name("rollout/unheard_of/mean")


@pytest.mark.parametrize("data", [b"", b"{", b'{"a": 1}\n{"b', b"\xff\x00", b"PAR1 and no more"])
def test_a_damaged_file_is_the_users_error_and_named(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "file"
    path.write_bytes(data)
    for read in (read_json, open_parquet, lambda path: list(read_jsonl(path))):
        if data == b"" and read not in (read_json, open_parquet):
            continue  # no rows are rows
        with pytest.raises(UserError, match=str(path)):
            read(path)


def test_rows_of_a_file_that_grows_end_with_its_last_whole_line(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 0}\n{"step": 1')
    assert list(read_jsonl(path, is_growing=True)) == [{"step": 0}]
