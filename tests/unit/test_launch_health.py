"""The check of nodes: what one process says of its node, and who is blamed where processes cannot meet. Processes are real, over gloo."""

from __future__ import annotations

import argparse
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from pivotrl.launching.health import neighbour_rounds, node_problem

ROOT = Path(__file__).resolve().parents[2]
OPTIONS = {"gpus": 0, "min_free_gib": 0.0, "max_clock_skew_s": 30.0, "min_pair_gb_per_s": 0.0, "timeout_s": 20.0}


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


@pytest.mark.slow
@pytest.mark.parametrize("absent", [frozenset[int](), frozenset({1})])
def test_processes_meet_and_an_absent_node_takes_no_other_along(tmp_path: Path, absent: frozenset[int]) -> None:
    (tmp_path / "token").write_text("7\n")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    nodes = ["a", "b", "c"]
    values = {**OPTIONS, "directory": tmp_path, "scratch": tmp_path, "token": "7", "first_node": "a"}
    words = [word for name, value in values.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    place = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
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
    assert [process.wait(timeout=120) for process in started] == [0] * len(started)
    verdicts = {path.stem: path.read_text().strip() for path in tmp_path.glob("?.0")}
    assert verdicts == {node: "ok" for rank, node in enumerate(nodes) if rank not in absent}
