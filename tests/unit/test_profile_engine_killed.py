"""SIGKILL of an engine's process between two calls of a profile: the stage goes on with another one and ends with the same bytes, and says so."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from fakes.profile_run import run_stage, sometimes_right
from fakes.runs import trajectory, write_ingest

from pivotrl import rundir
from pivotrl.config.engines import RemotePlacement
from pivotrl.rollouts.launchers import RemoteLauncher
from pivotrl.rollouts.pool import EnginePool
from pivotrl.rollouts.scripted import ScriptedEngine
from pivotrl.rundir import read_json
from pivotrl.weights.filesystem import FilesystemStore

TESTS = Path(__file__).resolve().parents[1]


def ingested(run: Path) -> Path:
    write_ingest(run / "ingest", [trajectory(number, num_turns=4) for number in range(5)], held_out_frac=0.3)
    return run


@pytest.mark.timeout(300)
def test_a_profile_whose_engine_is_killed_ends_with_the_same_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd) -> None:
    monkeypatch.setattr(rundir, "source_commit", lambda: "fixed")
    undisturbed, killed = ingested(tmp_path / "undisturbed"), ingested(tmp_path / "killed")
    run_stage(undisturbed, "profile", ScriptedEngine.from_function(sometimes_right))

    placement = RemotePlacement(type="remote", listen="127.0.0.1:0", num_replicas=1, start_deadline_s=120)
    launcher = RemoteLauncher(placement, killed / "engines")
    processes = [
        subprocess.Popen([sys.executable, "-m", "fakes.engine_process", str(killed), moment], cwd=TESTS) for moment in ("call:2", "call:2", "call:99")
    ]
    # The mortal ones first, and all before the first is asked.
    for arrival in sorted([launcher.summon(0, 120) for _ in processes], key=lambda arrival: arrival.name):
        launcher._door._arrived.put(arrival)
    pool = EnginePool(launcher, FilesystemStore(tmp_path / "weights"), placement, {})
    run_stage(killed, "profile", pool)  # type: ignore[arg-type]
    pool.close()

    assert [process.wait(60) for process in processes] == [-9, -9, 0]
    for name in ("profiles.parquet", "rollouts.parquet", "manifest.json"):
        assert (killed / "profile" / name).read_bytes() == (undisturbed / "profile" / name).read_bytes(), name
    assert capfd.readouterr().err.count("was lost: connection lost") == 2
    assert read_json(killed / "profile" / "timing.json")["rollout/engine_losses/sum"] == 2
