"""The parity gate of `pivotrl train` on two processes: a fault in one of them ends all, with one message that names its place."""

from __future__ import annotations

from pathlib import Path

import pytest
from fakes.forked_commands import Command, run_commands
from fakes.parity_runs import copied_run, prepare_run

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
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """FOLDER/FAULT, a run that two processes with that fault refused to train, FOLDER/none, one that was trained, and what they printed."""
    folder = tmp_path_factory.mktemp("processes")
    prepared = prepare_run(folder / "prepared", "qwen3")

    def command(name: str, *words: str, fault: str, code: int) -> Command:
        run = copied_run(prepared, folder / name)
        return Command(["train", str(prepared / "transformers"), "--run", str(run), *words], 2, False, f"{run}.log", code, fault)

    refused = [command(fault, layout, fault=fault, code=2) for fault, (layout, _) in _CASES.items()]
    run_commands([*refused, command("none", _TP, "train.num_steps=2", fault="", code=0)], folder)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("fault", _CASES)
def test_a_fault_in_one_process_ends_all_and_is_named_once(finished: Path, fault: str) -> None:
    """Both with exit code 2 and nothing left of them, which `run_commands` sees to."""
    run, (_, expected) = finished / fault, _CASES[fault]
    printed, follower_printed = ((finished / f"{fault}.log.{rank}").read_text() for rank in range(2))
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
def test_the_same_processes_train_where_nothing_is_wrong(finished: Path) -> None:
    rows = list(read_jsonl(finished / "none" / "train" / METRICS))
    assert len(rows) == 2
    assert "sync/parity_difference/max" in rows[0]
