"""One profile or select stage in its own process, which can be told to die by SIGKILL at a named moment.

``python -m fakes.profile_run RUN STAGE MOMENT [I/N]`` (a shard of the profile) with MOMENT one of `none`, `call:N` (before the Nth generate),
`write:NAME` (temporary file written, not yet in place), `placed:NAME` (just after NAME appeared), `units` (while the units
are being removed). `slow` sleeps in every generate, for a parent that kills from outside; `once:MOMENT` is MOMENT in the first
process of a shard and `none` in the next.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Sequence
from decimal import Decimal
from pathlib import Path
from typing import Any

from fakes.characters import CharacterRenderer, completion

from pivotrl import rundir
from pivotrl.config.schema import Eq5Rule, ProfileConfig, SamplingConfig, ToolCallVerifierConfig
from pivotrl.identity import derive_seed
from pivotrl.profiling import profile as profile_module
from pivotrl.profiling.measure import ProfileSettings
from pivotrl.profiling.profile import profile_units, run_profile
from pivotrl.profiling.selection import run_select
from pivotrl.profiling.shards import Shard
from pivotrl.rollouts.local import LocalSampler
from pivotrl.rollouts.scripted import ScriptedEngine
from pivotrl.trajectories.store import CandidateStore, TrajectoryStore
from pivotrl.verifiers.tool_call import ToolCallVerifier

SEED = 11
SAMPLING = SamplingConfig(temperature=1.0, max_new_tokens=200, truncated="zero")
SETTINGS = ProfileSettings(ProfileConfig(num_samples=4, unit_candidates=4), SAMPLING, max_prompt_tokens=400, run_seed=SEED)


def sometimes_right(prompt_token_ids: tuple[int, ...], seed: int, _index: int) -> Sequence[int]:
    """A policy whose skill depends on the prompt and whose luck depends on the seed."""
    prompt = "".join(map(chr, prompt_token_ids))
    device, turn = prompt.split("Device ")[1].split()[0], prompt.count("tool: ")
    if derive_seed(seed, "luck") % 5 < len(prompt_token_ids) % 6:
        return completion(f'<tool_call>\n{{"name": "open_ticket", "arguments": {{"device": "{device}-{turn}"}}}}\n</tool_call>')
    return completion('<tool_call>{"name": "open_ticket", "arguments": {' if seed % 3 else "I would rather not.")


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def arm(moment: str, engine: ScriptedEngine) -> None:
    """Makes this process die, or dawdle, at `moment`."""
    kind, _, detail = moment.partition(":")
    generate, replace, rmtree = engine.generate, Path.replace, profile_module.shutil.rmtree
    calls = 0

    def counted_generate(requests):
        nonlocal calls
        calls += 1
        if kind == "slow":
            time.sleep(0.2)
        if kind == "call" and calls == int(detail):
            die()
        return generate(requests)

    def guarded(place, temporary: Path, target: Path):
        if kind == "write" and Path(target).name == detail:
            die()
        result = place(temporary, target)
        if kind == "placed" and Path(target).name == detail:
            die()
        return result

    def half_rmtree(path: Path) -> None:
        if kind == "units":
            for unit in sorted(path.iterdir())[::2]:
                unit.unlink()
            die()
        rmtree(path)

    os_replace = rundir.os.replace
    engine.generate = counted_generate
    Path.replace = lambda self, target: guarded(replace, self, Path(target))
    rundir.os.replace = lambda temporary, target: guarded(os_replace, temporary, target)  # pyright: ignore[reportArgumentType]
    profile_module.shutil.rmtree = half_rmtree


def run_stage(run: Path, stage_name: str, engine: ScriptedEngine, shard: str | None = None, settings: ProfileSettings = SETTINGS) -> None:
    """Profile (or a shard of it) or select with the settings above."""
    stage = rundir.Stage.open(run, stage_name, config={}, inputs={}, seed=SEED)
    if stage_name == "select":
        run_select(stage, run / "profile", Eq5Rule(rule="eq5", lambda_diff=Decimal("0.8")), run_seed=SEED)
        return
    renderer: Any = CharacterRenderer()
    verifier = ToolCallVerifier(ToolCallVerifierConfig(type="tool_call", message="any"))
    inputs: dict[str, Any] = {
        "candidates": CandidateStore.open(run / "ingest"),
        "trajectories": TrajectoryStore.open(run / "ingest"),
        "sampler": LocalSampler(engine, renderer, verifier, SAMPLING, SEED),
        "renderer": renderer,
        "settings": settings,
    }
    if shard is None:
        run_profile(stage, **inputs, provenance={"policy": "scripted"})
    else:
        profile_units(stage, Shard.parse(shard), **inputs)


def moment_now(moment: str, run: Path, shard: str) -> str:
    """The moment of this process, where `once:` limits it to the first of a shard."""
    if not moment.startswith("once:"):
        return moment
    marker = run / f"started-{shard.replace('/', '-of-')}"
    is_first = not marker.exists()
    marker.touch()
    return moment.removeprefix("once:") if is_first else "none"


if __name__ == "__main__":
    # Other commits may land beside a running test; the manifests compared must not notice.
    rundir.source_commit = lambda: "fixed"
    scripted = ScriptedEngine.from_function(sometimes_right)
    run_dir, shard_text = Path(sys.argv[1]), sys.argv[4] if len(sys.argv) > 4 else None
    arm(moment_now(sys.argv[3], run_dir, shard_text or "0/1"), scripted)
    run_stage(run_dir, sys.argv[2], scripted, shard_text)
