"""The terminal: reports lie about in folders, the agent finds them, reads what state they are in, files each by that and keeps a log.

The agent types into a tiny shell (`terminal_shell`) by Terminus-2 replies and sees the screen; it ends the episode by declaring the task
complete. The environment only; the scripts are in `terminal_expert.py`. Success is the right file system at the end, however it was made.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from pivotrl.actions.terminus2 import TOOL_NAME, is_terminus2_object
from pivotrl.types import Action, Domain, Message, ParseOutcome, Role, State, Tool, ToolOrigin
from pivotrl.worlds.draws import draw_tasks
from pivotrl.worlds.protocol import TaskSplit
from pivotrl.worlds.terminal_shell import Shell

MAX_TURNS = 12
HOME, LOG = "/w", "/w/log"
FOLDERS = ("a", "b", "c")
OPENINGS = ("File report r{number}.", "Please file report r{number}.", "Report r{number} is to be filed.")
_FIRST_REPORT, _LAST_REPORT = 10, 99
# There are millions of tasks; this many of each split can be drawn in seconds.
_MAX_TASKS = 100_000
# A longer reply is no turn of an agent: the rest is not typed.
_MAX_LINES = 20


class Status(StrEnum):
    """What a report's note says of it."""

    FINAL = "final"
    DRAFT = "draft"
    VOID = "void"
    SECRET = "secret"


ENTRIES: Mapping[Status, str] = {Status.FINAL: "kept", Status.DRAFT: "copied", Status.VOID: "gone", Status.SECRET: "shut"}
"""The log's word for what is done with a report: moved to keep, copied to new, removed, closed to all others. Nothing in the prompt says so."""


@dataclass(frozen=True, slots=True)
class Report:
    """One report: a directory with a note."""

    number: int
    folder: str
    status: Status

    @property
    def path(self) -> str:
        return f"{HOME}/{self.folder}/r{self.number}"


@dataclass(frozen=True, slots=True)
class TerminalTask:
    """One or two reports to file; the first one's note names the second."""

    id: str
    reports: tuple[Report, ...]
    others: tuple[Report, ...]
    """Reports that lie there and must stay."""
    opening: int
    """Which of `OPENINGS` the user writes."""

    @property
    def family(self) -> str:
        """The first report's status."""
        return self.reports[0].status.value

    def note(self, report: Report) -> str:
        """The text of a report's note."""
        if report in self.reports[:-1]:
            following = self.reports[self.reports.index(report) + 1]
            return f"{report.status}, then r{following.number}"
        return str(report.status)


def start_shell(task: TerminalTask) -> Shell:
    """The file system before the first turn."""
    shell = Shell(cwd=HOME)
    for path in (HOME, *(f"{HOME}/{name}" for name in (*FOLDERS, "keep", "new"))):
        shell.make_dir(path)
    for report in (*task.reports, *task.others):
        shell.make_dir(report.path)
        shell.files[f"{report.path}/note"] = task.note(report) + "\n"
        shell.modes[f"{report.path}/note"] = "644"
    shell.files[LOG], shell.modes[LOG] = "", "644"
    return shell


def goal(task: TerminalTask) -> dict[str, tuple[str, str | None]]:
    """The file system of a task well done, as `Shell.tree` gives it. Written without the shell's commands."""
    tree = start_shell(task).tree()
    for report in task.reports:
        inside, note = report.path, f"{report.path}/note"
        target = {Status.FINAL: f"{HOME}/keep/r{report.number}", Status.DRAFT: f"{HOME}/new/r{report.number}"}.get(report.status)
        if target is not None:
            tree |= {target: tree[inside], f"{target}/note": tree[note]}
        if report.status is Status.SECRET:
            tree[inside] = ("700", None)
        if report.status in (Status.FINAL, Status.VOID):
            del tree[inside], tree[note]
    mode, _ = tree[LOG]
    tree[LOG] = (mode, "".join(f"{report.number} {ENTRIES[report.status]}\n" for report in task.reports))
    return dict(sorted(tree.items()))


@dataclass(slots=True)
class TerminalEpisode:
    """One session (`protocol.Episode`)."""

    task: TerminalTask
    shell: Shell
    messages: list[Message] = field(default_factory=list)
    pending: str = ""
    """What was typed without a line break: it stands on the command line."""
    is_complete: bool = False
    num_turns: int = 0

    @property
    def task_id(self) -> str:
        return self.task.id

    @property
    def is_done(self) -> bool:
        return self.is_complete or self.num_turns >= MAX_TURNS

    @property
    def success(self) -> bool:
        return self.is_complete and self.shell.tree() == goal(self.task)

    def state(self) -> State:
        return State(tuple(self.messages), (), ToolOrigin.NONE)

    def outcome(self) -> Mapping[str, Any]:
        return {"tree": self.shell.tree(), "cwd": self.shell.cwd, "pending": self.pending, "complete": self.is_complete}

    def act(self, action: Action) -> None:
        self.num_turns += 1
        self.messages.append(action.as_message())
        value = action.tool_calls[0].arguments_object() if len(action.tool_calls) == 1 and action.tool_calls[0].name == TOOL_NAME else None
        if action.parse is not ParseOutcome.PARSED or value is None or not is_terminus2_object(value):
            self._show("error: bad reply")
            return
        screen = self._type("".join(_keys(command["keystrokes"]) for command in value["commands"]))
        self.is_complete = value.get("task_complete") is True
        self._show(screen)

    def _type(self, text: str) -> str:
        if "\x03" in text:
            self.pending, text = "", text.rpartition("\x03")[2]
        *lines, self.pending = (self.pending + text).split("\n")
        self.pending = self.pending[:100]
        return "\n".join(filter(None, (self.shell.run(line) for line in lines[:_MAX_LINES])))

    def _show(self, screen: str) -> None:
        prompt = f"{_prompt(self.shell)} {self.pending}".rstrip()
        self.messages.append(Message(Role.USER, f"{screen}\n{prompt}" if screen else prompt))


def _prompt(shell: Shell) -> str:
    """The last name of the working directory and a dollar, as bash's ``\\W$`` shows it."""
    return f"{shell.cwd.rpartition('/')[2] or '/'}$"


def _keys(entry: str) -> str:
    """An entry as the characters it types: tmux's names of keys, as far as this terminal knows them."""
    return {"Enter": "\n", "C-c": "\x03"}.get(entry, entry)


class Terminal:
    """The terminal as a `protocol.World`."""

    name = "terminal"
    domain = Domain.TERMINAL
    action_format = "terminus2"
    tools: tuple[Tool, ...] = ()

    def tasks(self, split: TaskSplit, *, num_tasks: int, seed: int) -> tuple[TerminalTask, ...]:
        """Each status in turn, alone two times of three, else followed by a second report of any status."""
        cases = [(status, is_alone) for is_alone in (True, True, False) for status in Status]
        return draw_tasks(self.name, cases, _draw, split=split, num_tasks=num_tasks, max_tasks=_MAX_TASKS, seed=seed)

    def reset(self, task: TerminalTask) -> TerminalEpisode:
        opening = OPENINGS[task.opening].format(number=task.reports[0].number)
        shell = start_shell(task)
        return TerminalEpisode(task, shell, [Message(Role.USER, f"{opening}\n{_prompt(shell)}")])


def _draw(case: tuple[Status, bool], rng: random.Random) -> TerminalTask:
    status, is_alone = case
    statuses = [status] if is_alone else [status, rng.choice(list(Status))]
    numbers = rng.sample(range(_FIRST_REPORT, _LAST_REPORT + 1), len(statuses) + len(FOLDERS))
    reports = tuple(Report(number, rng.choice(FOLDERS), one) for number, one in zip(numbers, statuses, strict=False))
    others = tuple(Report(number, folder, rng.choice(list(Status))) for number, folder in zip(numbers[len(statuses) :], FOLDERS, strict=True))
    opening = rng.randrange(len(OPENINGS))
    task_id = "-".join([*(f"{one.status}-{one.folder}{one.number}" for one in (*reports, *others)), str(opening)])
    return TerminalTask(task_id, reports, others, opening)
