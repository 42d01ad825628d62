"""A run killed at any call ends, resumed, with the bytes of an undisturbed one: weights, checkpoints, metrics, rollouts, ledger."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

import pytest
from fakes.bandit import Killed
from fakes.bandit_run import bandit_train_config, data_bytes, run_bandit

from pivotrl.config.schema import TrainConfig
from pivotrl.errors import StopRequestedError
from pivotrl.training.ledger import Ledger

CONFIGS = {
    "plain": bandit_train_config(num_steps=4),
    "validated": bandit_train_config(
        num_steps=6, group_size=12, pivots_per_step=4, checkpoint_every=3, validation={"every_steps": 1, "num_pivots": 3, "num_samples": 16}
    ),
    "with_a_curve": bandit_train_config(num_steps=5, curve={"every_steps": 2, "num_samples": 1}),
    "several_updates_with_kl": bandit_train_config(num_steps=4, updates_per_rollout=2, kl={"beta": 0.1}),
}


STOPS_EARLY = bandit_train_config(
    num_steps=30,
    group_size=4,
    pivots_per_step=3,
    checkpoint_every=4,
    validation={"every_steps": 2, "num_pivots": 3, "num_samples": 8, "patience": 2},
)


class KillAt:
    """Raises at call number `number` (from 0), once."""

    def __init__(self, number: int) -> None:
        self.left = number
        self.count = 0

    def __call__(self, name: str) -> None:
        self.count += 1
        self.left -= 1
        if self.left == -1:
            raise Killed(name)


@pytest.mark.slow
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS.keys())
def test_killed_at_every_call(tmp_path: Path, config: TrainConfig) -> None:
    counter = KillAt(10**9)
    undisturbed, _, _ = run_bandit(tmp_path / "undisturbed", config, on_call=counter)
    expected = data_bytes(tmp_path / "undisturbed")
    assert counter.count > 15
    for number in range(counter.count):
        run = tmp_path / str(number)
        with pytest.raises(Killed):
            run_bandit(run, config, on_call=KillAt(number))
        summary, _, _ = run_bandit(run, config)
        assert summary == undisturbed
        assert data_bytes(run) == expected


@pytest.mark.slow
def test_killed_around_an_early_stop(tmp_path: Path) -> None:
    """The last calls of a run that patience ends: the decision, the best checkpoint and the export come out the same."""
    counter = KillAt(10**9)
    undisturbed, _, _ = run_bandit(tmp_path / "undisturbed", STOPS_EARLY, on_call=counter)
    assert undisturbed["is_stopped_early"]
    assert 0 < undisturbed["exported_step"] < undisturbed["num_steps"] < 30
    expected = data_bytes(tmp_path / "undisturbed")
    for number in range(counter.count - 12, counter.count):
        with pytest.raises(Killed):
            run_bandit(tmp_path / str(number), STOPS_EARLY, on_call=KillAt(number))
        summary, _, _ = run_bandit(tmp_path / str(number), STOPS_EARLY)
        assert summary == undisturbed
        assert data_bytes(tmp_path / str(number)) == expected


def test_killed_again_and_again(tmp_path: Path) -> None:
    """Progress is made as long as one checkpoint interval fits between two kills."""
    config = CONFIGS["validated"]
    run_bandit(tmp_path / "undisturbed", config)
    kills = 0
    while True:
        try:
            run_bandit(tmp_path / "killed", config, on_call=KillAt(25))
            break
        except Killed:
            kills += 1
            assert kills < 10
    assert kills > 0
    assert data_bytes(tmp_path / "killed") == data_bytes(tmp_path / "undisturbed")


def _unexpected(number: int, frame: FrameType | None) -> None:
    raise AssertionError("SIGTERM came where no stage was training")


@pytest.fixture
def sigterm() -> Iterator[None]:
    """Outside of a stage SIGTERM fails the test rather than ending all tests."""
    before = signal.signal(signal.SIGTERM, _unexpected)
    yield
    signal.signal(signal.SIGTERM, before)


@pytest.mark.usefixtures("sigterm")
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS.keys())
@pytest.mark.parametrize("num_calls", [1, 8, 14])
@pytest.mark.parametrize("asks", ["file", "signal"])
def test_a_run_asked_to_stop_saves_after_the_step_it_is_in_and_goes_on_with_the_same_bytes(
    tmp_path: Path, config: TrainConfig, num_calls: int, asks: str
) -> None:
    """RUN/stop or SIGTERM comes at a call; the checkpoints, one more than the undisturbed run writes, are left out of the comparison."""
    run_bandit(tmp_path / "undisturbed", config)
    counter, stop = KillAt(10**9), tmp_path / "stopped" / "stop"

    def ask(name: str) -> None:
        counter(name)
        names.append(name)
        if counter.count == num_calls and asks == "file":
            stop.parent.mkdir(exist_ok=True)
            stop.touch()
        elif counter.count == num_calls:
            # Some process trackers deliver it twice.
            signal.raise_signal(signal.SIGTERM)
            signal.raise_signal(signal.SIGTERM)

    names: list[str] = []
    with pytest.raises(StopRequestedError, match="SIGTERM asked" if asks == "signal" else "stop asks"):
        run_bandit(tmp_path / "stopped", config, on_call=ask)
    assert signal.getsignal(signal.SIGTERM) is _unexpected
    # One in the background would be lost with the process.
    assert names[-2:] == ["saved_checkpoint", "finish_saving"]
    saved = max(path.name for path in (tmp_path / "stopped" / "train" / "checkpoints").iterdir())
    rounds = (tmp_path / "stopped" / "train" / "metrics.jsonl").read_bytes().count(b"\n")
    assert int(saved.removeprefix("step_")) == rounds * config.updates_per_rollout
    stop.unlink(missing_ok=True)
    run_bandit(tmp_path / "stopped", config)
    kept = [{name: data for name, data in data_bytes(tmp_path / run).items() if "checkpoints" not in name} for run in ("stopped", "undisturbed")]
    assert kept[0] == kept[1]


@pytest.mark.parametrize("name", ["metrics.jsonl", "rollouts.jsonl", "ledger.jsonl", "validation.jsonl"])
def test_what_a_lost_step_wrote_is_cut(tmp_path: Path, name: str) -> None:
    """A partial line after the last checkpoint, as a kill inside a write leaves it."""
    config = CONFIGS["validated"]
    run_bandit(tmp_path / "undisturbed", config)
    calls: list[str] = []

    def kill_after_first_checkpoint(call: str) -> None:
        calls.append(call)
        if "saved_checkpoint" in calls and call == "step":
            raise Killed(call)

    with pytest.raises(Killed):
        run_bandit(tmp_path / "killed", config, on_call=kill_after_first_checkpoint)
    with (tmp_path / "killed" / "train" / name).open("ab") as stream:
        stream.write(b'{"step": 3, "half')
    run_bandit(tmp_path / "killed", config)
    assert data_bytes(tmp_path / "killed") == data_bytes(tmp_path / "undisturbed")


def test_a_file_shorter_than_its_checkpoint_is_an_error(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "ledger.jsonl")
    ledger.append([{"step": 0}])
    position = ledger.position()
    ledger.path.write_bytes(b"")
    with pytest.raises(ValueError, match="cut or replaced"):
        ledger.truncate(position)
