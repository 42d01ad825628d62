"""Where the processes of a pool's engines come from: started here, or arriving from other machines.

A launcher gives the pool a connection for one of its places, and takes back what is left of a lost one. Called by pool.py.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import IO, Protocol

from pivotrl.child_process import own_environment
from pivotrl.config.engines import ProcessesPlacement, RemotePlacement
from pivotrl.errors import UserError
from pivotrl.rollouts.wire import Arrival, Door, PeerLost, make_key
from pivotrl.rundir import atomic_write

KEY, ADDRESS = "authkey", "address"
_PACKAGE_ROOT = Path(__file__).resolve().parents[2]
# Memory that glibc's malloc got is kept and used again, in huge pages. By default every large tensor is mapped anew, and asking the system for
# its pages costs several times what is done with them: a new set of weights took twice as long.
_KEEP_MEMORY = "glibc.malloc.mmap_max=0:glibc.malloc.trim_threshold=1099511627776:glibc.malloc.hugetlb=1"
# How often a starting process is looked at, seconds.
_LOOK_EVERY_S = 0.5
_END_S = 10.0


class Launcher(Protocol):
    """Lifecycle: summon for every place, end and summon again where a place was lost, close once."""

    can_restart: bool
    """Whether a lost place is filled by asking, rather than by waiting for somebody to come."""

    def summon(self, place: int, timeout_s: float) -> Arrival:
        """A connected process for a place.

        Raises:
            PeerLost: where none could be had in time.
        """
        ...

    def end(self, place: int) -> None:
        """Ends what holds a place, at once; does nothing where nobody does."""
        ...

    def close(self) -> None:
        """Ends everything; the pool has closed its connections before."""
        ...


class LocalLauncher:
    """Engines started on this machine.

    Each is `<python> -m pivotrl.verbs.engine` with its output in `log_dir/engine-<place>.log`. Socket and key lie in a directory that only
    this user can enter and that goes with the pool.
    """

    can_restart = True

    def __init__(self, placement: ProcessesPlacement, log_dir: Path, *, num_threads: int) -> None:
        self._python = placement.python or sys.executable
        if shutil.which(self._python) is None:
            raise UserError(f"placement.python is {self._python}", rule="it must be a program that can be run", fix="correct the path")
        self._devices, self._num_threads, self._log_dir = placement.devices, num_threads, log_dir
        log_dir.mkdir(parents=True, exist_ok=True)
        self._directory = Path(tempfile.mkdtemp(prefix="pivotrl-engines-"))
        self._door = Door(str(self._directory / "door"), make_key(self._directory / KEY))
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        self._waiting: dict[str, Arrival] = {}

    def log_path(self, place: int) -> Path:
        """Where a place's engine writes what it has to say."""
        return self._log_dir / f"engine-{place}.log"

    def summon(self, place: int, timeout_s: float) -> Arrival:
        """Starts a process and waits for its call."""
        with self.log_path(place).open("ab") as log:
            process = self._processes[place] = self._start(place, log)
        deadline_s = time.monotonic() + timeout_s
        while time.monotonic() < deadline_s:
            with contextlib.suppress(PeerLost):
                arrival = self._door.next(_LOOK_EVERY_S)
                self._waiting[arrival.name] = arrival
            if (arrival := self._waiting.pop(str(place), None)) is not None:
                return arrival
            if process.poll() is not None:
                raise PeerLost(f"engine {place} ended with code {process.returncode} before it connected: {self._last_words(place)}")
        self.end(place)
        raise PeerLost(f"engine {place} did not connect within {timeout_s:g} s; see {self.log_path(place)}")

    def end(self, place: int) -> None:
        process = self._processes.pop(place, None)
        if process is not None:
            # With its workers (tensor parallelism), which would hold their GPUs' memory until they notice.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    def close(self) -> None:
        """Waits a moment for engines that are closing, then ends the rest."""
        for place in list(self._processes):
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._processes[place].wait(_END_S)
            self.end(place)
        self._door.close()
        shutil.rmtree(self._directory, ignore_errors=True)

    def process_id(self, place: int) -> int:
        """The process that holds a place."""
        return self._processes[place].pid

    def _start(self, place: int, log: IO[bytes]) -> subprocess.Popen[bytes]:
        environment = own_environment()
        environment["PYTHONPATH"] = os.pathsep.join([str(_PACKAGE_ROOT), *filter(None, [environment.get("PYTHONPATH")])])
        environment["OMP_NUM_THREADS"] = str(self._num_threads)
        if self._devices:
            environment["CUDA_VISIBLE_DEVICES"] = self._devices[place]
        else:
            environment.setdefault("GLIBC_TUNABLES", _KEEP_MEMORY)
        command = [self._python, "-m", "pivotrl.verbs.engine", str(self._door.address), str(self._directory / KEY), str(place)]
        # A session of its own: an interrupt at the terminal is the trainer's to handle.
        return subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True)

    def _last_words(self, place: int) -> str:
        lines = self.log_path(place).read_text(errors="replace").strip().splitlines()
        return lines[-1] if lines else "it wrote nothing"


class RemoteLauncher:
    """Engines that others start (`pivotrl engine RECIPE --run RUN`) and that find this process through two files below the run directory."""

    can_restart = False

    def __init__(self, placement: RemotePlacement, directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        host, port = split_address(placement.listen, key="placement.listen")
        self._door = Door((host, port), make_key(directory / KEY))
        assert not isinstance(self._door.address, str)
        # An engine on another machine cannot use the address of "any interface".
        reachable = os.uname().nodename if host in ("0.0.0.0", "::") else host
        self._address_file, self._address = directory / ADDRESS, f"{reachable}:{self._door.address[1]}\n".encode()
        atomic_write(self._address_file, self._address)

    def summon(self, place: int, timeout_s: float) -> Arrival:  # noqa: ARG002 - whoever comes takes the place
        """The next engine that connected."""
        return self._door.next(timeout_s)

    def end(self, place: int) -> None:
        """Nothing: its connection is closed, which ends its work for this run."""

    def close(self) -> None:
        # Another stage of the run may have written its own since.
        if self._address_file.exists() and self._address_file.read_bytes() == self._address:
            self._address_file.unlink(missing_ok=True)
        self._door.close()


def split_address(text: str, *, key: str) -> tuple[str, int]:
    """Host and port of ``HOST:PORT``.

    Raises:
        UserError: for any other form, naming `key`.
    """
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal() or int(port) > 65535:
        raise UserError(f"{key} is {text!r}", rule="it has the form HOST:PORT", fix="write it like 10.0.0.1:29650")
    return host, int(port)
