"""The terminal's scripts: every way to write the next step, and how an agent may be mistaken about a task.

Ways differ in quotes, `./`, absolute paths, spelling and order of flags, `cd` first, a redirection's place, one entry or two, a duration left out,
and what is said about the step.
"""

from __future__ import annotations

import json
import posixpath
import random
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from pivotrl.actions.terminus2 import TOOL_NAME
from pivotrl.types import Action, ParseOutcome, ToolCall
from pivotrl.worlds.protocol import Agent
from pivotrl.worlds.scripts import Ways
from pivotrl.worlds.scripts import expert as scripted_expert
from pivotrl.worlds.scripts import noisy_agent as scripted_noise
from pivotrl.worlds.terminal import ENTRIES, HOME, LOG, Report, Status, TerminalEpisode, TerminalTask, start_shell

FRAMES = (
    *('{"analysis": "', '", "plan": "', '", "commands": [', '{"keystrokes": "', '\\n"}', '\\n", "duration": 0.1}'),
    *('], "task_complete": false}', '], "task_complete": true}', "]}"),
)
_RECURSIVE = ("-r", "-R", "--recursive")
_FORCED = ("-rf", "-fr", "-r -f", "-f -r", "-Rf", "-r --force", "--recursive --force")
# A wrong belief stops after the first report, or takes one report for another status.
_STOP_FRAC = 0.3


def expert(rng: random.Random) -> Agent:
    """An agent that files every report right."""
    return scripted_expert(ways, rng)


def noisy_agent(task: TerminalTask, noise: float, rng: random.Random) -> Agent:
    """An agent that takes a report for another status or forgets the second one."""
    return scripted_noise(ways, mistake, task, noise, rng)


def mistake(task: TerminalTask, rng: random.Random) -> TerminalTask:
    """The task as an agent may mistake it."""
    if len(task.reports) > 1 and rng.random() < _STOP_FRAC:
        return replace(task, reports=task.reports[:1])
    place = rng.randrange(len(task.reports))
    wrong = rng.choice([status for status in Status if status is not task.reports[place].status])
    reports = tuple(replace(report, status=wrong) if index == place else report for index, report in enumerate(task.reports))
    return replace(task, reports=reports)


def ways(episode: TerminalEpisode, task: TerminalTask) -> Ways:
    """Every way to write the next step towards `task`."""
    for report in task.reports:
        commands = _next_commands(episode, report)
        if commands:
            return [partial(_reply, entries, frame) for entries in commands for frame in range(4)]
    return [partial(_reply, (), frame, is_complete=True) for frame in (0, 1)]


def _next_commands(episode: TerminalEpisode, report: Report) -> list[tuple[str, ...]]:
    """Entries of each way to take the next step on one report; empty where it is filed and logged."""
    shell = episode.shell
    if not any(f"{report.folder}/r{report.number}" in message.content for message in episode.messages if message.role == "user"):
        name = f"r{report.number}"
        starts = (" .", "") if shell.cwd == HOME else (f" {HOME}",)
        return [(f"find{start} -name {quoted}",) for start in starts for quoted in (name, f"'{name}'", f'"{name}"')]
    note = f"{report.path}/note"
    if note not in shell.read and note in shell.files:
        return _reading(episode, report)
    if _traces(episode, report) == _traces_at_start(episode, report):
        return _filing(episode, report)
    if f"{report.number} " not in shell.files.get(LOG, ""):
        log, entry = _relative(episode, LOG), ENTRIES[report.status]
        pair = f"{report.number} {entry}"
        return [
            *((f"echo {text} {to}{log}",) for text in (pair, f"'{pair}'", f'"{pair}"') for to in (">> ", ">>")),
            (f">> {log} echo {pair}",),
            (f"echo {pair} >> {LOG}",),
        ]
    return []


def _reading(episode: TerminalEpisode, report: Report) -> list[tuple[str, ...]]:
    note = _relative(episode, f"{report.path}/note")
    ways = [f"cat {note}", f"cat ./{note}", f"cat '{note}'", f'cat "{note}"', f"cat < {note}", f"cat {report.path}/note"]
    inside = f"r{report.number}/note"
    chained = f"cd {HOME}/{report.folder}"
    return [*((way,) for way in ways), (f"{chained} && cat {inside}",), (chained, f"cat {inside}")]


def _filing(episode: TerminalEpisode, report: Report) -> list[tuple[str, ...]]:
    path = _relative(episode, report.path)
    keep, new = (_relative(episode, f"{HOME}/{name}") for name in ("keep", "new"))
    paths = (path, f"./{path}", f"'{path}'")
    match report.status:
        case Status.FINAL:
            ways = [*(f"mv {one} {to}" for one in paths for to in (keep, f"./{keep}")), f"mv {path} {keep}/", f"mv {report.path} {HOME}/keep"]
        case Status.DRAFT:
            ways = [*(f"cp {flag} {one} {new}" for one in paths for flag in _RECURSIVE), f"cp -r {path} {new}/"]
        case Status.VOID:
            ways = [f"rm {flags} {one}" for flags in _FORCED for one in (path, f"./{path}")] + [f"rm -r {path}"]
        case Status.SECRET:
            ways = [f"chmod {mode} {one}" for mode in ("700", "0700") for one in paths]
    return [(way,) for way in ways]


def _relative(episode: TerminalEpisode, path: str) -> str:
    return posixpath.relpath(path, episode.shell.cwd)


def _traces(episode: TerminalEpisode, report: Report) -> dict[str, tuple[str, str | None]]:
    return {path: value for path, value in episode.shell.tree().items() if f"r{report.number}" in path.split("/")}


def _traces_at_start(episode: TerminalEpisode, report: Report) -> dict[str, tuple[str, str | None]]:
    return {path: value for path, value in start_shell(episode.task).tree().items() if f"r{report.number}" in path.split("/")}


def _reply(entries: Sequence[str], frame: int, *, is_complete: bool = False) -> Action:
    """One Terminus-2 reply in one of four frames: with or without a word on the step, a duration, the flag."""
    commands = [{"keystrokes": f"{entry}\n", **({"duration": 0.1} if frame % 2 else {})} for entry in entries]
    reply: dict[str, object] = {"analysis": "", "plan": ("Done." if is_complete else "Next.") if frame > 1 else "", "commands": commands}
    if is_complete or frame != 3:
        reply["task_complete"] = is_complete
    return Action("", (ToolCall(TOOL_NAME, json.dumps(reply)),), None, ParseOutcome.PARSED)
