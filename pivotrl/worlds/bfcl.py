"""BFCL multi-turn as a world: the 200 base tasks of the installed package `bfcl-eval`, whose ground-truth calls are the expert.

Tasks, tool documents and the classes that calls are carried out on are the package's own (`make bfcl` installs it without its dependencies); nothing
of it is here. Success is its multi-turn check: after every user turn the state of every class equals that of the ground truth, the ground truth's
results are among the results so far, and a turn that needs calls has some. Users are scripted: whatever a message says, the next one speaks.
"""

from __future__ import annotations

import ast
import copy
import importlib
import importlib.resources
import inspect
import json
import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import orjson

from pivotrl.actions.protocol import json_text
from pivotrl.errors import UserError
from pivotrl.identity import derive_seed
from pivotrl.types import Action, Domain, Message, ParseOutcome, Role, State, Tool, ToolCall, ToolOrigin
from pivotrl.worlds.draws import split_of
from pivotrl.worlds.protocol import Agent, TaskSplit

_PACKAGE = "bfcl_eval"
_CATEGORY = "multi_turn_base"
# What the leaderboard allows a model in one user turn (its MAXIMUM_STEP_LIMIT).
_MAX_STEPS = 20
# The package's arithmetic has no bounds, and a policy's numbers need some: digits of a result, and powers.
_LARGEST = {"precision": 1000, "exponent": 1000}
_TYPES = {"dict": "object", "float": "number", "tuple": "array", "any": None}


@dataclass(frozen=True, slots=True)
class BfclTask:
    """One task, as the package states it."""

    id: str
    questions: tuple[str, ...]
    """What the user says, turn by turn."""
    truth: tuple[tuple[ToolCall, ...], ...]
    """The expert's calls of each turn."""
    classes: tuple[str, ...]
    initial_config: Mapping[str, Any]
    tools: tuple[Tool, ...]

    @property
    def family(self) -> str:
        """The classes it is about."""
        return " + ".join(self.classes)


class Backend:
    """The classes of one episode, with the results of all calls so far."""

    def __init__(self, task: BfclTask) -> None:
        self.results: list[str] = []
        self.instances = {name: _instance(name, task.initial_config) for name in task.classes}
        self._names = {tool.name for tool in task.tools}

    def execute(self, call: ToolCall) -> tuple[str, bool]:
        """What a call gives, as the leaderboard writes it, and whether it failed. Only documented methods can be called; no text is evaluated."""
        arguments = call.arguments_object()
        method = next((getattr(one, call.name) for one in self.instances.values() if call.name in self._names and hasattr(one, call.name)), None)
        is_error = True
        if method is None:
            text = f"Error during execution: name '{call.name}' is not defined"
        elif arguments is None:
            text = "Error during execution: arguments are not a JSON object"
        elif any(isinstance(arguments.get(name), int | float) and abs(arguments[name]) > limit for name, limit in _LARGEST.items()):
            text = "Error during execution: number too large"
        else:
            try:
                text, is_error = _result_text(method(**arguments)), False
            except Exception as error:  # noqa: BLE001 - the package's methods raise anything for a policy's arguments
                text = f"Error during execution: {error}"
        self.results.append(text)
        return text, is_error

    def public_state(self) -> dict[str, dict[str, Any]]:
        """Attributes by class; those that begin with an underscore do not count."""
        return {name: {key: value for key, value in vars(one).items() if not key.startswith("_")} for name, one in self.instances.items()}


@dataclass(slots=True)
class BfclEpisode:
    """One task (`protocol.Episode`)."""

    task: BfclTask
    backend: Backend
    truth: Backend
    messages: list[Message] = field(default_factory=list)
    turn: int = 0
    """User turns that are over."""
    num_steps: int = 0
    """Assistant turns since the user last spoke."""
    num_calls: int = 0
    """Calls since the user last spoke."""
    is_wrong: bool = False
    num_turns: int = 0

    @property
    def task_id(self) -> str:
        return self.task.id

    @property
    def is_done(self) -> bool:
        return self.turn == len(self.task.questions) or self.num_steps >= _MAX_STEPS

    @property
    def success(self) -> bool:
        return self.turn == len(self.task.questions) and not self.is_wrong

    def state(self) -> State:
        return State(tuple(self.messages), self.task.tools, ToolOrigin.ROW)

    def outcome(self) -> Mapping[str, Any]:
        return {"turns": self.turn, "of": len(self.task.questions), "is_wrong": self.is_wrong, "last_result": (self.backend.results or [""])[-1]}

    def act(self, action: Action) -> None:
        self.num_turns += 1
        self.num_steps += 1
        self.messages.append(action.as_message())
        if action.parse is ParseOutcome.PARSED and action.tool_calls:
            for call in action.tool_calls:
                text, is_error = self.backend.execute(call)
                self.messages.append(Message(Role.TOOL, text, name=call.name, is_error=is_error))
            self.num_calls += len(action.tool_calls)
        else:
            self._end_turn()

    def _end_turn(self) -> None:
        """The leaderboard's check of a user turn; then the next user speaks."""
        wanted = self.task.truth[self.turn]
        num_before = len(self.truth.results)
        for call in wanted:
            self.truth.execute(call)
        if wanted:
            missing = Counter(self.truth.results[num_before:]) - Counter(self.backend.results)
            self.is_wrong |= not self.num_calls or bool(missing) or self.backend.public_state() != self.truth.public_state()
        self.turn, self.num_steps, self.num_calls = self.turn + 1, 0, 0
        if not self.is_done:
            self.messages.append(Message(Role.USER, self.task.questions[self.turn]))


class BfclMultiTurn:
    """The base tasks as a `protocol.World`. 40 or so are test tasks, by hash of the id; there is no pretraining split."""

    name = "bfcl"
    domain = Domain.CONVERSATIONAL
    action_format = "hermes"
    tools: tuple[Tool, ...] = ()

    def tasks(self, split: TaskSplit, *, num_tasks: int, seed: int) -> tuple[BfclTask, ...]:
        """Tasks in an order drawn by the seed.

        Raises:
            UserError: where the package is not installed, or the split holds fewer tasks.
        """
        if split is TaskSplit.PRETRAINING:
            raise UserError(
                "bfcl is asked for pretraining episodes",
                rule="its tasks are for training and test",
                fix="start from a checkpoint (model.type huggingface), or leave bfcl out of world.pretraining_worlds",
            )
        is_test = split is TaskSplit.TEST
        found = [task for task in load_tasks() if (split_of(task.id) is TaskSplit.TEST) is is_test]
        if num_tasks > len(found):
            raise UserError(f"bfcl is asked for {num_tasks} {split} tasks", rule=f"this split has {len(found)}", fix="ask for fewer")
        return tuple(random.Random(derive_seed(seed, self.name, "tasks", split)).sample(found, num_tasks))

    def reset(self, task: BfclTask) -> BfclEpisode:
        return BfclEpisode(task, Backend(task), Backend(task), [Message(Role.USER, task.questions[0])])


def expert(rng: random.Random) -> Agent:
    """The ground truth's calls one by one, their arguments in any order, and a word at the end of each user turn."""

    def act(episode: BfclEpisode) -> Action:
        calls = episode.task.truth[episode.turn]
        if episode.num_calls >= len(calls):
            return Action("Done.", (), None, ParseOutcome.ABSENT)
        call = calls[episode.num_calls]
        items = list((call.arguments_object() or {}).items())
        rng.shuffle(items)
        return Action("", (ToolCall(call.name, json_text(dict(items))),), None, ParseOutcome.PARSED)

    return act


def noisy_agent(task: BfclTask, noise: float, rng: random.Random) -> Agent:
    """The expert, falling silent before its call with probability `noise`."""
    del task
    follow = expert(rng)
    return lambda episode: Action("Done.", (), None, ParseOutcome.ABSENT) if rng.random() < noise else follow(episode)


@cache
def load_tasks() -> tuple[BfclTask, ...]:
    """All base tasks of the installed package.

    Raises:
        UserError: where it is not installed, or its files have another form.
    """
    try:
        data = importlib.resources.files(_PACKAGE).joinpath("data")
    except ModuleNotFoundError as error:
        raise UserError("world.type is bfcl and bfcl-eval is not installed", rule="its tasks are in that package", fix="run `make bfcl`") from error
    try:
        file = next(one.name for one in data.iterdir() if one.name.endswith(f"_{_CATEGORY}.json"))
        rows, answers = (_json_lines(folder.joinpath(file).read_text()) for folder in (data, data.joinpath("possible_answer")))
        truths = {row["id"]: row["ground_truth"] for row in answers}
        return tuple(_task(row, truths[row["id"]]) for row in rows)
    except (StopIteration, OSError, KeyError, orjson.JSONDecodeError, ValueError) as error:
        raise UserError(
            f"bfcl-eval's multi-turn files cannot be read ({type(error).__name__}: {error})",
            rule="they have the form of the version in requirements/bfcl.txt",
            fix="run `make bfcl`",
        ) from error


def _task(row: Mapping[str, Any], truth: Sequence[Sequence[str]]) -> BfclTask:
    classes = tuple(row["involved_classes"])
    tools = tuple(tool for name in classes for tool in _tools(name) if tool.name not in row.get("excluded_function", ()))
    calls = tuple(tuple(_read_call(text, classes) for text in turn) for turn in truth)
    questions = tuple("\n".join(message["content"] for message in turn) for turn in row["question"])
    return BfclTask(row["id"], questions, calls, classes, row["initial_config"], tools)


@cache
def _class(name: str) -> type:
    return getattr(importlib.import_module(_backends().CLASS_FILE_PATH_MAPPING[name]), name)


@cache
def _backends() -> Any:
    return importlib.import_module(f"{_PACKAGE}.constants.executable_backend_config")


def _instance(name: str, initial_config: Mapping[str, Any]) -> Any:
    made = _class(name)()
    if name not in _backends().STATELESS_CLASSES:
        made._load_scenario(copy.deepcopy(initial_config.get(name, {})), long_context=False)
    return made


@cache
def _tools(name: str) -> tuple[Tool, ...]:
    file = importlib.resources.files(_PACKAGE).joinpath("data", "multi_turn_func_doc", _backends().MULTI_TURN_FUNC_DOC_FILE_MAPPING[name])
    return tuple(Tool(row["name"], row["description"], _json_schema(row["parameters"])) for row in _json_lines(file.read_text()))


def _json_schema(schema: Any) -> Any:
    """A parameter document as JSON schema: the leaderboard names types as Python does."""
    if isinstance(schema, list):
        return [_json_schema(member) for member in schema]
    if not isinstance(schema, dict):
        return schema
    found = {key: _json_schema(value) for key, value in schema.items()}
    if isinstance(schema.get("type"), str):
        found["type"] = _TYPES.get(schema["type"], schema["type"])
        if found["type"] is None:
            del found["type"]
    return found


def _read_call(text: str, classes: Sequence[str]) -> ToolCall:
    """A ground-truth call ``f(1, x='a')`` by the names of its parameters; literals only.

    Raises:
        ValueError: for anything else.
    """
    node = ast.parse(text.strip(), mode="eval").body
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name):
        raise ValueError(f"{text[:60]} is no call")
    name = node.func.id
    method = next((getattr(_class(one), name) for one in classes if hasattr(_class(one), name)), None)
    if method is None:
        raise ValueError(f"{name} is no method of {', '.join(classes)}")
    names = list(inspect.signature(method).parameters)[1:]
    arguments = {key: ast.literal_eval(value) for key, value in zip(names, node.args, strict=False)}
    arguments |= {str(keyword.arg): ast.literal_eval(keyword.value) for keyword in node.keywords}
    return ToolCall(name, json_text(arguments))


def _result_text(result: Any) -> str:
    if isinstance(result, str):
        return result
    if type(result) is dict:
        try:
            return json.dumps(result)
        except (TypeError, ValueError):
            return str(result)
    return str(result)


def _json_lines(text: str) -> list[dict[str, Any]]:
    return [orjson.loads(line) for line in text.splitlines() if line.strip()]
