"""Profiling with several workers: any number, any sharding, any kill, and the bytes of one undisturbed worker."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from dataclasses import replace
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from fakes.characters import CharacterRenderer
from fakes.profile_run import SAMPLING, SEED, SETTINGS, run_stage, sometimes_right
from fakes.runs import trajectory, write_ingest
from hypothesis import given
from hypothesis import strategies as st

from pivotrl import rundir
from pivotrl.config.load import load_recipe
from pivotrl.config.profiling import AdaptiveConfig, PassRatePriorConfig
from pivotrl.config.schema import Eq5Rule, ToolCallVerifierConfig
from pivotrl.errors import InfraLimitError, UserError
from pivotrl.locks import NumberedLocks
from pivotrl.profiling.estimate import estimate
from pivotrl.profiling.measure import Measurer
from pivotrl.profiling.shards import WHOLE, Shard
from pivotrl.profiling.units import Work, locks_path
from pivotrl.profiling.workers import run_workers
from pivotrl.rollouts.local import LocalSampler
from pivotrl.rollouts.scripted import ScriptedEngine
from pivotrl.rundir import Stage, read_json
from pivotrl.trajectories.store import CandidateStore, TrajectoryStore
from pivotrl.verbs.profile import run_shard
from pivotrl.verifiers.tool_call import ToolCallVerifier

TESTS = Path(__file__).resolve().parents[1]


def command(run: Path, moment: str, shard: str) -> list[str]:
    return [sys.executable, "-m", "fakes.profile_run", str(run), "profile", moment, shard]


def start(run: Path, moment: str, shard: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(command(run, moment, shard), cwd=TESTS, stderr=subprocess.PIPE)


def finish(run: Path, shard: str | None = None) -> int:
    """The profile or a shard of it in this process; returns how many calls the engine got."""
    calls = 0

    def counted(*arguments):
        nonlocal calls
        calls += 1
        return sometimes_right(*arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rundir, "source_commit", lambda: "fixed")
        run_stage(run, "profile", ScriptedEngine.from_function(counted), shard)
    return calls


def contents(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.rglob("*") if path.is_file() and path.name != "timing.json"}


def ingested(run: Path) -> Path:
    write_ingest(run / "ingest", [trajectory(number, num_turns=4) for number in range(7)], held_out_frac=0.3)
    return run


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = ingested(tmp_path_factory.mktemp("undisturbed"))
    finish(run)
    return run


@pytest.mark.parametrize("num_shards", [2, 3])
def test_shards_share_the_work_out_and_a_plain_call_merges_it(num_shards: int, tmp_path: Path, undisturbed: Path) -> None:
    run = ingested(tmp_path)
    calls = [finish(run, f"{index}/{num_shards}") for index in range(num_shards)]
    assert sum(calls) == 28 * 4
    assert max(calls) - min(calls) <= 16
    assert not Stage.is_done(run, "profile")
    assert finish(run) == 0
    assert contents(run / "profile") == contents(undisturbed / "profile")


def test_a_plain_call_does_what_the_shards_left(tmp_path: Path, undisturbed: Path) -> None:
    run = ingested(tmp_path)
    done = finish(run, "1/3")
    assert finish(run, "1/3") == 0
    assert finish(run) == 28 * 4 - done
    assert contents(run / "profile") == contents(undisturbed / "profile")


def test_one_of_two_workers_is_killed_in_the_middle(tmp_path: Path, undisturbed: Path) -> None:
    run = ingested(tmp_path)
    killed, other = start(run, "call:2", "0/2"), start(run, "none", "1/2")
    _, errors = killed.communicate(timeout=300)
    assert killed.returncode == -signal.SIGKILL, errors.decode()
    _, errors = other.communicate(timeout=300)
    assert other.returncode == 0, errors.decode()
    assert 0 < finish(run) < 28 * 4
    assert contents(run / "profile") == contents(undisturbed / "profile")


def test_local_workers_are_started_again_after_a_kill(tmp_path: Path, undisturbed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = ingested(tmp_path)
    monkeypatch.chdir(TESTS)
    stage = Stage.open(run, "profile", config={}, inputs={}, seed=11)
    run_workers([command(run, "once:call:2", "0/2"), command(run, "none", "1/2")], stage, CandidateStore.open(run / "ingest"), SETTINGS)
    assert (run / "started-0-of-2").exists()
    assert finish(run) == 0
    assert contents(run / "profile") == contents(undisturbed / "profile")


def test_a_worker_that_keeps_dying_or_refuses_stops_the_stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = ingested(tmp_path)
    monkeypatch.chdir(TESTS)
    stage = Stage.open(run, "profile", config={}, inputs={}, seed=11)
    arguments = (stage, CandidateStore.open(run / "ingest"), SETTINGS)
    dying = [sys.executable, "-c", "import os; os.kill(os.getpid(), 9)"]
    with pytest.raises(InfraLimitError, match="signal 9, 4 times"):
        run_workers([dying], *arguments)
    refusing = [sys.executable, "-c", "import sys; sys.stderr.write('pivotrl: error: no such tool; a; b\\n'); sys.exit(2)"]
    with pytest.raises(UserError, match=r"^no such tool; a; b; .*worker-0.log"):
        run_workers([refusing], *arguments)


def test_a_unit_is_made_by_one_process_at_a_time(tmp_path: Path, undisturbed: Path) -> None:
    """The holder of a unit's lock is alive: the other does the rest and waits for it."""
    run = ingested(tmp_path)
    (run / "profile" / "units").mkdir(parents=True)
    with NumberedLocks(locks_path(run / "profile")) as locks:
        assert locks.try_acquire(2)
        waiting = start(run, "none", "0/1")
        while len(list((run / "profile" / "units").glob("*.jsonl"))) < 6:
            assert waiting.poll() is None
            time.sleep(0.01)
        time.sleep(0.3)
        assert waiting.poll() is None
        assert not (run / "profile" / "units" / "000002.jsonl").exists()
    waiting.communicate(timeout=300)
    assert (run / "profile" / "units" / "000002.jsonl").exists()
    finish(run)
    assert contents(run / "profile") == contents(undisturbed / "profile")


@given(st.lists(st.tuples(st.sampled_from("abcdefgh"), st.integers(1, 5)), max_size=12, unique_by=lambda run: run[0]), st.integers(1, 6))
def test_shards_are_equal_parts_that_keep_trajectories_whole(runs: list[tuple[str, int]], count: int) -> None:
    trajectory_ids = [name for name, length in runs for _ in range(length)]
    shards = [Shard(index, count).units(trajectory_ids) for index in range(count)]
    assert sorted(number for shard in shards for number in shard) == list(range(len(trajectory_ids)))
    assert max(map(len, shards)) - min(map(len, shards)) <= 1
    num_cut = sum(len({trajectory_ids[number] for number in shard}) for shard in shards) - len(runs)
    assert num_cut <= count - 1
    # Whose units they are is the trajectories' content, not their place in the file.
    moved = [name for name, length in reversed(runs) for _ in range(length)]
    first = Shard(0, count)
    assert sorted(trajectory_ids[number] for number in first.units(trajectory_ids)) == sorted(moved[number] for number in first.units(moved))


@pytest.mark.parametrize("text", ["", "1", "2/2", "-1/2", "0/0", "a/b"])
def test_a_shard_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(UserError, match="--shard is"):
        Shard.parse(text)


def test_an_estimate_from_everything_is_what_the_profile_takes(tmp_path: Path, undisturbed: Path) -> None:
    renderer: Any = CharacterRenderer()
    candidates, trajectories = CandidateStore.open(undisturbed / "ingest"), TrajectoryStore.open(undisturbed / "ingest")
    verifier = ToolCallVerifier(ToolCallVerifierConfig(type="tool_call", message="any"))
    sampler = LocalSampler(ScriptedEngine.from_function(sometimes_right), renderer, verifier, SAMPLING, SEED)
    work, measurer = Work(candidates, SETTINGS), Measurer(trajectories, sampler, renderer, SETTINGS)
    cost = read_json(undisturbed / "profile" / "manifest.json")["summary"]["cost"]
    found = estimate(work, measurer, SETTINGS, 28)
    assert (found.num_candidates, found.num_sampled, found.num_units, found.adaptive_share) == (28, 28, 7, 1.0)
    values = [found.totals[name].value for name in ("rollouts", "prompt tokens", "generated tokens")]
    assert values == pytest.approx([cost["turns"], cost["prompt_tokens"], cost["completion_tokens"]])
    part = estimate(work, measurer, SETTINGS, 10)
    assert (part.num_candidates, part.num_sampled, part.num_units) == (28, 12, 3)
    assert part.totals["rollouts"].value == pytest.approx(28 * 4)
    tokens = part.totals["generated tokens"]
    assert tokens.low <= tokens.value <= tokens.high
    assert tokens.low < tokens.high
    assert part.totals["worker seconds"].n == 8
    config = AdaptiveConfig(risk=0.1, prior=PassRatePriorConfig(always_fails=0.4, always_succeeds=0.4, alpha=1, beta=1))
    eq5 = Eq5Rule(rule="eq5", lambda_diff=Decimal("0.8"))
    how = replace(SETTINGS, profile=SETTINGS.profile.model_copy(update={"adaptive": config}), select=eq5)
    adaptive = estimate(work, measurer, how, 28)
    assert 0.5 <= adaptive.adaptive_share < 1
    assert adaptive.totals["rollouts"].value == pytest.approx(adaptive.adaptive_share * cost["turns"])
    assert adaptive.totals["prompt tokens"].value == pytest.approx(cost["prompt_tokens"])


def test_the_last_unit_may_be_smaller(tmp_path: Path) -> None:
    write_ingest(tmp_path / "ingest", [trajectory(number, num_turns=3) for number in range(2)])
    work = Work(CandidateStore.open(tmp_path / "ingest"), SETTINGS)
    assert [len(unit) for _, unit in work.units()] == [4, 2]
    assert (work.num_units, work.num_candidates(work.numbers(WHOLE)), work.num_candidates([0]), work.num_candidates([1])) == (2, 6, 4, 2)


def test_shards_of_remote_engines_are_refused(tmp_path: Path) -> None:
    """Two processes of one run would write one address, and all engines would go to the later one."""
    loaded = load_recipe(TESTS.parent / "recipes" / "quickstart", ["placement={type: remote}"])
    with pytest.raises(UserError, match=r"--shard is 0/2 and placement\.type is remote"):
        run_shard("0/2", loaded, tmp_path)
