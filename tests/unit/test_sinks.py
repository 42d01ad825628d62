"""metrics.jsonl after a kill and resume is the file of an undisturbed run; non-finite values are seen, never hidden."""

from __future__ import annotations

import doctest
from pathlib import Path

import orjson
import pytest

from pivotrl.observability import sinks
from pivotrl.observability.sinks import MetricSink, SinkPosition, console_header, console_line


def rows(path: Path) -> list[dict[str, object]]:
    return [orjson.loads(line) for line in path.read_bytes().splitlines()]


def test_timing_goes_to_its_own_file(tmp_path: Path) -> None:
    with MetricSink(tmp_path) as sink:
        sink.write(0, {"rollout/reward/mean": 0.25, "time/train_s/sum": 1.5, "perf/rollout_tokens_per_s/mean": 90.0, "perf/env_turns/sum": 64})
    assert rows(tmp_path / "metrics.jsonl") == [{"step": 0, "rollout/reward/mean": 0.25, "perf/env_turns/sum": 64, "data/non_finite/count": 0}]
    assert rows(tmp_path / "timing.jsonl") == [{"step": 0, "time/train_s/sum": 1.5, "perf/rollout_tokens_per_s/mean": 90.0}]


def test_non_finite_values_become_null_and_are_counted(tmp_path: Path) -> None:
    with MetricSink(tmp_path) as sink:
        sink.write(
            4, {"objective/loss/mean": float("nan"), "optim/grad_norm/mean": float("inf"), "optim/lr/mean": 1e-6, "time/sync_s/sum": float("nan")}
        )
    assert rows(tmp_path / "metrics.jsonl") == [
        {"step": 4, "objective/loss/mean": None, "optim/grad_norm/mean": None, "optim/lr/mean": 1e-6, "data/non_finite/count": 2}
    ]


def test_unregistered_name_writes_nothing(tmp_path: Path) -> None:
    with MetricSink(tmp_path) as sink, pytest.raises(KeyError, match="rollout/revard/mean"):
        sink.write(0, {"rollout/reward/mean": 1.0, "rollout/revard/mean": 1.0})
    assert (tmp_path / "metrics.jsonl").read_bytes() == b""


def write_steps(sink: MetricSink, steps: range) -> None:
    for step in steps:
        sink.write(step, {"rollout/reward/mean": step / 10, "time/train_s/sum": 0.1 * step})


def test_resume_at_a_position_gives_the_undisturbed_bytes(tmp_path: Path) -> None:
    with MetricSink(tmp_path / "whole") as sink:
        write_steps(sink, range(10))
    with MetricSink(tmp_path / "cut") as sink:
        write_steps(sink, range(4))
        position = SinkPosition(**orjson.loads(orjson.dumps(sink.position().as_dict())))
        write_steps(sink, range(4, 7))
    with (tmp_path / "cut" / "metrics.jsonl").open("ab") as stream:
        stream.write(b'{"step":7,"rollout/rew')
    with MetricSink(tmp_path / "cut") as sink:
        sink.truncate(position)
        assert sink.position() == position
        write_steps(sink, range(4, 10))
    for name in ("metrics.jsonl", "timing.jsonl"):
        assert (tmp_path / "cut" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


def test_every_step_is_on_disk_before_the_next_starts(tmp_path: Path) -> None:
    sink = MetricSink(tmp_path)
    write_steps(sink, range(3))
    assert len(rows(tmp_path / "metrics.jsonl")) == 3
    sink.close()
    sink.close()


def test_truncate_refuses_a_file_that_lost_counted_steps(tmp_path: Path) -> None:
    with MetricSink(tmp_path) as sink, pytest.raises(ValueError, match="0 bytes but the checkpoint was taken at 50"):
        sink.truncate(SinkPosition(metrics_bytes=50, timing_bytes=0))


def test_console_lines_keep_their_columns() -> None:
    values = {"rollout/reward/mean": 0.5, "objective/loss/mean": -0.01234, "perf/env_turns/sum": 5760.0, "optim/grad_norm/mean": float("nan")}
    lines = [console_header(100), console_line(7, 100, values), console_line(100, 100, {})]
    assert len({len(line) for line in lines}) == 1
    assert "0.5000" in lines[1]
    assert "5,760" in lines[1]
    assert "nan" in lines[1]
    assert lines[2].split() == ["100/100", *["-"] * 12]


def test_console_lines_go_to_stderr(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with MetricSink(tmp_path) as sink:
        sink.show(1, 20, {"rollout/reward/mean": 0.5})
        sink.show(2, 20, {"rollout/reward/mean": 0.6})
    captured = capsys.readouterr()
    assert captured.out == ""
    assert [line.split()[0] for line in captured.err.splitlines()] == ["step", "1/20", "2/20"]


def test_examples_in_the_docstrings_run() -> None:
    assert doctest.testmod(sinks).failed == 0
