"""The library's scripts: every way to write the next step, and how an agent may be mistaken about a task.

Ways differ in the order and case of a query's words, filling words, defaults left out or written, and what is said around the answer.
"""

from __future__ import annotations

import random
from dataclasses import replace
from functools import partial

from pivotrl.worlds.protocol import Agent
from pivotrl.worlds.scripts import Ways, say, ways_to_call
from pivotrl.worlds.scripts import expert as scripted_expert
from pivotrl.worlds.scripts import noisy_agent as scripted_noise
from pivotrl.worlds.search import Ask, SearchEpisode, SearchTask, Trap

# A wrong belief takes what a doubtful page says first, or (else) another kind or another question.
_HASTY_FRAC = 0.5


def expert(rng: random.Random) -> Agent:
    """An agent that follows the right page, its forwarding and its second part, and answers what was asked."""
    return scripted_expert(ways, rng)


def noisy_agent(task: SearchTask, noise: float, rng: random.Random) -> Agent:
    """An agent that opens the namesake, stops at a doubtful date, or answers another question."""
    return scripted_noise(ways, mistake, task, noise, rng)


def mistake(task: SearchTask, rng: random.Random) -> SearchTask:
    """The task as an agent may mistake it: its own facts are changed with it, so that it acts on them."""
    if task.trap is Trap.DOUBT and rng.random() < _HASTY_FRAC:
        right = task.place_of_kind
        years = tuple(task.years[-1] if index == right else year for index, year in enumerate(task.years))
        places = tuple(task.places[-1] if index == right else place for index, place in enumerate(task.places))
        return replace(task, trap=Trap.NONE, years=years, places=places)
    if rng.random() < 0.5:
        return replace(task, ask=Ask.PLACE if task.ask is Ask.YEAR else Ask.YEAR)
    # The namesake has no trap of its own.
    return replace(task, kind=next(kind for kind in task.kinds if kind != task.kind), trap=Trap.NONE)


def ways(episode: SearchEpisode, task: SearchTask) -> Ways:
    """Every way to write the next step towards `task`."""
    if not episode.listed:
        words = f"{task.name} {task.kind}"
        return ways_to_call("search", {"query": (words, f"{task.kind} {task.name}", f"the {words}", words.lower())}, {"limit": 3})
    if (task.kind_page, 1) not in episode.opened:
        return ways_to_call("open", {"page": [task.kind_page]}, {"part": 1})
    if task.trap is Trap.MOVED and (task.moved_page, 1) not in episode.opened:
        return ways_to_call("open", {"page": [task.moved_page]}, {"part": 1})
    if (task.maker_page, 1) not in episode.opened:
        return ways_to_call("open", {"page": [task.maker_page]}, {"part": 1})
    if task.trap is Trap.DOUBT and (task.maker_page, 2) not in episode.opened:
        return ways_to_call("open", {"page": [task.maker_page], "part": [2]})
    answer = task.answer
    texts = (answer, f"{answer}.", f"<answer>{answer}</answer>", f"Found it. <answer>{answer}</answer>", f"It says so. <answer>{answer}</answer>")
    return [partial(say, text) for text in texts]
