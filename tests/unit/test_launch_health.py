"""The check of nodes: what one process says of its node, and who is blamed where processes cannot meet. Processes are real, over gloo."""

from __future__ import annotations

import argparse
import os
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import pytest
from torch.distributed import HashStore, TCPStore  # pyright: ignore[reportPrivateImportUsage]

from pivotrl.launching import health
from pivotrl.launching.health import Place, Stages, exchange_problem, first_word, neighbour_rounds, node_problem

ROOT = Path(__file__).resolve().parents[2]
OPTIONS = {"gpus": 0, "min_free_gib": 0.0, "max_clock_skew_s": 30.0, "min_pair_gb_per_s": 0.0, "startup_s": 20.0, "timeout_s": 20.0}


def _options(directory: Path, **changes: object) -> argparse.Namespace:
    return argparse.Namespace(**{**OPTIONS, "directory": directory, "scratch": directory, "token": "7", "first_node": "a", **changes})


def test_a_healthy_node_has_no_problem(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("7\n")
    assert node_problem(_options(tmp_path)) == ""


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"token": "8", "timeout_s": 0.1}, "as the first node wrote it"),
        ({"min_free_gib": 1e9}, "GiB are free"),
        ({"scratch": Path("/nonexistent")}, "/nonexistent: No such file"),
        ({"gpus": 8}, "GPUs are usable, 8 should be"),
    ],
)
def test_a_bad_node_says_why(tmp_path: Path, changes: dict[str, object], named: str) -> None:
    (tmp_path / "token").write_text("7\n")
    problem = node_problem(_options(tmp_path, **changes))
    assert problem.startswith("bad ")
    assert named in problem


@pytest.mark.parametrize("num_nodes", range(2, 10))
def test_every_node_meets_two_neighbours_and_one_at_a_time(num_nodes: int) -> None:
    rounds = neighbour_rounds(num_nodes)
    for pairs in rounds:
        members = [index for pair in pairs for index in pair]
        assert len(members) == len(set(members))
    met = {index: {other for pairs in rounds for pair in pairs if index in pair for other in pair} - {index} for index in range(num_nodes)}
    assert all(len(others) == min(2, num_nodes - 1) for others in met.values())


def test_the_others_outlast_the_first_process_that_waits_for_an_absent_node() -> None:
    """The first one's wait begins after the others', whose stores give up after the same time unless they are told otherwise."""
    patience_s = 1.0
    held = TCPStore("127.0.0.1", 0, is_master=True, timeout=timedelta(seconds=patience_s), wait_for_workers=False)
    store = TCPStore("127.0.0.1", held.port, is_master=False, timeout=timedelta(seconds=patience_s))
    with ThreadPoolExecutor() as threads:
        other = threads.submit(first_word, store, Place("b", 1, 3, 0, 1), is_first=False, patience_s=patience_s)
        time.sleep(patience_s / 2)
        first = threads.submit(first_word, held, Place("a", 0, 3, 0, 1), is_first=True, patience_s=patience_s)
        assert first.result() == (0.0, frozenset({0, 1}))
        assert other.result()[1] == frozenset({0, 1})
    # It is told so, too, by everyone's list: nobody will exchange anything with it.
    assert first_word(held, Place("c", 2, 3, 0, 1), is_first=False, patience_s=patience_s)[1] == frozenset({0, 1})


def test_nodes_are_waited_for_as_long_as_they_may_take_to_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An image that takes minutes to unpack on one of many nodes is no reason to exclude it."""
    waited: list[float] = []

    def word(*_: object, patience_s: float, **__: object) -> tuple[float, frozenset[int]]:
        waited.append(patience_s)
        return 0.0, frozenset({0})

    monkeypatch.setattr(health, "first_word", word)
    monkeypatch.setattr(health, "exchange_problem", lambda *_: "")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(_port()))
    assert health.group_problem(Place("a", 0, 2, 0, 1), _options(tmp_path, startup_s=900.0, timeout_s=1.0)) == ""
    assert waited == [900.0]


@pytest.mark.parametrize("num_nodes", [4, 5])
def test_a_node_that_hangs_takes_no_neighbour_along(monkeypatch: pytest.MonkeyPatch, num_nodes: int) -> None:
    """Node 0 waits for the hanging node 1 in the first round, as long as anyone waits, while its other neighbour has nothing to wait for yet."""
    patience_s, hanging = 1.0, 1
    meetings = {f"pair/{a}-{b}/0": threading.Barrier(2) for pairs in neighbour_rounds(num_nodes) for a, b in pairs}

    def try_group(name: str, rank: int, size: int, options: argparse.Namespace, *, min_gb_per_s: float) -> str:
        try:
            if str(hanging) not in name.split("/")[1].split("-"):
                meetings[name].wait(patience_s)
                return ""
        except threading.BrokenBarrierError:
            return "nobody came"
        # A child that hangs is also ended, which takes its time.
        time.sleep(1.5 * patience_s)
        return "it hangs"

    monkeypatch.setattr(health, "_try_group", try_group)
    store, options = HashStore(), argparse.Namespace(min_pair_gb_per_s=0.0)

    def problem(index: int) -> str:
        return exchange_problem(Stages(store, num_nodes, patience_s), Place("n", index, num_nodes, 0, 1), frozenset(range(num_nodes)), options)

    with ThreadPoolExecutor(num_nodes) as threads:
        problems = list(threads.map(problem, range(num_nodes)))
    assert [index for index, verdict in enumerate(problems) if verdict] == [hanging]


def _port() -> int:
    """One that no other process is given: below those that the kernel hands out, begun at this process's own place."""
    low = 16000 + os.getpid() % 8000
    for port in range(low, low + 8000):
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise AssertionError("no port is free")


@pytest.mark.slow
@pytest.mark.parametrize("absent", [frozenset[int](), frozenset({1})])
def test_processes_meet_and_an_absent_node_takes_no_other_along(tmp_path: Path, absent: frozenset[int]) -> None:
    (tmp_path / "token").write_text("7\n")
    nodes = ["a", "b", "c"]
    values = {**OPTIONS, "directory": tmp_path, "scratch": tmp_path, "token": "7", "first_node": "a"}
    words = [word for name, value in values.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    place = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(_port()),
        "WORLD_SIZE": "3",
        "SLURM_NTASKS": "3",
        "SLURM_STEP_NUM_NODES": "3",
        "LOCAL_RANK": "0",
    }
    started = [
        subprocess.Popen(
            [sys.executable, "-m", "pivotrl.launching.health", *words],
            env={**os.environ, **place, "GLOO_SOCKET_IFNAME": "lo", "RANK": str(rank), "SLURMD_NODENAME": node},
            cwd=ROOT,
        )
        for rank, node in enumerate(nodes)
        if rank not in absent
    ]
    assert [process.wait(timeout=600) for process in started] == [0] * len(started)
    verdicts = {path.stem: path.read_text().strip() for path in tmp_path.glob("?.0")}
    assert verdicts == {node: "ok" for rank, node in enumerate(nodes) if rank not in absent}
