"""The BFCL adapter on a package of the same interface: its check of a task by hand, what it refuses to run, and what it tells a user."""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from fakes.bfcl_package import write_package

from pivotrl.errors import UserError
from pivotrl.types import Action, ParseOutcome, ToolCall
from pivotrl.worlds import bfcl
from pivotrl.worlds.generate import play
from pivotrl.worlds.protocol import TaskSplit


def forget_package() -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "bfcl_eval"]:
        del sys.modules[name]
    for cached in (bfcl.load_tasks, bfcl._class, bfcl._backends, bfcl._tools):
        cached.cache_clear()


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.syspath_prepend(str(write_package(tmp_path)))
    forget_package()
    yield tmp_path / "bfcl_eval"
    forget_package()


def call(name: str, **arguments: object) -> Action:
    return Action("", (ToolCall(name, json.dumps(arguments)),), None, ParseOutcome.PARSED)


DONE = Action("Done.", (), None, ParseOutcome.ABSENT)
LIGHT, PAINT, ADD = call("switch", is_on=True), call("paint", colour="red", coats=2), call("add", a=1, b=2)


def play_all(task: bfcl.BfclTask, *actions: Action) -> bfcl.BfclEpisode:
    episode = bfcl.BfclMultiTurn().reset(task)
    for action in actions:
        episode.act(action)
    return episode


@pytest.mark.usefixtures("package")
def test_tasks_are_read_as_the_package_states_them() -> None:
    first, second = bfcl.load_tasks()
    assert first.questions == ("Light, and paint it.", "Thanks.", "Add.")
    assert [[(one.name, one.arguments_object()) for one in turn] for turn in first.truth] == [
        [("switch", {"is_on": True}), ("paint", {"colour": "red", "coats": 2})],
        [],
        [("add", {"a": 1, "b": 2})],
    ]
    assert [tool.name for tool in first.tools] == ["switch", "paint", "add", "power"]
    assert [tool.name for tool in second.tools] == ["switch"]
    assert first.tools[2].parameters == {"type": "object", "properties": {"a": {"type": "number"}, "b": {}}, "required": ["a", "b"]}


@pytest.mark.usefixtures("package")
def test_the_expert_succeeds_and_silence_fails() -> None:
    for task in bfcl.load_tasks():
        world = bfcl.BfclMultiTurn()
        assert play(world.reset(task), bfcl.expert(random.Random(1))).success
        assert not play(world.reset(task), bfcl.noisy_agent(task, 1.0, random.Random(1))).success


@pytest.mark.parametrize(
    ("actions", "succeeds"),
    [
        ((LIGHT, PAINT, DONE, DONE, ADD, DONE), True),
        ((PAINT, LIGHT, DONE, DONE, ADD, DONE), True),
        ((LIGHT, LIGHT, PAINT, DONE, DONE, ADD, DONE), True),
        ((LIGHT, PAINT, DONE, ADD, DONE, DONE), False),
        ((LIGHT, PAINT, DONE, ADD, DONE, call("add", a=2, b=2), DONE), True),
        ((LIGHT, DONE, PAINT, DONE, ADD, DONE), False),
        ((LIGHT, PAINT, PAINT, DONE, DONE, ADD, DONE), False),
        ((LIGHT, call("paint", colour="red"), DONE, DONE, ADD, DONE), False),
        ((LIGHT, PAINT, DONE, DONE, call("add", a=1, b=3), DONE), False),
        ((LIGHT, PAINT, DONE, DONE, ADD), False),
    ],
    ids=[
        *("the truth", "another order", "a repeat that changes nothing", "no call in a turn that needs one", "a result of an earlier turn"),
        *("late", "twice", "another coat", "another sum", "the last turn never ended"),
    ],
)
@pytest.mark.usefixtures("package")
def test_the_leaderboards_check_by_hand(actions: tuple[Action, ...], *, succeeds: bool) -> None:
    assert play_all(bfcl.load_tasks()[0], *actions).success is succeeds


@pytest.mark.parametrize(
    ("action", "answer"),
    [
        (call("paint", colour="red", coats=0), "Error during execution: no coat"),
        (call("switch", x=1), "Error during execution: Lamp.switch() got an unexpected keyword argument 'x'"),
        (call("explode"), "Error during execution: name 'explode' is not defined"),
        (call("_load_scenario", config={}), "Error during execution: name '_load_scenario' is not defined"),
        (call("__init__"), "Error during execution: name '__init__' is not defined"),
        (call("power", base=10, exponent=10**9), "Error during execution: number too large"),
        (Action("", (ToolCall("switch", "[1]"),), None, ParseOutcome.PARSED), "Error during execution: arguments are not a JSON object"),
        (LIGHT, '{"is_on": true}'),
        (PAINT, "red 2"),
        (ADD, "3"),
    ],
)
@pytest.mark.usefixtures("package")
def test_calls_are_answered_as_the_leaderboard_writes_results(action: Action, answer: str) -> None:
    last = play_all(bfcl.load_tasks()[0], action).messages[-1]
    assert last.content == answer
    assert last.is_error is answer.startswith("Error")


@pytest.mark.usefixtures("package")
def test_an_agent_that_never_ends_its_turn_is_stopped() -> None:
    episode = play_all(bfcl.load_tasks()[0], *[LIGHT] * 20)
    assert episode.is_done
    assert not episode.success


@pytest.mark.usefixtures("package")
def test_what_is_not_there_is_the_users_error() -> None:
    world = bfcl.BfclMultiTurn()
    with pytest.raises(UserError, match="this split has"):
        world.tasks(TaskSplit.TEST, num_tasks=3, seed=0)
    with pytest.raises(UserError, match="for training and test"):
        world.tasks(TaskSplit.PRETRAINING, num_tasks=1, seed=0)


def test_a_package_of_another_form_is_the_users_error(package: Path) -> None:
    for text in ("{", '{"id": "multi_turn_base_0"}\n'):
        (package / "data" / "BFCL_v9_multi_turn_base.json").write_text(text)
        bfcl.load_tasks.cache_clear()
        with pytest.raises(UserError, match="cannot be read"):
            bfcl.load_tasks()


def test_without_the_package_the_make_target_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    forget_package()
    monkeypatch.setitem(sys.modules, "bfcl_eval", None)
    with pytest.raises(UserError, match="make bfcl"):
        bfcl.load_tasks()
