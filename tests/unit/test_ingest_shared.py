"""All real trajectories in one command: nothing crashes, everything is accounted for, counts are those of a plain reading of the files."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fakes.ingest_run import run

from pivotrl.trajectories import registry
from pivotrl.trajectories.store import CandidateStore, TrajectoryStore
from pivotrl.types import Origin, Role


@pytest.fixture(scope="module")
def ingested(shared_data: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Path]:
    out = tmp_path_factory.mktemp("run")
    return run(shared_data, out, outcomes=("success", "unknown", "failure")), out / "ingest"


def documents(folder: Path, pattern: str) -> list[Any]:
    return [json.loads(path.read_text()) for path in sorted(folder.glob(pattern))]


def json_lines(folder: Path, pattern: str) -> list[Any]:
    return [json.loads(line) for path in sorted(folder.glob(pattern)) for line in path.read_bytes().split(b"\n") if line]


PRESENT: dict[str, Callable[[Path], int]] = {
    "tau2": lambda root: sum(len(document["simulations"]) for document in documents(root, "tau2/*.json")),
    "tau_bench": lambda root: sum(len(document) for document in documents(root, "tau_bench/*.json")),
    "agentdojo": lambda root: len(documents(root, "agentdojo/*.json")),
    "swe_agent": lambda root: len([*root.glob("swe_agent/*.traj"), *root.glob("swe_smith/*.traj")]),
    "swe_smith": lambda root: len(json_lines(root, "swe_smith/*.jsonl")),
    "mini_swe_agent": lambda root: len(documents(root, "mini_swe_agent/*.json")),
    "openhands": lambda root: len(documents(root, "openhands/*/*.json")),
    "terminus2": lambda root: len(json_lines(root, "terminus2/*.jsonl")),
    "chatml_tools": lambda root: len(json_lines(root, "search/webdancer.jsonl")),
    "verifiers": lambda root: len(json_lines(root, "search/wiki*.jsonl")),
    "nemo_gym": lambda root: len(json_lines(root, "gym_rows/*.jsonl")),
    "sharegpt": lambda root: sum(len(document) for document in documents(root, "sharegpt/*.json")),
    "codex": lambda root: len(list(root.glob("codex/*.jsonl"))),
    "atif": lambda root: len(documents(root, "atif/*.json")),
}


@pytest.mark.parametrize("name", PRESENT)
def test_everything_present_is_accounted_for(name: str, ingested: tuple[dict[str, Any], Path], shared_data: Path) -> None:
    counts = ingested[0]["formats"][name]["trajectories"]
    assert counts["present"] == counts["kept"] + counts["dropped"] + counts["quarantined"] == PRESENT[name](shared_data)
    assert counts["kept"] > 0


def test_every_file_found_its_format_and_one_is_broken(ingested: tuple[dict[str, Any], Path], shared_data: Path) -> None:
    audit, _ = ingested
    assert set(audit["formats"]) == set(PRESENT) <= set(registry.FORMATS)
    assert sum(entry["files"] for entry in audit["formats"].values()) == sum(path.is_file() for path in shared_data.rglob("*")) - 1
    assert [(row["format"], row["reason"][:12]) for row in audit["quarantine"]] == [("swe_agent", "invalid JSON")]


def test_stored_data_agrees_with_the_audit(ingested: tuple[dict[str, Any], Path]) -> None:
    audit, folder = ingested
    turns: dict[str, int] = {}
    trajectories = TrajectoryStore.open(folder)
    for one in trajectories.iterate():
        expert_turns = [message for message in one.messages if message.role is Role.ASSISTANT and message.origin is Origin.MODEL]
        turns[one.source_format] = turns.get(one.source_format, 0) + len(expert_turns)
        assert not Path(one.source_file).is_absolute()
    assert turns == {name: entry["kept_assistant_turns"] for name, entry in audit["formats"].items()}
    candidates: dict[str, int] = {}
    for candidate in CandidateStore.open(folder).iterate():
        source = trajectories.get(candidate.trajectory_id)
        assert source.messages[candidate.message_index].origin is Origin.MODEL
        candidates[source.source_format] = candidates.get(source.source_format, 0) + 1
    for name, entry in audit["formats"].items():
        assert sum(entry["candidates"].values()) == candidates.get(name, 0)
        assert candidates.get(name, 0) + sum(entry["turns_excluded"].values()) == entry["kept_assistant_turns"]
