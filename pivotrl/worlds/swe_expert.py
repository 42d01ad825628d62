"""The repository's scripts: every way to write the next step, and how an agent may be mistaken about a task.

Ways differ in the order of arguments, defaults left out or written, spellings of a path, the words that are searched for, how much context an edit
quotes, and the tool that makes the change.
"""

from __future__ import annotations

import random
from dataclasses import replace

from pivotrl.worlds.protocol import Agent
from pivotrl.worlds.scripts import Ways, ways_to_call
from pivotrl.worlds.scripts import expert as scripted_expert
from pivotrl.worlds.scripts import noisy_agent as scripted_noise
from pivotrl.worlds.swe import RESULTS, Bug, SweEpisode, SweTask, goal

# A wrong belief mends the made file instead of its source, forgets the second bug, or (else) takes a result for another operator's.
_SHORTCUT_FRAC = 0.5


def expert(rng: random.Random) -> Agent:
    """An agent that mends every bug at its source."""
    return scripted_expert(ways, rng)


def noisy_agent(task: SweTask, noise: float, rng: random.Random) -> Agent:
    """An agent that writes a wrong operator, mends the made file, or hands in too early."""
    return scripted_noise(ways, mistake, task, noise, rng)


def mistake(task: SweTask, rng: random.Random) -> SweTask:
    """The task as an agent may mistake it."""
    if rng.random() < _SHORTCUT_FRAC:
        if task.source is not None:
            return replace(task, source=None)
        if len(task.bugs) > 1:
            return replace(task, bugs=task.bugs[:1])
    place = rng.randrange(len(task.bugs))
    bug = task.bugs[place]
    wrong = rng.choice([operator for operator in RESULTS if operator not in (bug.right, bug.wrong)])
    return replace(task, bugs=tuple(replace(one, right=wrong) if index == place else one for index, one in enumerate(task.bugs)))


def ways(episode: SweEpisode, task: SweTask) -> Ways:
    """Every way to write the next step towards `task`."""
    if not episode.num_tests:
        return ways_to_call("test", {}, {"name": "all"})
    if not episode.located:
        name = task.bugs[0].name
        return ways_to_call("grep", {"query": (f"def {name}", f"Def {name}")}, {"path": "."})
    for path in filter(None, (episode.task.path, task.source)):
        if path not in episode.opened:
            return ways_to_call("open", {"path": _spellings(path)})
    may_mend = task == episode.task or episode.num_changes < len(task.bugs)
    for place, bug in enumerate(task.bugs):
        if _operator(episode, task.target, bug) != bug.right and may_mend:
            is_seen = place == 0 or episode.last_test
            return _mending(episode, task, bug) if is_seen else ways_to_call("test", {}, {"name": "all"})
    if not episode.last_test and len(task.bugs) == len(episode.task.bugs):
        return ways_to_call("test", {}, {"name": "all"})
    return ways_to_call("submit", {})


def _operator(episode: SweEpisode, path: str, bug: Bug) -> str | None:
    """The operator in a function as it stands, or None where its line is broken."""
    lines = episode.files.get(path, "").split("\n")
    return next((operator for operator in RESULTS if bug.line(operator) in lines), None)


def _mending(episode: SweEpisode, task: SweTask, bug: Bug) -> Ways:
    """Edits with more and with less context, and a file of one function also written anew (two ways of 26)."""
    path, found = task.target, _operator(episode, task.target, bug)
    if found is None:
        return ways_to_call("write", {"path": [path], "text": [goal(task)[path]]})
    line, mended = bug.line(found), bug.line(bug.right)
    short, short_mended = (text.split(": ", 1)[1] for text in (line, mended))
    edits = [
        way
        for old, new in ((line, mended), (short, short_mended))
        if episode.files[path].count(old) == 1
        for way in ways_to_call("edit", {"path": _spellings(path), "search": [old], "replace": [new]})
    ]
    if len(episode.task.bugs) > 1:
        return edits
    return [*edits, *ways_to_call("write", {"path": [path], "text": [episode.files[path].replace(line, mended)]})]


def _spellings(path: str) -> tuple[str, ...]:
    return path, f"./{path}"
