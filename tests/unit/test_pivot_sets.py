"""Which pivots a step learns from: the trigger on written rows, sets through kills and lost futures, declined sets, the lineage."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from fakes.bandit import BanditEngine, Killed
from fakes.bandit_run import bandit_train_config, data_bytes, run_bandit

from pivotrl.config.reprofile import ReprofileConfig
from pivotrl.config.training import TrainConfig
from pivotrl.errors import UserError
from pivotrl.rollouts.local import LocalTask
from pivotrl.rundir import Stage, read_json, read_jsonl, write_json
from pivotrl.training.pivot_sets import DECLINED, PIVOT_SETS, Lineage, PivotSets, attempts, is_due, lineage, remove_after, spent_reason
from pivotrl.weights.push import push

CONFIG = bandit_train_config(num_steps=8, checkpoint_every=2, pivots_per_step=2)
AHEAD = bandit_train_config(
    num_steps=8, checkpoint_every=2, pivots_per_step=2, max_policy_age=1, correction={"type": "truncated", "level": "token", "cap": 4.0}
)


def rows(stds: Sequence[float], flat: Sequence[float] = ()) -> list[dict[str, Any]]:
    flats = flat or [0.0] * len(stds)
    return [
        {"step": step, "rollout/reward/std": std, "rollout/group_zero_variance/frac": zero}
        for step, (std, zero) in enumerate(zip(stds, flats, strict=True))
    ]


def test_the_trigger_compares_the_last_rounds_with_the_first_of_the_set() -> None:
    config = ReprofileConfig(window_rounds=2, reward_std_frac=0.5)
    falling = rows([0.4, 0.4, 0.3, 0.3, 0.2, 0.18])
    assert spent_reason(config, falling, [], since=0, step=6) == "reward std 0.19, below 0.5 of 0.4"
    assert spent_reason(config, falling, [], since=0, step=5) is None
    assert spent_reason(config, falling, [], since=2, step=6) is None
    assert spent_reason(config, falling, [], since=3, step=6) is None, "the windows would overlap"
    flat = ReprofileConfig(window_rounds=2, informative_frac=0.5)
    assert spent_reason(flat, rows([0.4] * 4, [0.2, 0.2, 0.6, 0.8]), [], since=0, step=4) == "informative share 0.3, below 0.5 of 0.8"
    assert spent_reason(flat, rows([0.4] * 4, [0.2, 0.2, 0.4, 0.6]), [], since=0, step=4) is None


def test_the_trigger_sees_a_saturated_validation() -> None:
    config = ReprofileConfig(saturated_validations=2)
    validations = [{"step": step, "value": value} for step, value in ((0, 0.3), (2, 0.5), (4, 0.5), (6, 0.4))]
    assert spent_reason(config, [], validations, since=0, step=6) == "no new best in 2 validations"
    assert spent_reason(config, [], validations, since=0, step=4) is None
    assert spent_reason(config, [], validations, since=4, step=6) is None


@pytest.mark.parametrize(
    ("step", "every", "updates", "expected"), [(0, 2, 1, False), (4, 2, 1, True), (5, 2, 1, False), (6, 4, 3, True), (9, 4, 3, True)]
)
def test_sets_are_made_where_checkpoints_are(step: int, every: int, updates: int, expected: bool) -> None:
    assert is_due(step, every=every, updates_per_rollout=updates) is expected


def fake_sets(num_pivots: Callable[[int], int], sampled_ahead: int = 0) -> Callable[[Path, Sequence[LocalTask], Callable[[str], None]], PivotSets]:
    """Sets whose pivots depend on the policy; profiled again wherever the reward's std is not above its start."""

    def sets_of(run: Path, tasks: Sequence[LocalTask], on_call: Callable[[str], None]) -> PivotSets:
        def make(directory: Path, step: int, policy_hash: str, reason: str) -> None:
            for name in ("profile", "select"):
                stage = Stage(name, directory / name, {}, 0.0)
                stage.path.mkdir(parents=True, exist_ok=True)
                on_call(name)
                if name == "select" and not num_pivots(step):
                    raise UserError("select kept none", rule="", fix="")
                start = int(policy_hash, 16) % len(tasks)
                write_json(stage.path / "ids.json", [(start + one) % len(tasks) for one in range(num_pivots(step))])
                stage.finish(outputs=("ids.json",), summary={"policy_hash": policy_hash, "reason": reason})

        def reason(step: int, since: int) -> str | None:
            config = ReprofileConfig(window_rounds=1, reward_std_frac=1.0)
            metrics = list(read_jsonl(run / "train" / "metrics.jsonl"))
            return spent_reason(config, metrics, [], since=since, step=step) if is_due(step, every=2, updates_per_rollout=1) else None

        load = lambda select_dir: [tasks[index] for index in read_json(select_dir / "ids.json")]  # noqa: E731
        return PivotSets(run / PIVOT_SETS, tasks, load=load, make=make, reason=reason, min_pivots=2, sampled_ahead=sampled_ahead)

    return sets_of


def everything(run: Path) -> dict[str, bytes]:
    sets = {str(path.relative_to(run)): path.read_bytes() for path in (run / PIVOT_SETS).rglob("*") if path.is_file() and path.name != "timing.json"}
    return {**data_bytes(run), **sets}


class KillAt:
    def __init__(self, number: int) -> None:
        self.left, self.count = number, 0

    def __call__(self, name: str) -> None:
        self.count += 1
        self.left -= 1
        if self.left == -1:
            raise Killed(name)


@pytest.mark.parametrize("config", [CONFIG, AHEAD], ids=["age 0", "age 1"])
def test_a_run_that_profiles_again_resumes_exactly_from_any_kill(tmp_path: Path, config: TrainConfig) -> None:
    counter, sets_of = KillAt(10**9), fake_sets(lambda _: 3, config.max_policy_age)
    run_bandit(tmp_path / "undisturbed", config, on_call=counter, sets_of=sets_of)
    ledger = list(read_jsonl(tmp_path / "undisturbed" / "train" / "ledger.jsonl"))
    names = list(dict.fromkeys(row["pivot_set"] for row in ledger))
    assert names[0] == "0"
    assert len(names) > 1
    assert [int(name) for name in names] == [0, *attempts(tmp_path / "undisturbed" / PIVOT_SETS)]
    for row in ledger:
        assert int(row["pivot_set"]) <= row["step"]
    expected = everything(tmp_path / "undisturbed")
    for number in range(0, counter.count, 3):
        run = tmp_path / str(number)
        with pytest.raises(Killed):
            run_bandit(run, config, on_call=KillAt(number), sets_of=sets_of)
        run_bandit(run, config, sets_of=sets_of)
        assert everything(run) == expected


def test_a_round_sampled_ahead_learns_from_the_set_that_its_own_policy_made(tmp_path: Path) -> None:
    sets_of = fake_sets(lambda _: 3, sampled_ahead=1)
    run_bandit(tmp_path / "whole", AHEAD, sets_of=sets_of)
    rows = list(read_jsonl(tmp_path / "whole" / "train" / "ledger.jsonl"))
    made = attempts(tmp_path / "whole" / PIVOT_SETS)
    assert made
    for start in made:
        # A checkpoint's policy: a run that is killed while it profiles can do it again.
        assert (start - 1) % AHEAD.checkpoint_every == 0
        first = next(row for row in rows if int(row["pivot_set"]) == start)
        assert (first["step"], first["policy_version"]) == (start, start - 1)
        # A last step never samples ahead, so the shorter run trained on the same rounds.
        _, trainer, _ = run_bandit(tmp_path / str(start), AHEAD.model_copy(update={"num_steps": start - 1}), sets_of=sets_of)
        policy = push(trainer.named_tensors(), BanditEngine(), start - 1).digest
        assert read_json(tmp_path / "whole" / PIVOT_SETS / f"{start:08d}" / "profile" / "manifest.json")["summary"]["policy_hash"] == policy


def test_sets_of_a_lost_future_are_removed(tmp_path: Path) -> None:
    """The newest checkpoints are gone: what was profiled after the older one is not in force when the run gets there again."""
    sets_of = fake_sets(lambda _: 3)
    run_bandit(tmp_path / "whole", CONFIG, sets_of=sets_of)
    run = tmp_path / "lost"
    shutil.copytree(tmp_path / "whole" / PIVOT_SETS, run / PIVOT_SETS)
    for step in attempts(run / PIVOT_SETS):
        write_json(run / PIVOT_SETS / f"{step:08d}" / "select" / "ids.json", [0, 0, 0, 0])
    run_bandit(run, CONFIG, sets_of=sets_of)
    assert everything(run) == everything(tmp_path / "whole")


@pytest.mark.parametrize("left", [0, 1])
def test_a_set_with_too_few_pivots_is_declined_once(left: int, tmp_path: Path) -> None:
    made: list[int] = []

    def num_pivots(step: int) -> int:
        made.append(step)
        return left

    run_bandit(tmp_path, CONFIG, sets_of=fake_sets(num_pivots))
    declined = [path.parent.name for path in sorted((tmp_path / PIVOT_SETS).glob(f"*/{DECLINED}"))]
    assert declined
    assert sorted(set(made)) == [int(name) for name in declined]
    assert {row["pivot_set"] for row in read_jsonl(tmp_path / "train" / "ledger.jsonl")} == {"0"}


def test_the_lineage_counts_what_the_ledger_says() -> None:
    ledger = [{"step": 0}, {"step": 0}, {"step": 1, "pivot_set": "0"}, {"step": 2, "pivot_set": "00000002"}]
    assert lineage({"0": 0, "00000002": 2}, ledger) == [Lineage("0", 0, 2, 2), Lineage("00000002", 2, 1, None)]


def test_what_is_no_pivot_set_is_left_alone(tmp_path: Path) -> None:
    for name in ("00000002", "00000004", "notes"):
        (tmp_path / name).mkdir()
        write_json(tmp_path / name / DECLINED, {"why": "few"})
    (tmp_path / ".nfs0001").touch()
    assert attempts(tmp_path) == [2, 4]
    remove_after(tmp_path, 3)
    assert sorted(path.name for path in tmp_path.iterdir()) == [".nfs0001", "00000002", "notes"]
