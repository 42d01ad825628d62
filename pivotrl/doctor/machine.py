"""What a run needs of the machine it is submitted from: space, a port, the judge's endpoint, and packages of the pinned versions."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import re
import shutil
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx

from pivotrl.config.engines import VllmEngineConfig
from pivotrl.config.judge import JudgeVerifierConfig
from pivotrl.config.load import LoadedRecipe
from pivotrl.doctor.findings import Findings
from pivotrl.doctor.settings import members, place
from pivotrl.megatron.directories import KEPT
from pivotrl.planning.memory import checkpoint_bytes
from pivotrl.planning.weights import BFLOAT16_BYTES, FLOAT32_BYTES, count_parameters
from pivotrl.rundir import package_versions
from pivotrl.verifiers.judge.verifier import JudgeVerifier

JUDGE_DEADLINE_S = 5.0
_GB = 1e9
_UNAUTHORIZED = (401, 403)
# A state is written whole before the oldest is removed.
_STATES_AT_ONCE = KEPT + 1
# The best policy by validation, its successor while that is written, and the result, each in bfloat16.
_EXPORTS_AT_ONCE = 3
_REQUIREMENTS = Path(__file__).resolve().parents[2] / "requirements"


def check_disk(loaded: LoadedRecipe, run: Path, config: Any, findings: Findings) -> None:
    """Whether the run directory's file system can hold the states, exports and conversion that exist at once."""
    num_stages = sum(name in loaded.recipe.stages for name in ("sft", "train"))
    needed = num_stages * (_STATES_AT_ONCE * checkpoint_bytes(config) + _EXPORTS_AT_ONCE * count_parameters(config).total * BFLOAT16_BYTES)
    if loaded.recipe.launch.convert_to is not None:
        needed += count_parameters(config).total * FLOAT32_BYTES
    existing = next(parent for parent in (run.resolve(), *run.resolve().parents) if parent.exists())
    if not existing.is_dir():
        findings.error("disk", f"{existing} is a file", where="--run", rule="a run directory is made there", fix="choose another --run")
        return
    free = shutil.disk_usage(existing).free
    findings.figures["checkpoint_gb"] = round(checkpoint_bytes(config) / _GB, 3)
    findings.figures["disk_needed_gb"] = round(needed / _GB, 3)
    if free < needed:
        findings.error(
            "disk",
            f"{free / _GB:,.1f} GB are free",
            where=str(existing),
            rule=f"checkpoints, exports and RUN/convert, which exist at once, take {needed / _GB:,.1f} GB",
            fix="choose a --run on a larger file system, or make room",
        )


def check_port(port: int, findings: Findings) -> None:
    """Whether the port on which the trainer's processes find each other is free on this machine."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        # As the rendezvous server itself binds: a port that is only waiting after a close is free.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError as error:
            findings.warn(
                "port",
                f"port {port} cannot be bound: {error.strerror}",
                where="this machine",
                rule="the first process of a job listens there (torchrun's default is 29500)",
                fix="if jobs start on this machine, choose another port",
            )


def check_judges(loaded: LoadedRecipe, run: Path, findings: Findings) -> None:
    """Whether every judge answers and serves its model."""
    for config in members(loaded.recipe):
        if isinstance(config, JudgeVerifierConfig):
            with findings.refused_by("judge", place(loaded, "verifier.type")):
                verifier = JudgeVerifier.from_config(config, loaded.expand(config.cache, run))
                _check_judge(verifier.endpoint.url, verifier.endpoint.api_key, config.model, findings)


def _check_judge(url: str, api_key: str | None, model: str, findings: Findings) -> None:
    address = f"{url.rstrip('/')}/models"
    rule = "verdicts of a judge that cannot be asked are infrastructure failures, and too many stop the run"
    headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
    try:
        response = httpx.get(address, headers=headers, timeout=JUDGE_DEADLINE_S)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        fix = "start the judge, or correct verifier.endpoint"
        findings.error("judge", f"no answer within {JUDGE_DEADLINE_S:g} s ({type(error).__name__})", where=address, rule=rule, fix=fix)
        return
    if response.status_code in _UNAUTHORIZED:
        findings.error("judge", f"HTTP {response.status_code}", where=address, rule=rule, fix="set the variable of verifier.api_key_env")
    elif response.status_code != httpx.codes.OK:
        findings.warn("judge", f"HTTP {response.status_code}", where=address, rule="an OpenAI-compatible server lists its models", fix="look at it")
    elif (served := _served(response)) is not None and model not in served:
        shown = ", ".join(served[:5]) or "none"
        findings.error(
            "judge-model", f"it serves {shown}", where=address, rule=f"verifier.model is {model}", fix="serve it, or correct verifier.model"
        )


def _served(response: httpx.Response) -> list[str] | None:
    """Names of the models, or None where the answer is no such list."""
    try:
        return [str(entry["id"]) for entry in response.json()["data"]]
    except (ValueError, KeyError, TypeError):
        return None


def check_packages(loaded: LoadedRecipe, findings: Findings) -> None:
    """Installed versions against the pins of the platform they were installed for, and the engine's package."""
    if isinstance(loaded.recipe.engine, VllmEngineConfig) and importlib.util.find_spec("vllm") is None:
        findings.error(
            "engine",
            "vllm is not installed",
            where=place(loaded, "engine.type"),
            rule="engine.type is vllm",
            fix="install requirements/gpu.txt (or cpu.txt), or check from the environment that the job will use",
        )
    installed = package_versions()
    differing = differing_pins(installed, {file.stem: _pins(file) for file in sorted(_REQUIREMENTS.glob("[cg]pu.txt"))})
    if differing:
        shown = ", ".join(f"{name} {installed[name]} (pinned {pin})" for name, pin in sorted(differing.items()))
        findings.warn(
            "versions",
            shown,
            where="this environment",
            rule="numbers were tested with the pinned versions",
            fix="install with `make setup`, or from requirements/",
        )


def differing_pins(installed: Mapping[str, str], pins: Mapping[str, Mapping[str, str]]) -> dict[str, str]:
    """Pins that are not what is installed, of the platform that differs least; local version labels do not count.

    >>> differing_pins({"torch": "2.13.0+cpu", "vllm": "1"}, {"cpu": {"torch": "2.13.0", "vllm": "2"}, "gpu": {"torch": "3", "vllm": "2"}})
    {'vllm': '2'}
    """
    platforms = [
        {name: pin for name, pin in pinned.items() if name in installed and installed[name].partition("+")[0] != pin} for pinned in pins.values()
    ]
    return min(platforms, key=len, default={})


def _pins(file: Path) -> dict[str, str]:
    return dict(re.findall(r"^([a-zA-Z0-9_.-]+)(?:\[[^]]*\])?==([^ \\\n]+)", file.read_text(), flags=re.MULTILINE))
