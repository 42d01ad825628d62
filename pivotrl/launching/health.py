"""The check of a job's nodes before its work starts: `python -m pivotrl.launching.health`, one process per GPU, started by health.sh.

Each process writes one line to DIRECTORY/<node>.<local rank>: `ok`, `bad REASON`, `silent REASON` where it came too late, or
`blames NODE REASON`. Tested are: the GPUs that the node should have, room on its own disk and below the run, the run's directory as the
first node wrote it, the clock against the first node's, an all-reduce among the processes of a node, and one with each neighbour (NCCL
on GPUs, gloo elsewhere). With three nodes or more a node is bad where no neighbour could exchange with it, so that a bad node does not
take its neighbours along; of two nodes that cannot exchange both are. A process whose collective hangs or dies is a child's, so that the
parent still reports.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.distributed import Store  # pyright: ignore[reportPrivateImportUsage]

_GIB = 2**30
_GIGA = 1e9
_PAIR_BYTES = 64 * 2**20
_NUM_REDUCTIONS = 3
# A network file system may show a new file only after its caches have expired.
_FILE_PATIENCE_S = 60.0
# A machine under load may take seconds to start or to end a process, or to see that a wait is over.
_SLACK_S = 5.0
_OK = "ok"


@dataclass(frozen=True, slots=True)
class Place:
    """Where this process stands."""

    node: str
    node_index: int
    num_nodes: int
    local_rank: int
    per_node: int


def main(words: Sequence[str] | None = None) -> None:
    """Checks and writes the verdict."""
    parser = argparse.ArgumentParser(prog="python -m pivotrl.launching.health", description="Checks one process's node.")
    parser.add_argument("--directory", type=Path, required=True)
    parser.add_argument("--token", required=True)
    parser.add_argument("--first-node", required=True)
    parser.add_argument("--gpus", type=int, required=True)
    parser.add_argument("--scratch", type=Path, required=True)
    for name in ("--min-free-gib", "--max-clock-skew-s", "--min-pair-gb-per-s", "--startup-s", "--timeout-s"):
        parser.add_argument(name, type=float, required=True)
    options = parser.parse_args(words)
    rank, size, local = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
    per_node = int(os.environ["SLURM_NTASKS"]) // int(os.environ["SLURM_STEP_NUM_NODES"])
    place = Place(os.environ["SLURMD_NODENAME"], rank // per_node, size // per_node, local, per_node)
    verdict = node_problem(options) or group_problem(place, options) or _OK
    (options.directory / f"{place.node}.{local}").write_text(verdict + "\n")


def node_problem(options: argparse.Namespace) -> str:
    """What is wrong with this node by itself, as a verdict; empty where nothing is."""
    deadline_s = time.monotonic() + min(_FILE_PATIENCE_S, options.timeout_s)
    token = options.directory / "token"
    while not (token.is_file() and token.read_text().strip() == options.token):
        if time.monotonic() > deadline_s:
            return f"bad it does not see {token} as the first node wrote it"
        time.sleep(0.5)
    for directory in (options.scratch, options.directory):
        try:
            free_gib = shutil.disk_usage(directory).free / _GIB
        except OSError as error:
            return f"bad {directory}: {error.strerror}"
        if free_gib < options.min_free_gib:
            return f"bad {free_gib:.1f} GiB are free below {directory}, {options.min_free_gib:g} are asked for"
    if options.gpus:
        found = _answer_of_child(_num_gpus, (), options.timeout_s)
        if found != options.gpus:
            return f"bad {found} GPUs are usable, {options.gpus} should be"
    return ""


def group_problem(place: Place, options: argparse.Namespace) -> str:
    """What is wrong between this process and the others, as a verdict; empty where nothing is."""
    if place.num_nodes * place.per_node == 1:
        return ""
    from torch.distributed import DistError, TCPStore  # pyright: ignore[reportPrivateImportUsage]

    # Containers and imports take nodes differently long; what begins once all are there is measured by the shorter limit.
    patience = timedelta(seconds=options.startup_s)
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    is_first = place.node_index == place.local_rank == 0
    try:
        store = TCPStore(address, port, is_master=is_first, timeout=patience, wait_for_workers=False)
        skew_s, present = first_word(store, place, is_first=is_first, patience_s=options.startup_s)
        if place.node_index not in present:
            return f"silent its processes were not all there within {options.startup_s:g} s of the first node's"
        # A node whose clock is off takes part, or the others would wait for it.
        problem = exchange_problem(Stages(store, len(present) * place.per_node, options.timeout_s), place, present, options)
        if skew_s > options.max_clock_skew_s:
            problem = f"bad its clock differs by {skew_s:.1f} s from the first node's, {options.max_clock_skew_s:g} s are allowed"
        store.add("done", 1)
        if is_first:
            # The store is this process's: the others still need it.
            _wait_for_count(store, "done", len(present) * place.per_node, patience_s=options.timeout_s)
    except (DistError, RuntimeError) as error:
        return (
            f"bad its processes cannot meet: {_first_line(error)}"
            if is_first
            else f"blames {options.first_node} it cannot be reached at {address}:{port}"
        )
    return problem


def first_word(store: Store, place: Place, *, is_first: bool, patience_s: float) -> tuple[float, frozenset[int]]:
    """How far this clock is from the first process's, in s, a message's time included, and the nodes that are there, the same for all.

    The first process waits `patience_s` for those that do not come, then gives its word: its time, and the nodes of which all processes came.
    A node that is not among them came too late; nobody waits for it again.

    Raises:
        DistError: where the first process gives no word.
    """
    store.set(f"here/{place.node_index}/{place.local_rank}", "")
    store.add("arrived", 1)
    if is_first:
        _wait_for_count(store, "arrived", place.num_nodes * place.per_node, patience_s=patience_s)
        members = [[f"here/{index}/{local}" for local in range(place.per_node)] for index in range(place.num_nodes)]
        present = [index for index, keys in enumerate(members) if store.check(keys)]
        store.set("word", json.dumps([time.time(), present]))
        return 0.0, frozenset(present)
    # The first process's wait may have begun after this one's, and with a node that does not come it lasts to its end.
    store.wait(["word"], timedelta(seconds=patience_s + _SLACK_S))
    said_s, present = json.loads(store.get("word"))
    return abs(time.time() - said_s), frozenset(present)


class Stages:
    """Stages that all present processes leave together: once each has tried, or when a stage's time is up for all.

    So nobody waits for a partner that still waits for another one, and a bad node does not take its neighbours along.

    Args:
        count: processes that are present.
        patience_s: what one attempt may take.
    """

    def __init__(self, store: Store, count: int, patience_s: float) -> None:
        self._store, self._count, self._stage_s = store, count, patience_s + _SLACK_S
        self._began_s, self._num_ended = time.monotonic(), 0

    def end(self) -> None:
        """This process has tried; returns when all have. It is called equally often by all, soon after `first_word`."""
        key = f"stage/{self._num_ended}"
        self._num_ended += 1
        self._store.add(key, 1)
        _wait_for_count(self._store, key, self._count, patience_s=self._began_s + self._num_ended * self._stage_s - time.monotonic())


def neighbour_rounds(num_nodes: int) -> list[list[tuple[int, int]]]:
    """Pairs of node indices by round, no node twice in a round, every node in two pairs (one, where there are two nodes).

    >>> neighbour_rounds(2), neighbour_rounds(4)
    ([[(0, 1)]], [[(0, 1), (2, 3)], [(1, 2), (3, 0)]])
    """
    if num_nodes <= 2:
        return [[(0, 1)]] if num_nodes == 2 else []
    pairs = [(index, (index + 1) % num_nodes) for index in range(num_nodes)]
    rounds = [pairs[0 : num_nodes - num_nodes % 2 : 2], pairs[1::2]]
    return [*rounds, [pairs[-1]]] if num_nodes % 2 else rounds


def exchange_problem(stages: Stages, place: Place, present: frozenset[int], options: argparse.Namespace) -> str:
    """Tries the node's own processes, then each neighbour that is present; a verdict, empty where tensors pass fast enough."""
    own_problem = ""
    if place.per_node > 1:
        own_problem = _try_group(f"node/{place.node_index}", place.local_rank, place.per_node, options, min_gb_per_s=0.0)
        stages.end()
    problems: list[str] = []
    for pairs in neighbour_rounds(place.num_nodes):
        for pair in pairs:
            if place.node_index in pair and present.issuperset(pair) and not own_problem:
                name = f"pair/{pair[0]}-{pair[1]}/{place.local_rank}"
                problems.append(_try_group(name, pair.index(place.node_index), 2, options, min_gb_per_s=options.min_pair_gb_per_s))
        stages.end()
    if own_problem:
        return f"bad its own processes cannot exchange tensors: {own_problem}"
    return f"bad no neighbour can exchange tensors with it: {problems[0]}" if problems and all(problems) else ""


def _try_group(name: str, rank: int, size: int, options: argparse.Namespace, *, min_gb_per_s: float) -> str:
    """An all-reduce in a child process; what went wrong, or an empty string."""
    answer = _answer_of_child(_reduce, (name, rank, size, options.gpus, options.timeout_s), options.timeout_s)
    if isinstance(answer, str):
        return answer
    return f"{answer:.3f} GB/s, {min_gb_per_s:g} are asked for" if answer < min_gb_per_s else ""


def _answer_of_child(work: Callable[..., str | float], arguments: tuple[object, ...], timeout_s: float) -> str | float:
    """What `work` returns in a forked process, or in words why it returned nothing. This process never touches CUDA: it could not fork then."""
    # The children have it then, and each would take seconds to import it.
    import torch  # noqa: F401

    context = multiprocessing.get_context("fork")
    here, there = context.Pipe(duplex=False)
    child = context.Process(target=_answer, args=(there, work, arguments))
    child.start()
    there.close()
    try:
        return here.recv() if here.poll(timeout_s) else f"no answer within {timeout_s:g} s"
    except EOFError:
        return "its process died"
    finally:
        child.join(1.0)
        child.kill()
        child.join()


def _answer(pipe: Connection, work: Callable[..., str | float], arguments: tuple[object, ...]) -> None:
    try:
        pipe.send(work(*arguments))
    except Exception as error:  # noqa: BLE001 (the boundary of a child: whatever it was is the verdict)
        pipe.send(_first_line(error))


def _num_gpus() -> int:
    import torch

    return torch.cuda.device_count()


def _reduce(name: str, rank: int, size: int, gpus: int, timeout_s: float) -> str | float:
    """GB/s of an all-reduce, or what is wrong with its sum."""
    import torch
    import torch.distributed as dist

    patience = timedelta(seconds=timeout_s)
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False, timeout=patience)  # pyright: ignore[reportPrivateImportUsage]
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if gpus else torch.device("cpu")
    dist.init_process_group("nccl" if gpus else "gloo", store=dist.PrefixStore(name, store), rank=rank, world_size=size, timeout=patience)  # pyright: ignore[reportPrivateImportUsage]
    tensor = torch.ones(_PAIR_BYTES // 4, device=device)
    # The first one also connects.
    dist.all_reduce(tensor)
    if not bool((tensor == size).all()):
        return "the sum is wrong"
    started_s = time.monotonic()
    for _ in range(_NUM_REDUCTIONS):
        dist.all_reduce(tensor)
    if gpus:
        torch.cuda.synchronize()
    return _PAIR_BYTES * _NUM_REDUCTIONS / (time.monotonic() - started_s) / _GIGA


def _wait_for_count(store: Store, key: str, count: int, *, patience_s: float) -> None:
    deadline_s = time.monotonic() + patience_s
    while store.add(key, 0) < count and time.monotonic() < deadline_s:
        time.sleep(0.1)


def _first_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {(str(error).strip() or '-').splitlines()[0]}"


if __name__ == "__main__":
    main()
