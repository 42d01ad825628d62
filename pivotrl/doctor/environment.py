"""The environment that a recipe plays: rows that name agents, a program that can be started or servers that answer, a port that is free."""

from __future__ import annotations

import shutil
import socket
from pathlib import Path
from typing import Literal

import httpx

from pivotrl import build
from pivotrl.config.environment import EnvironmentConfig
from pivotrl.config.load import LoadedRecipe
from pivotrl.config.schema import EnvironmentSuite
from pivotrl.doctor.findings import Findings
from pivotrl.doctor.settings import place
from pivotrl.gym.servers import agent_addresses
from pivotrl.training.episodes import check_amount


def check_environment(loaded: LoadedRecipe, run: Path, findings: Findings) -> None:
    """What `train` and `eval` would refuse after the queue. Nothing is played."""
    recipe, config = loaded.recipe, loaded.recipe.environment
    if config is None:
        return
    is_scored = any(isinstance(suite, EnvironmentSuite) for suite in recipe.eval.suites)
    keys: list[Literal["train_rows", "test_rows"]] = [*(["train_rows"] if recipe.plays_environment else []), *(["test_rows"] if is_scored else [])]
    agents: set[str] = set()
    for key in keys:
        with findings.refused_by("environment-rows", place(loaded, f"environment.{key}")):
            rows = build.environment_rows(loaded, run, key)
            agents |= {row.family for row in rows}
            findings.figures[key] = len(rows)
            if key == "train_rows":
                check_amount(rows, recipe.train)
    _check_port(loaded, config, findings)
    if config.command is not None:
        _check_program(loaded, run, config.command[0], findings)
    elif agents:
        _check_servers(loaded, config, sorted(agents), findings)


def _check_program(loaded: LoadedRecipe, run: Path, program: str, findings: Findings) -> None:
    if shutil.which(loaded.expand_text(program, run)) is None:
        findings.error(
            "environment-command",
            f"{program} is no program here",
            where=place(loaded, "environment.command"),
            rule="it starts NeMo-Gym's servers",
            fix="name a program of this machine, for example the `gym` of NeMo-Gym's environment",
        )


def _check_servers(loaded: LoadedRecipe, config: EnvironmentConfig, agents: list[str], findings: Findings) -> None:
    where = place(loaded, "environment.head")
    try:
        with findings.refused_by("environment-agents", where):
            agent_addresses(config.head, agents)
    except httpx.HTTPError as error:
        findings.warn(
            "environment-head",
            f"{config.head} does not answer from here ({type(error).__name__})",
            where=where,
            rule="the agents are found through it; the machine that trains must reach it",
            fix="start NeMo-Gym before the job, correct the address, or give environment.command",
        )


def _check_port(loaded: LoadedRecipe, config: EnvironmentConfig, findings: Findings) -> None:
    """Only where the address is this machine's own: a job's may be another's."""
    host, _, port = config.listen.rpartition(":")
    if host not in ("127.0.0.1", "localhost", "0.0.0.0") or port == "0":
        return
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, int(port)))
        except OSError as error:
            findings.warn(
                "environment-port",
                f"{config.listen} cannot be listened at here ({error.strerror})",
                where=place(loaded, "environment.listen"),
                rule="the policy answers the agents there, on the machine that trains",
                fix="choose a free port",
            )
