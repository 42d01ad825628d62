"""Runs `pivotrl` commands of several processes each, as a launcher does: one program, itself started by forks.py, forks all of them.

    fakes.forked_commands:main COMMANDS.json

Every process has its command's words and its place in its environment, and runs `pivotrl.cli.main` as the `pivotrl` program does. Imports
take longer than a tiny model's training, and there are ten processes to a run. COMMANDS.json holds {"words", "size", "serves", "log", ...} each:
`size` processes that meet over gloo, or where it serves (an engine) as many that stand alone and are ended when the others are done. Nothing
may be left of them then.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from fakes import forks

_ENDING_S = 10.0


@dataclass(frozen=True, slots=True)
class Command:
    """One `pivotrl` command on several processes; what they print is in `log`.N."""

    words: Sequence[str]
    size: int
    serves: bool
    log: str
    code: int = 0
    """The exit code that all of its processes must end with."""
    fault: str = ""
    """What `faulty_train.inject` puts into all of its processes."""


def run_commands(commands: Sequence[Command], directory: Path) -> None:
    """Runs them side by side; one that fails fails the test, with what every process printed last."""
    file = directory / "commands.json"
    file.write_text(json.dumps([asdict(command) for command in commands]))
    program = forks.start([file], program="fakes.forked_commands:main")
    try:
        code = program.wait()
    finally:
        # A session of its own, so that a test that is cut off takes all of them along.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(program.pid, signal.SIGKILL)
    if code:
        logs = [f"--- {path.name}\n{path.read_text()[-3000:]}" for path in sorted(directory.glob("*.log.*"))]
        raise AssertionError("\n".join([program.printed()[-2000:], *logs]))


def main() -> None:
    """Exit code 1, every process ended, where one of those that do not serve ends with another code than its own, or leaves a process behind."""
    commands = [Command(**command) for command in json.loads(Path(sys.argv[1]).read_text())]
    working: dict[int, Command] = {}
    serving: dict[int, Command] = {}
    for command, port in zip(commands, _free_ports(len(commands)), strict=True):
        meeting = {"WORLD_SIZE": str(command.size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        for rank in range(command.size):
            place = {} if command.serves else {**meeting, "RANK": str(rank), "LOCAL_RANK": str(rank)}
            (serving if command.serves else working)[_fork(command, place, Path(f"{command.log}.{rank}"))] = command
    try:
        while working:
            child, status = os.wait()
            is_serving, code = child in serving, os.waitstatus_to_exitcode(status)
            command = (serving if is_serving else working).pop(child)
            if code != command.code or is_serving:
                sys.exit(f"a process of {Path(command.log).name} ended with code {code}, and was to {_duty(command)}")
    finally:
        for child in [*working, *serving]:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
    if left := _left_behind():
        sys.exit(f"processes that the commands left behind: {left}")


def _duty(command: Command) -> str:
    return "serve to the end" if command.serves else f"end with {command.code}"


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as held:
        probes = [held.enter_context(socket.socket()) for _ in range(count)]
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [probe.getsockname()[1] for probe in probes]


def _left_behind() -> list[int]:
    """Other processes of this session that run on for longer than one needs to end."""
    deadline_s = time.monotonic() + _ENDING_S
    while (found := _others_of_this_session()) and time.monotonic() < deadline_s:
        time.sleep(0.1)
    return found


def _others_of_this_session() -> list[int]:
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            continue
        if int(fields[3]) == os.getsid(0) and fields[0] != "Z":
            found.append(int(stat.parent.name))
    return [process for process in found if process != os.getpid()]


def _fork(command: Command, place: Mapping[str, str], log: Path) -> int:
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.environ |= place
        if command.fault:
            from fakes.faulty_train import inject

            inject(command.fault)
        code = _run(command.words)
    except BaseException:  # noqa: BLE001 (the child must end here, whatever happened, and not go on as a second parent)
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _run(words: Sequence[str]) -> int:
    from pivotrl.cli import main as pivotrl

    sys.argv = ["pivotrl", *words]
    try:
        pivotrl()
    except SystemExit as end:
        return int(end.code or 0)
    return 0
