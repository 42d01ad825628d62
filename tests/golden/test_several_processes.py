"""The command line on two processes: one program, one set of files, one exit code; and killed with SIGKILL it ends with the same bytes."""

from __future__ import annotations

import random
import shutil
import socket
import time
from pathlib import Path

import pytest
from fakes import forks
from fakes.stage_files import contents

RECIPE = forks.ROOT / "tests" / "golden" / "tiny_recipe"
# All stages at their smallest, training on two tensor parallel processes.
WHOLE = (
    "run",
    *("sft.num_steps=6", "sft.checkpoint_every=1", "profile.max_candidates=12", "train.num_steps=4", "train.checkpoint_every=1"),
    *("eval.suites=[{type: skills, num_examples: 4}]", "parallel.tensor_model_parallel_size=2"),
)


def _start(run: Path, *words: str, world_size: int = 2) -> list[forks.Forked]:
    """The processes a launcher would start."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [*words[:1], RECIPE, "--run", run, *words[1:]]
    meeting = {"WORLD_SIZE": str(world_size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    places = [{**meeting, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(world_size)]
    return [forks.start(command, environment=place) for place in places]


def _finish(processes: list[forks.Forked]) -> list[tuple[int, str]]:
    """(exit code, everything printed) of each."""
    return [(process.wait(timeout=600), process.printed()) for process in processes]


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that has done all before `sft`."""
    run = tmp_path_factory.mktemp("prepared") / "run"
    ((code, printed),) = _finish(_start(run, "ingest", world_size=1))
    assert code == 0, printed
    return run


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_killed_stages_end_with_the_same_bytes(prepared: Path, tmp_path: Path) -> None:
    """`sft` and `train` are killed, each after a checkpoint drawn at random; the killed run also writes its checkpoints in the background."""
    runs = [tmp_path / name for name in ("undisturbed", "killed")]
    for run in runs:
        shutil.copytree(prepared, run)
    (code, printed), (follower_code, follower_printed) = _finish(_start(runs[0], *WHOLE))
    assert (code, follower_code) == (0, 0), printed + follower_printed
    assert not follower_printed, "only process 0 speaks"

    words, moments = (*WHOLE, "parallel.async_save=true"), random.Random(3)
    for stage, last in (("sft", 5), ("train", 3)):
        _kill_at(_start(runs[1], *words), runs[1] / stage / "checkpoints" / f"step_{moments.randrange(1, last):08d}")
        assert not (runs[1] / stage / "manifest.json").exists()
    assert all(code == 0 for code, _ in _finish(_start(runs[1], *words)))

    for stage, num_steps in (("sft", 6), ("train", 4)):
        expected, actual = (contents(run / stage) for run in runs)
        assert sorted(actual) == sorted(expected)
        assert [name for name in expected if actual[name] != expected[name]] == []
        assert expected["metrics.jsonl"].count(b"\n") >= num_steps


def _kill_at(processes: list[forks.Forked], sign: Path) -> None:
    """Kills all of them as soon as `sign` exists."""
    while all(process.poll() is None for process in processes) and not sign.exists():
        time.sleep(0.002)
    for process in processes:
        process.kill()
    assert all(code < 0 for code, _ in _finish(processes)), "the stage was faster than the killer"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "named"),
    [
        (("sft", "parallel.tensor_model_parallel_size=3"), "tensor_model_parallel_size x pipeline_model_parallel_size"),
        (("sft", "parallel.expert_model_parallel_size=2"), "expert_model_parallel_size is 2 and the model has no experts"),
        (("sft", "parallel.tensor_parallel=2"), "unknown key parallel.tensor_parallel"),
    ],
)
def test_a_users_error_ends_every_process_with_2_and_is_said_once(prepared: Path, tmp_path: Path, words: tuple[str, ...], named: str) -> None:
    run = tmp_path / "run"
    shutil.copytree(prepared, run)
    (code, printed), (follower_code, follower_printed) = _finish(_start(run, *words))
    assert (code, follower_code, follower_printed) == (2, 2, "")
    assert printed.count("pivotrl: error:") == 1
    assert named in printed
