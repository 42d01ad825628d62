"""Runs jobs in groups of 1, 2, 4 ... ranks that meet over gloo: one program imports everything once and forks the ranks of every group.

    fakes.ranks:main WORKER.py JOBS.json RESULTS.json

Imports take some twenty times as long as a tiny model's step, so a process per rank and group, each with its own imports, is what such tests
would spend their time on. WORKER.py has `measure(job)`; JOBS.json maps a number of ranks to its jobs, group after group in the file's order.
All ranks of a group run all of its jobs in turn and must measure the same.
"""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import socket
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from fakes import forks

type Measure = Callable[[Any], Any]


def measure_on_ranks(worker: Path, jobs: Mapping[int, Sequence[Any]], directory: Path) -> dict[int, list[Any]]:
    """What `measure` of a worker file answered for every job, by number of ranks; a job that fails on any rank fails the test.

    Args:
        worker: the file; its folder is importable within it.
        jobs: JSON-ready, by number of ranks.
        directory: where to exchange files.
    """
    files = [directory / f"{worker.stem}_{name}.json" for name in ("jobs", "results")]
    files[0].write_text(json.dumps(jobs))
    program = forks.start([worker, *files], program="fakes.ranks:main")
    assert program.wait() == 0, program.printed()[-8000:]
    return {int(size): answers for size, answers in json.loads(files[1].read_text()).items()}


def main() -> None:
    """Runs every group; exit code 1, the other ranks of a group ended, where one of its ranks failed."""
    worker, jobs_file, results_file = (Path(word) for word in sys.argv[1:])
    measure = _load(worker)
    results = {}
    for size, jobs in json.loads(jobs_file.read_text()).items():
        answers_file = results_file.with_suffix(f".{size}")
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            os.environ |= {"WORLD_SIZE": size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(probe.getsockname()[1])}
        _wait([_fork(rank, measure, jobs, answers_file) for rank in range(int(size))])
        results[size] = json.loads(answers_file.read_text())
    results_file.write_text(json.dumps(results))


def _load(worker: Path) -> Measure:
    sys.path.insert(0, str(worker.parent))
    spec = importlib.util.spec_from_file_location(worker.stem, worker)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[worker.stem] = module
    spec.loader.exec_module(module)
    return module.measure


def _fork(rank: int, measure: Measure, jobs: Sequence[Any], answers_file: Path) -> int:
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        os.environ["RANK"] = str(rank)
        _run(measure, jobs, answers_file)
        code = 0
    except BaseException:  # noqa: BLE001 (the child must end here, whatever happened, and not go on as a second parent)
        traceback.print_exc()
    sys.stderr.flush()
    os._exit(code)


def _run(measure: Measure, jobs: Sequence[Any], answers_file: Path) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    measured = []
    for job in jobs:
        measured.append(measure(job))
        everywhere: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everywhere, measured[-1])
        assert all(each == measured[-1] for each in everywhere), f"ranks disagree about {job}"
    if dist.get_rank() == 0:
        answers_file.write_text(json.dumps(measured))
    dist.barrier()


def _wait(children: list[int]) -> None:
    running = set(children)
    while running:
        child, status = os.wait()
        running.discard(child)
        if status:
            # The others wait for the one that is gone.
            for other in running:
                os.kill(other, signal.SIGKILL)
            sys.exit(1)
