"""The repository: a test fails, the agent finds the function, mends it where its source is, runs the tests again and submits.

Every function is one line in one of a few files; a file made from another one (its first line says so) must be mended there, because running
the tests makes it anew. The environment only; the scripts are in `swe_expert.py`. Success is a submitted repository in which every test passes and
nothing else has changed.
"""

from __future__ import annotations

import posixpath
import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pivotrl.types import Domain, Message, Role, Tool
from pivotrl.worlds.arguments import BadArguments, make_tool
from pivotrl.worlds.draws import draw_tasks
from pivotrl.worlds.protocol import TaskSplit
from pivotrl.worlds.tool_episode import ToolEpisode

MAX_TURNS = 13
SYSTEM_PROMPT = "Repository."
OPENINGS = ("Mend {name}.", "Please mend {name}.", "The test of {name} fails.")
FUNCTIONS = ("cost", "rate", "area", "gain", "size", "load", "span", "rank", "mass", "fare", "dose", "tilt")
PATHS = ("lib/ops.py", "lib/base.py", "app/ops.py", "app/main.py", "core/calc.py", "core/unit.py")
SOURCES = ("gen/ops.in", "gen/calc.in")
# What each operator makes of 2 and 3, which all tests call with; the tests print it. All different.
RESULTS: Mapping[str, int] = {"+": 5, "-": -1, "*": 6, "**": 8, "//": 0, "%": 2}
_MAX_TASKS = 100_000
_MAX_FILE_CHARS = 300

_TEXT = {"type": "string"}
TOOLS = (
    make_tool("test", "Run the tests.", {}, {"name": {"type": "string", "default": "all"}}),
    make_tool("grep", "Where a text stands.", {"query": _TEXT}, {"path": {"type": "string", "default": "."}}),
    make_tool("open", "Show a file.", {"path": _TEXT}, {}),
    make_tool("edit", "Replace a text that stands once in a file.", {"path": _TEXT, "search": _TEXT, "replace": _TEXT}, {}),
    make_tool("write", "Write a whole file.", {"path": _TEXT, "text": _TEXT}, {}),
    make_tool("submit", "Hand in the repository.", {}, {}),
)
_TOOLS_BY_NAME = {tool.name: tool for tool in TOOLS}


@dataclass(frozen=True, slots=True)
class Bug:
    """One function with the wrong operator."""

    name: str
    wrong: str
    right: str

    def line(self, operator: str) -> str:
        return f"def {self.name}(a, b): return a {operator} b"


@dataclass(frozen=True, slots=True)
class SweTask:
    """One or two bugs in one file. Everything else in the repository is as it should be."""

    id: str
    bugs: tuple[Bug, ...]
    """The first one is named by the user; the second shows once the first is mended."""
    path: str
    """The file whose tests fail."""
    source: str | None
    """The file that `path` is made from, or None."""
    other: tuple[str, Bug]
    """Another file that uses the first function, and a function of its own that is right."""
    opening: int

    @property
    def family(self) -> str:
        """One bug in a file written by hand, one in a made file, or two."""
        return "two" if len(self.bugs) > 1 else "plain" if self.source is None else "made"

    @property
    def target(self) -> str:
        """The file that must be mended."""
        return self.source or self.path


def start_files(task: SweTask) -> dict[str, str]:
    """The repository before the first turn."""
    return _files(task, {bug.name: bug.wrong for bug in task.bugs})


def goal(task: SweTask) -> dict[str, str]:
    """The repository of a task well done."""
    return _files(task, {bug.name: bug.right for bug in task.bugs})


def _files(task: SweTask, operators: Mapping[str, str]) -> dict[str, str]:
    body = "\n".join(bug.line(operators[bug.name]) for bug in task.bugs)
    other_path, other = task.other
    use = f"from {posixpath.splitext(task.path)[0].replace('/', '.')} import {task.bugs[0].name}"
    files = {task.path: body, other_path: f"{use}\n{other.line(other.right)}"}
    if task.source is not None:
        files |= {task.source: body, task.path: _made_from(task.source, body)}
    return files


def _made_from(source: str, body: str) -> str:
    return f"# from {source}\n{body}"


@dataclass(slots=True)
class SweEpisode(ToolEpisode):
    """One session (`protocol.Episode`). What was shown is open for the script to read."""

    task: SweTask
    files: dict[str, str]
    messages: list[Message] = field(default_factory=list)
    located: bool = False
    """A search has named the file."""
    opened: set[str] = field(default_factory=set)
    last_test: str = ""
    """The tests' last result; empty where a file changed since."""
    num_tests: int = 0
    num_changes: int = 0
    submitted: bool = False
    num_turns: int = 0

    @property
    def task_id(self) -> str:
        return self.task.id

    @property
    def is_done(self) -> bool:
        return self.submitted or self.num_turns >= MAX_TURNS

    @property
    def success(self) -> bool:
        built = {**self.files, **self._made()}
        return self.submitted and {path: text.strip() for path, text in built.items()} == goal(self.task)

    @property
    def tools_by_name(self) -> Mapping[str, Tool]:
        return _TOOLS_BY_NAME

    def outcome(self) -> Mapping[str, Any]:
        return {"files": dict(self.files), "submitted": self.submitted}

    def _hear(self, text: str) -> None:
        del text
        self.messages.append(Message(Role.USER, "Go on."))

    def _execute(self, name: str, arguments: Mapping[str, Any]) -> str:
        match name:
            case "test":
                return self._test(arguments["name"])
            case "grep":
                return self._grep(arguments["query"], arguments["path"])
            case "open":
                path = self._existing(arguments["path"])
                self.opened.add(path)
                return self.files[path]
            case "edit":
                path = self._existing(arguments["path"])
                old = arguments["search"]
                if not old or self.files[path].count(old) != 1:
                    raise BadArguments("must stand once")
                return self._write(path, self.files[path].replace(old, arguments["replace"]))
            case "write":
                return self._write(_normal(arguments["path"]), arguments["text"])
            case _:
                self.submitted = True
                return "submitted"

    def _existing(self, path: str) -> str:
        path = _normal(path)
        if path not in self.files:
            raise BadArguments("no such file")
        return path

    def _write(self, path: str, text: str) -> str:
        if len(text) > _MAX_FILE_CHARS:
            raise BadArguments("too long")
        if path not in self.files and len(self.files) >= 2 * len(PATHS):
            raise BadArguments("disk full")
        self.files[path] = text
        self.num_changes += 1
        self.last_test = ""
        return "ok"

    def _grep(self, query: str, path: str) -> str:
        words, top = " ".join(query.lower().split()), _normal(path)
        inside = [one for one in sorted(self.files) if top == "." or one == top or one.startswith(top + "/")]
        found = [one for one in inside if words and words in " ".join(self.files[one].lower().split())]
        self.located |= self.task.path in found
        return " ".join(found) or "nothing"

    def _test(self, name: str) -> str:
        """Makes the file from its source, then names the first function whose result is not the one wanted."""
        self.num_tests += 1
        self.files.update(self._made())
        text = self.files.get(self.task.path, "")
        for bug in self.task.bugs:
            if name not in ("all", bug.name):
                continue
            if bug.line(bug.right) not in text.split("\n"):
                got = next((RESULTS[operator] for operator in RESULTS if bug.line(operator) in text.split("\n")), "error")
                self.last_test = f"{bug.name} is {got}, not {RESULTS[bug.right]}"
                return self.last_test
        self.last_test = "all pass" if name == "all" else "pass"
        return self.last_test

    def _made(self) -> dict[str, str]:
        source = self.task.source
        return {} if source is None or source not in self.files else {self.task.path: _made_from(source, self.files[source])}


def _normal(path: str) -> str:
    return posixpath.normpath(path.strip()).removeprefix("/repo/") if path.strip() else "."


class Swe:
    """The repository as a `protocol.World`."""

    name = "swe"
    domain = Domain.SWE
    action_format = "hermes"
    tools = TOOLS

    def tasks(self, split: TaskSplit, *, num_tasks: int, seed: int) -> tuple[SweTask, ...]:
        """Each right operator in turn: alone and written by hand, alone and made from a source, with a second bug."""
        cases = [(operator, kind) for kind in ("plain", "made", "two") for operator in RESULTS]
        return draw_tasks(self.name, cases, _draw, split=split, num_tasks=num_tasks, max_tasks=_MAX_TASKS, seed=seed)

    def reset(self, task: SweTask) -> SweEpisode:
        opening = OPENINGS[task.opening].format(name=task.bugs[0].name)
        return SweEpisode(task, start_files(task), [Message(Role.SYSTEM, SYSTEM_PROMPT), Message(Role.USER, opening)])


def _draw(case: tuple[str, str], rng: random.Random) -> SweTask:
    operator, kind = case
    names = rng.sample(FUNCTIONS, 3)
    rights = [operator, rng.choice(list(RESULTS))]
    bugs = tuple(
        Bug(name, rng.choice([wrong for wrong in RESULTS if wrong != right]), right)
        for name, right in zip(names, rights[: 2 if kind == "two" else 1], strict=False)
    )
    path, other_path = rng.sample(PATHS, 2)
    other_operator = rng.choice(list(RESULTS))
    source = rng.choice(SOURCES) if kind == "made" else None
    opening = rng.randrange(len(OPENINGS))
    parts = [*(f"{bug.name}{bug.wrong}{bug.right}" for bug in bugs), path, source or "hand", other_path, names[2] + other_operator, str(opening)]
    return SweTask(":".join(parts), bugs, path, source, (other_path, Bug(names[2], other_operator, other_operator)), opening)
