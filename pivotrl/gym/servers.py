"""NeMo-Gym's servers: started for a stage where the recipe says how, and found through the head server, which knows every agent's address.

Upstream: `GET /global_config_dict_yaml` of the head server gives the configuration as a JSON string of YAML; a server's entry is
``name: {responses_api_agents: {type: {host, port, ...}}}`` (nemo_gym/server_utils.py and global_config.py, 0.4.0).
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import httpx
import orjson
import yaml

from pivotrl.child_process import own_environment
from pivotrl.errors import InfraLimitError, UserError

LOG = "servers.log"
_AGENTS = "responses_api_agents"
_LOOK_EVERY_S = 1.0
_ANSWER_S = 10.0
# NeMo-Gym ends its servers and Ray when it is interrupted.
_END_S = 30.0
_POLL_S = 0.1
_PR_SET_PDEATHSIG = 1
# Loaded here: between fork and exec a process with threads must not.
_LIBC = ctypes.CDLL(None)


@contextmanager
def running(command: Sequence[str] | None, directory: Path, *, head: str) -> Iterator[Callable[[], None]]:
    """Keeps the servers of `command` for the block; gives a function that raises once their program has ended.

    The program ends with this process, however that ends (Linux): a stage may be killed while it plays.

    Args:
        directory: gets the program's output, appended.
        head: where its head server will answer, and nobody may answer yet.

    Raises:
        UserError: for a program that does not exist, or where somebody answers at `head`.
    """
    if command is None:
        yield lambda: None
        return
    if _answers(head):
        raise UserError(
            f"environment.command is set and somebody answers at {head}",
            rule="the program starts servers of its own there; those of another run would ask another policy",
            fix="end what runs there, choose another port, or leave environment.command out to play with it",
        )
    directory.mkdir(parents=True, exist_ok=True)
    log = directory / LOG
    with log.open("ab") as stream:
        try:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=stream,
                stderr=subprocess.STDOUT,
                env=own_environment(),
                start_new_session=True,
                preexec_fn=_end_with_parent,
            )
        except OSError as error:
            raise UserError(
                f"environment.command: {command[0]}: {error.strerror}",
                rule="it starts NeMo-Gym's servers",
                fix="name a program of this machine, for example the `gym` of NeMo-Gym's environment",
            ) from error

    def check() -> None:
        if (code := process.poll()) is not None:
            raise InfraLimitError(f"environment.command ended with code {code}; see {log}, and run the same command to resume")

    try:
        yield check
    finally:
        _end(process)


def wait_for_agents(head: str, names: Iterable[str], deadline_s: float, check: Callable[[], None]) -> dict[str, str]:
    """Base addresses of agents by name, once all of them answer.

    Args:
        check: called between attempts; may raise.

    Raises:
        UserError: where the head server knows no agent of a name.
        InfraLimitError: where one does not answer in time.
    """
    limit_s = time.monotonic() + deadline_s
    found: dict[str, str] = {}
    missing = sorted(set(names))
    while True:
        check()
        reason = f"NeMo-Gym's head server at {head}"
        with contextlib.suppress(httpx.HTTPError):
            found = agent_addresses(head, missing)
            silent = [name for name, address in found.items() if not _answers(address)]
            if not silent:
                return found
            reason = f"agent {silent[0]} at {found[silent[0]]}"
        if time.monotonic() > limit_s:
            limit = f"environment.start_deadline_s ({deadline_s:g} s)"
            raise InfraLimitError(f"{reason} does not answer within {limit}; start it, and run the same command")
        time.sleep(_LOOK_EVERY_S)


def agent_addresses(head: str, names: Sequence[str]) -> dict[str, str]:
    """What the head server says about agents.

    Raises:
        httpx.HTTPError: where it does not answer.
        UserError: where its answer is of another form, or lacks an agent.
    """
    response = httpx.get(f"{head.rstrip('/')}/global_config_dict_yaml", timeout=_ANSWER_S)
    response.raise_for_status()
    try:
        text = orjson.loads(response.content)
        servers = yaml.safe_load(text)
    except (orjson.JSONDecodeError, yaml.YAMLError) as error:
        raise _not_a_head(head) from error
    if not isinstance(servers, dict):
        raise _not_a_head(head)
    agents = {name: address for name, entry in servers.items() if (address := _address(entry)) is not None}
    if unknown := [name for name in names if name not in agents]:
        raise UserError(
            f"rows name the agent {unknown[0]!r} and NeMo-Gym at {head} runs {', '.join(sorted(agents)) or 'none'}",
            rule="every agent_ref of the rows is a running agent",
            fix="start NeMo-Gym with the configuration of that agent, or correct the rows",
        )
    return {name: agents[name] for name in names}


def _address(entry: Any) -> str | None:
    kinds = entry.get(_AGENTS) if isinstance(entry, dict) else None
    for server in cast("Mapping[str, Any]", kinds).values() if isinstance(kinds, dict) else ():
        if isinstance(server, dict) and server.get("host") and server.get("port"):
            return f"http://{server['host']}:{server['port']}"
    return None


def _not_a_head(head: str) -> UserError:
    return UserError(f"{head} does not answer as NeMo-Gym's head server does", rule="environment.head is its address", fix="correct environment.head")


def _answers(address: str) -> bool:
    """Whether somebody speaks HTTP there, whatever the status."""
    try:
        httpx.get(address, timeout=_ANSWER_S)
    except httpx.HTTPError:
        return False
    return True


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ends the program and all it started, first as a person would."""
    for kind in (signal.SIGINT, signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, kind)
        limit_s = time.monotonic() + _END_S
        while time.monotonic() < limit_s:
            if process.poll() is not None and not _group_lives(process.pid):
                return
            time.sleep(_POLL_S)


def _end_with_parent() -> None:
    """Between fork and exec: asks the kernel for SIGTERM once the parent is gone."""
    if sys.platform == "linux":
        _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)


def _group_lives(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except (ProcessLookupError, PermissionError):
        return False
    return True
