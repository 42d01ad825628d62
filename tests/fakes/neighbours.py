"""Engines of a pool as threads of this process: scripted ones, ones that fail, and a launcher that hands them out."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

from fakes.tiny_llama import VOCAB

from pivotrl.config.engines import RemotePlacement
from pivotrl.rollouts.engine import GenerationRequest
from pivotrl.rollouts.launchers import ADDRESS, KEY, RemoteLauncher
from pivotrl.rollouts.replica import serve
from pivotrl.rollouts.scripted import ScriptedEngine
from pivotrl.rollouts.wire import Arrival, knock

REQUESTS = [GenerationRequest(tuple(range(2 + n, 12 + n)), (n, n + 100, n + 200), 0.8, 24) for n in range(6)]


class Neighbour:
    """An engine of another machine, as far as the pool can tell: a thread that connects to its door."""

    def __init__(self, launcher_dir: Path, build: Callable[[Mapping[str, Any]], Any]) -> None:
        host, port = (launcher_dir / ADDRESS).read_text().strip().split(":")
        del host
        connection = knock(("127.0.0.1", int(port)), (launcher_dir / KEY).read_bytes(), name="")
        self.thread = threading.Thread(target=serve, args=(connection, build), daemon=True)
        self.thread.start()


def wait_for_arrival(launcher: RemoteLauncher) -> None:
    """Until somebody waits behind the door: a pool that has engines left does not wait for another one."""
    deadline_s = time.perf_counter() + 60
    while launcher._door._arrived.empty():
        assert time.perf_counter() < deadline_s, "nobody came"
        time.sleep(0.01)


def remote(tmp_path: Path, **settings: Any) -> tuple[RemoteLauncher, RemotePlacement]:
    placement = RemotePlacement(type="remote", listen="127.0.0.1:0", **settings)
    return RemoteLauncher(placement, tmp_path / "engines"), placement


def talking(name: int, fail: Callable[[], object] = lambda: None) -> Callable[[Mapping[str, Any]], ScriptedEngine]:
    def script(prompt: tuple[int, ...], seed: int, index: int) -> Sequence[int]:
        fail()
        return [prompt[0], seed % VOCAB, name]

    return lambda start: ScriptedEngine.from_function(script)


def failing_start(error: Exception) -> Callable[[Mapping[str, Any]], Any]:
    def build(start: Mapping[str, Any]) -> Any:
        raise error

    return build


class Handing:
    """A launcher whose processes are threads of this one, with the engine that `builds` says at that time."""

    can_restart = True

    def __init__(self, builds: dict[int, Callable[[Mapping[str, Any]], Any]]) -> None:
        self.builds, self.summoned = builds, list[int]()

    def summon(self, place: int, timeout_s: float) -> Arrival:
        self.summoned.append(place)
        mine, theirs = Pipe()
        threading.Thread(target=serve, args=(theirs, self.builds[place]), daemon=True).start()
        return Arrival(mine, str(place), f"thread {len(self.summoned)}")

    def end(self, place: int) -> None: ...

    def close(self) -> None: ...
