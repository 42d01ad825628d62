"""The parity gate of `pivotrl train` on two processes: a fault in one of them ends all, with one message that names its place."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from fakes.parity_runs import ROOT, copied_run, prepare_run

from pivotrl.observability.sinks import METRICS, PARITY_FINDINGS
from pivotrl.rundir import read_jsonl

_TP = "parallel.tensor_model_parallel_size=2"
# Fault, layout, and what the message says.
_CASES: dict[str, tuple[str, tuple[str, ...]]] = {
    "layer": (
        _TP,
        (
            "step 0: layer 1: the trainer (tensor parallel 2) and transformers give different outputs from the same weights",
            "a trainer of one process does not: the layout is at fault; the axis that differs alone is tensor parallel 2 (at layer 1); "
            "no difference has data parallelism; 2 layouts tried",
        ),
    ),
    "replica": (
        "parallel.tensor_model_parallel_size=1",
        (
            "step 0: layer 1: the trainer (no model parallelism) and transformers",
            "in the data parallel replica of process 1 alone; a trainer of one process does not",
        ),
    ),
    "weights": (
        "parallel.tensor_model_parallel_size=1",
        (
            "step 0: weights: processes 0 and 1 of the trainer should hold the same and do not: ",
            ": decoder.layers.mlp.linear_fc1.layer_norm_weight of layer 0 (1 part differs between its copies)",
        ),
    ),
    "engine": (_TP, ("step 0: shift: off by one",)),
}


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepare_run(tmp_path_factory.mktemp("qwen3"), "qwen3")


def _train(fault: str, prepared: Path, run: Path, *words: str) -> tuple[list[tuple[int, str]], list[int]]:
    """(exit code, everything printed) of both processes, and the ids of processes that they left behind."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "fakes.faulty_train", fault, "train", str(prepared / "transformers"), "--run", str(run), *words]
    shared = {
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "PYTHONPATH": os.pathsep.join((str(ROOT), str(ROOT / "tests"))),
    }
    environments = [{**os.environ, **shared, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(2)]
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "start_new_session": True}
    processes = [subprocess.Popen(command, cwd=ROOT, env=environment, **streams) for environment in environments]
    printed = ["".join(process.communicate(timeout=600)) for process in processes]
    sessions = {process.pid for process in processes}
    return [(process.returncode, text) for process, text in zip(processes, printed, strict=True)], _of_sessions(sessions)


def _of_sessions(sessions: set[int]) -> list[int]:
    """Running processes that belong to one of these sessions."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            continue
        if int(fields[3]) in sessions and fields[0] != "Z":
            found.append(int(stat.parent.name))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("fault", _CASES)
def test_a_fault_in_one_process_ends_all_and_is_named_once(prepared: Path, tmp_path: Path, fault: str) -> None:
    layout, expected = _CASES[fault]
    run = copied_run(prepared, tmp_path / "run")
    ((code, printed), (follower_code, follower_printed)), left = _train(fault, prepared, run, layout)
    assert (code, follower_code) == (2, 2), printed + follower_printed
    assert left == []
    assert "pivotrl: error:" not in follower_printed
    assert "Traceback" not in printed + follower_printed
    (line,) = (line for line in printed.splitlines() if line.startswith("pivotrl: error:"))
    for words in expected:
        assert words in line
    (finding,) = read_jsonl(run / "train" / PARITY_FINDINGS)
    assert f"step 0: {finding['place']}: " in line
    assert (run / "train" / METRICS).read_bytes() == b""
    assert not any((run / "train" / "checkpoints").iterdir())
    assert not list((run / "train").glob("parity_*/"))


@pytest.mark.slow
def test_the_same_processes_train_where_nothing_is_wrong(prepared: Path, tmp_path: Path) -> None:
    run = copied_run(prepared, tmp_path / "run")
    answers, left = _train("none", prepared, run, _TP, "train.num_steps=2")
    assert [code for code, _ in answers] == [0, 0], answers
    assert left == []
    assert "sync/parity_difference/max" in next(iter(read_jsonl(run / "train" / METRICS)))
