"""Programs of this project in processes of their own that start with everything imported: forked by one server per test process.

Imports of torch, transformers and megatron-core take ten seconds of a processor, longer than a tiny model's training, and these tests start
over a hundred programs. A fork is what they are for otherwise: a process with its own memory, environment and files, that may be killed.
"""

from __future__ import annotations

import functools
import importlib
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from multiprocessing import forkserver
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PIVOTRL = "pivotrl.cli:main"
_SERVER = multiprocessing.get_context("forkserver")
_SERVER.set_forkserver_preload(["fakes.forks_imports"])


@dataclass(frozen=True, slots=True)
class Forked:
    """What the tests use of subprocess.Popen; everything printed, to either stream, is in a file."""

    process: BaseProcess
    log: Path

    @property
    def pid(self) -> int:
        assert self.process.pid is not None
        return self.process.pid

    @property
    def returncode(self) -> int | None:
        """Minus the signal where one ended it; None while it runs."""
        return self.process.exitcode

    def poll(self) -> int | None:
        return self.process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        """Raises subprocess.TimeoutExpired."""
        self.process.join(timeout)
        if self.process.exitcode is None:
            raise subprocess.TimeoutExpired(self.log.name, timeout or 0.0)
        return self.process.exitcode

    def send_signal(self, number: int) -> None:
        if self.process.exitcode is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def printed(self, timeout: float | None = None) -> str:
        """All of it, once the process has ended."""
        self.wait(timeout)
        return self.log.read_text(errors="replace")


def start(words: Sequence[object], *, program: str = PIVOTRL, environment: Mapping[str, str] | None = None, path: Sequence[Path] = ()) -> Forked:
    """Starts a program, a session of its own.

    Args:
        words: its arguments.
        program: module:function; called without arguments.
        environment: added to this process's.
        path: more folders to import from.
    """
    _start_server()
    handle, log = tempfile.mkstemp(dir=_logs().name, suffix=".log")
    os.close(handle)
    stated = {**os.environ, "OMP_NUM_THREADS": "1", **(environment or {})}
    process = _SERVER.Process(target=_enter, args=(program, [str(word) for word in words], stated, [str(one) for one in path], log))
    process.start()
    return Forked(process, Path(log))


@functools.cache
def _logs() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="pivotrl-test-")


def _start_server() -> None:
    """Does nothing where it runs. It must find the modules by PYTHONPATH: Python 3.12.1 does not give it this process's sys.path."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join((str(ROOT), str(ROOT / "tests"))))
        forkserver.ensure_running()


def _enter(program: str, words: Sequence[str], environment: Mapping[str, str], path: Sequence[str], log: str) -> None:
    assert "fakes.forks_imports" in sys.modules, "the server could not import what it is for"
    os.setsid()
    output = os.open(log, os.O_WRONLY | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    sys.stdout, sys.stderr = os.fdopen(1, "w", buffering=1, closefd=False), os.fdopen(2, "w", buffering=1, closefd=False)
    os.chdir(ROOT)
    os.environ.clear()
    os.environ.update(environment)
    sys.path += path
    sys.argv = [program, *words]
    module, _, function = program.partition(":")
    getattr(importlib.import_module(module), function)()
