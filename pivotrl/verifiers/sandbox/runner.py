"""Runs one hostile command on copies of a small directory, outside this process, and says what it left behind.

`inside.py` holds the isolation. Where the machine does not permit it (no user namespaces), `Sandbox` refuses to exist: there is no weaker
mode. A result never depends on this process: the job goes over a pipe, a description of files comes back, and no file is written here.
Time bound of a run: `deadline_s` plus a fixed grace for setting up and describing, after which the whole process group is killed.
"""

from __future__ import annotations

import base64
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import orjson

from pivotrl.config.shell_effect import SandboxLimits
from pivotrl.errors import UserError

_INSIDE = Path(__file__).with_name("inside.py")
_GRACE_S = 20.0
# The kernel takes no longer argument.
_MAX_ARGUMENT_BYTES = 131_071
_MEGABYTE = 1 << 20


class SandboxRefused(RuntimeError):
    """The machine does not permit the isolation, or lost the sandbox's process: an infrastructure failure."""


@dataclass(frozen=True, slots=True)
class Effect:
    """What a command did."""

    ended: Literal["exit", "killed", "deadline", "output"]
    """It exited; the sandbox was killed from outside; it ran past its deadline; it wrote more than its cap."""
    exit_status: int
    """The command's (128 + signal where a signal ended it); meaningful where `ended` is ``exit``."""
    stdout: bytes
    stderr: bytes
    files: Mapping[str, str]
    """Every path below the directory (bytes as Latin-1) with its kind and content hash or link target."""


@dataclass(frozen=True, slots=True)
class Fixture:
    """A small directory held in memory: what every command starts from."""

    entries: tuple[Mapping[str, Any], ...]

    @staticmethod
    def load(directory: Path, limits: SandboxLimits) -> Fixture:
        """Reads files, directories and links, parents first.

        Raises:
            UserError: for a path that is no directory, holds anything else, or does not fit into half of the sandbox's limits.
        """
        if not directory.is_dir():
            raise UserError(f"{directory} is not a directory", rule="commands run in copies of one", fix="correct verifier.fixture")
        paths = sorted(directory.rglob("*"))
        if len(paths) > limits.max_files // 2 or sum(path.lstat().st_size for path in paths) > limits.disk_mb * _MEGABYTE // 2:
            raise UserError(
                f"{directory} holds {len(paths)} files or too many bytes",
                rule=f"at most {limits.max_files // 2} files and {limits.disk_mb / 2:g} MB, so that a command has as much again",
                fix="give a smaller directory, or raise verifier.limits.max_files or disk_mb",
            )
        return Fixture(tuple(_entry(directory, path) for path in paths))


class Sandbox:
    """Runs commands; stateless, so that one serves many threads.

    Raises:
        UserError: where this machine does not permit the isolation.
    """

    def __init__(self, limits: SandboxLimits) -> None:
        self._limits = limits
        try:
            self.run(["/bin/sh", "-c", "exit 0"], Fixture(()))
        except SandboxRefused as error:
            raise UserError(
                f"this machine permits no sandbox ({error})",
                rule="a verifier that executes needs Linux 5.14 or later with unprivileged user namespaces; it runs nothing without",
                fix="allow them (sysctl user.max_user_namespaces, kernel.apparmor_restrict_unprivileged_userns), or choose another verifier",
            ) from error

    def run(self, argv: Sequence[str], fixture: Fixture) -> Effect:
        """The effect of one command in a fresh copy.

        Args:
            argv: as `execve` takes it; `is_runnable` says whether an argument can be passed at all.

        Raises:
            SandboxRefused: where nothing was run.
        """
        job = orjson.dumps(_job(self._limits, argv, fixture))
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", str(_INSIDE)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            # Its Python may need its libraries; the command gets none of this.
            env={name: value for name, value in os.environ.items() if name == "LD_LIBRARY_PATH"},
            cwd="/",
            start_new_session=True,
        )
        try:
            answer, problem = process.communicate(job, timeout=self._limits.deadline_s + _GRACE_S)
        except subprocess.TimeoutExpired as error:
            raise SandboxRefused("its process did not answer in time") from error
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.communicate()
        if process.returncode != 0:
            raise SandboxRefused(f"its process ended with {process.returncode}: {problem.decode(errors='replace').strip()[-200:]}")
        found = orjson.loads(answer)
        if "refused" in found:
            raise SandboxRefused(found["refused"])
        stdout, stderr = (base64.b64decode(found[name]) for name in ("stdout", "stderr"))
        return Effect(found["ended"], found["exit_status"], stdout, stderr, dict(found["files"]))


def is_runnable(argument: str) -> bool:
    """Whether a model's text can be an argument of a process: no NUL, no lone surrogate, not too long."""
    try:
        return "\0" not in argument and len(argument.encode()) <= _MAX_ARGUMENT_BYTES
    except UnicodeEncodeError:
        return False


def _entry(directory: Path, path: Path) -> dict[str, Any]:
    name = str(path.relative_to(directory))
    if path.is_symlink():
        return {"path": name, "kind": "link", "target": str(path.readlink())}
    if path.is_dir():
        return {"path": name, "kind": "directory"}
    if path.is_file():
        is_executable = os.access(path, os.X_OK)
        return {"path": name, "kind": "file", "content": base64.b64encode(path.read_bytes()).decode(), "is_executable": is_executable}
    raise UserError(f"{path} is neither file, directory nor link", rule="a fixture holds nothing else", fix="remove it")


def _job(limits: SandboxLimits, argv: Sequence[str], fixture: Fixture) -> dict[str, Any]:
    return {
        "argv": list(argv),
        "files": list(fixture.entries),
        "deadline_s": limits.deadline_s,
        "cpu_s": limits.cpu_s,
        "memory_bytes": limits.memory_mb * _MEGABYTE,
        "processes": limits.processes,
        "file_bytes": limits.file_mb * _MEGABYTE,
        "open_files": limits.open_files,
        "output_bytes": limits.output_kb * 1024,
        "disk_bytes": limits.disk_mb * _MEGABYTE,
        "max_files": limits.max_files,
    }
