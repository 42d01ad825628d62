"""The library: pages that link to each other, a search over their words, one question whose answer lies two pages away.

A name may stand for a town, a ship or a song; a page may have moved; a date may be doubtful on the first part of a page and settled on its second.
The environment only; the scripts are in `search_expert.py`. Success is the right final answer; a message ends the episode.
"""

from __future__ import annotations

import random
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from pivotrl.types import Domain, Message, Role, Tool
from pivotrl.worlds.arguments import BadArguments, make_tool
from pivotrl.worlds.draws import draw_tasks
from pivotrl.worlds.protocol import TaskSplit
from pivotrl.worlds.tool_episode import ToolEpisode

MAX_TURNS = 9
SYSTEM_PROMPT = "Library."
NAMES = ("Arden", "Borin", "Calva", "Delos", "Elvar", "Forna", "Galen", "Haven")
KINDS = ("town", "ship", "song", "lake")
PEOPLE = ("Ann Lee", "Bob Ray", "Eva Sun", "Ida Fox", "Jon Hay", "Leo Kim", "Mia Orr", "Tom Bell")
PLACES = ("Rome", "Oslo", "Bern", "Cork", "Lima", "Kiel")
_FIRST_PAGE, _LAST_PAGE = 10, 99
_FIRST_YEAR, _LAST_YEAR = 1801, 1999
_MAX_TASKS = 100_000
# Words of a query that carry nothing.
_SILENT_WORDS = frozenset(("the", "a", "an", "of", "who", "for", "named"))
_WORD = re.compile(r"[a-z0-9]+")
_TAGGED = re.compile(r"<answer>(.*?)</answer>", re.DOTALL | re.IGNORECASE)


class Ask(StrEnum):
    """What the question wants to know of the maker."""

    YEAR = "year"
    PLACE = "place"


class Trap(StrEnum):
    """What stands between the reader and the answer."""

    NONE = "none"
    MOVED = "moved"
    """The thing's page names another page instead of its maker."""
    DOUBT = "doubt"
    """The first part of the maker's page is doubtful; the second part settles it."""


OPENINGS: Mapping[Ask, tuple[str, ...]] = {
    Ask.YEAR: ("When was the maker of the {kind} {name} born?", "Year of birth of the maker of the {kind} {name}?"),
    Ask.PLACE: ("Where was the maker of the {kind} {name} born?", "Place of birth of the maker of the {kind} {name}?"),
}

TOOLS = (
    make_tool("search", "Pages by their words.", {"query": {"type": "string"}}, {"limit": {"type": "integer", "default": 3}}),
    make_tool("open", "Show a page.", {"page": {"type": "integer"}}, {"part": {"type": "integer", "default": 1}}),
)
_TOOLS_BY_NAME = {tool.name: tool for tool in TOOLS}


@dataclass(frozen=True, slots=True)
class SearchTask:
    """One question over a library made for it."""

    id: str
    ask: Ask
    trap: Trap
    name: str
    kinds: tuple[str, ...]
    """The kinds that share the name, in order of page; `kind` is the one asked for."""
    kind: str
    pages: tuple[int, ...]
    """Pages of the kinds, of where a moved page went, and of the makers of each kind."""
    makers: tuple[str, ...]
    """One person per kind."""
    years: tuple[int, ...]
    """Year of birth of each maker, and last the doubtful year of the right one."""
    places: tuple[str, ...]
    """Place of birth of each maker, and last the doubtful place of the right one."""
    opening: int

    @property
    def family(self) -> str:
        return self.trap.value

    @property
    def place_of_kind(self) -> int:
        return self.kinds.index(self.kind)

    @property
    def answer(self) -> str:
        return str(self.years[self.place_of_kind] if self.ask is Ask.YEAR else self.places[self.place_of_kind])

    @property
    def kind_page(self) -> int:
        """The page of the thing asked about."""
        return self.pages[self.place_of_kind]

    @property
    def moved_page(self) -> int:
        return self.pages[len(self.kinds)]

    @property
    def maker_page(self) -> int:
        return self.pages[len(self.kinds) + 1 + self.place_of_kind]


def library(task: SearchTask) -> dict[tuple[int, int], str]:
    """Text by (page, part)."""
    texts: dict[tuple[int, int], str] = {}
    for index, (kind, maker) in enumerate(zip(task.kinds, task.makers, strict=True)):
        page, maker_page = task.pages[index], task.pages[len(task.kinds) + 1 + index]
        is_right, about = kind == task.kind, f"{task.name}, {kind}. Maker {maker}, page {maker_page}."
        texts[page, 1] = about
        if is_right and task.trap is Trap.MOVED:
            texts[page, 1], texts[task.moved_page, 1] = f"{task.name}, {kind}. Now page {task.moved_page}.", about
        born = f"{maker}. Born {task.years[index]} in {task.places[index]}."
        if is_right and task.trap is Trap.DOUBT:
            texts[maker_page, 1], texts[maker_page, 2] = f"{maker}. Born {task.years[-1]} in {task.places[-1]}? See part 2.", born
        else:
            texts[maker_page, 1] = born
    return texts


@dataclass(slots=True)
class SearchEpisode(ToolEpisode):
    """One session (`protocol.Episode`). What was shown is open for the script to read."""

    task: SearchTask
    library: dict[tuple[int, int], str]
    messages: list[Message] = field(default_factory=list)
    listed: bool = False
    """A search has named the page of the thing asked about."""
    opened: set[tuple[int, int]] = field(default_factory=set)
    answer: str | None = None
    num_turns: int = 0

    @property
    def task_id(self) -> str:
        return self.task.id

    @property
    def is_done(self) -> bool:
        return self.answer is not None or self.num_turns >= MAX_TURNS

    @property
    def success(self) -> bool:
        return self.answer == " ".join(_WORD.findall(self.task.answer.lower()))

    @property
    def tools_by_name(self) -> Mapping[str, Tool]:
        return _TOOLS_BY_NAME

    def outcome(self) -> Mapping[str, Any]:
        return {"answer": self.answer}

    def _hear(self, text: str) -> None:
        tagged = _TAGGED.findall(text)
        self.answer = " ".join(_WORD.findall((tagged[-1] if tagged else text).lower()))

    def _execute(self, name: str, arguments: Mapping[str, Any]) -> str:
        if name == "search":
            return self._search(arguments["query"], arguments["limit"])
        place = arguments["page"], arguments["part"]
        if place not in self.library:
            raise BadArguments("no such page")
        self.opened.add(place)
        return self.library[place]

    def _search(self, query: str, limit: int) -> str:
        """Pages that hold the most words of the query, then in order of page; first parts only, and not where a page has moved to."""
        words = set(_WORD.findall(query.lower())) - _SILENT_WORDS
        scored = [
            (-len(words & set(_WORD.findall(text.lower()))), page, text.partition(".")[0])
            for (page, part), text in self.library.items()
            if part == 1 and page != self.task.moved_page
        ]
        best = [(page, title) for score, page, title in sorted(scored) if score][: max(0, limit)]
        self.listed |= any(page == self.task.kind_page for page, _ in best)
        return "; ".join(f"{page} {title}" for page, title in best) or "nothing"


class Search:
    """The library as a `protocol.World`."""

    name = "search"
    domain = Domain.SEARCH
    action_format = "hermes"
    tools = TOOLS

    def tasks(self, split: TaskSplit, *, num_tasks: int, seed: int) -> tuple[SearchTask, ...]:
        """Each question with each trap in turn."""
        cases = [(ask, trap) for trap in Trap for ask in Ask]
        return draw_tasks(self.name, cases, _draw, split=split, num_tasks=num_tasks, max_tasks=_MAX_TASKS, seed=seed)

    def reset(self, task: SearchTask) -> SearchEpisode:
        opening = OPENINGS[task.ask][task.opening].format(kind=task.kind, name=task.name)
        return SearchEpisode(task, library(task), [Message(Role.SYSTEM, SYSTEM_PROMPT), Message(Role.USER, opening)])


def _draw(case: tuple[Ask, Trap], rng: random.Random) -> SearchTask:
    ask, trap = case
    kinds = tuple(rng.sample(KINDS, 2))
    kind = rng.choice(kinds)
    pages = rng.sample(range(_FIRST_PAGE, _LAST_PAGE + 1), 2 * len(kinds) + 1)
    pages = (*sorted(pages[: len(kinds)]), *pages[len(kinds) :])
    makers = tuple(rng.sample(PEOPLE, len(kinds)))
    years = tuple(rng.sample(range(_FIRST_YEAR, _LAST_YEAR + 1), len(kinds) + 1))
    places = tuple(rng.sample(PLACES, len(kinds) + 1))
    name, opening = rng.choice(NAMES), rng.randrange(len(OPENINGS[ask]))
    parts = [ask, trap, name, *kinds, kind, *map(str, pages), *makers, *map(str, years), *places, str(opening)]
    return SearchTask(":".join(parts).replace(" ", "_"), ask, trap, name, kinds, kind, pages, makers, years, places, opening)
