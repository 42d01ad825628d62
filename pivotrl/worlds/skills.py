"""Eight out-of-domain skills with exact answers: what a recipe's policy can do besides its job, and must not forget. Two suites of them.

Each question is one user message without tools; an answer counts where the greedy completion equals it. The skills mirror the
paper's out-of-domain table in miniature: instruction format, arithmetic, sequences, tracing code, string work, facts, the same kind of
facts in another alphabet, translation. Questions may occur in pretraining: the suite measures forgetting, not generalisation.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from pivotrl.worlds import skills_broad

type SkillSet = Mapping[str, Callable[[random.Random], tuple[str, str]]]
"""By skill: draws a question and its answer."""

_LETTERS = "abcdef"
_WORDS = ("cat", "dog", "sun", "tree", "fish", "moon", "star", "rain")
_FORMATS: Mapping[str, Callable[[str], str]] = MappingProxyType(
    {"brackets": lambda word: f"[{word}]", "capitals": str.upper, "stars": lambda word: f"*{word}*", "twice": lambda word: f"{word} {word}"}
)
_CAPITALS = {
    "France": "Paris",
    "Italy": "Rome",
    "Spain": "Madrid",
    "Japan": "Tokyo",
    "Egypt": "Cairo",
    "Peru": "Lima",
    "Cuba": "Havana",
    "Iran": "Tehran",
}
# The same fact table in Greek, escaped because sources are ASCII.
_GREEK_CAPITALS = {
    "\u0393\u03b1\u03bb\u03bb\u03af\u03b1": "\u03a0\u03b1\u03c1\u03af\u03c3\u03b9",
    "\u0399\u03c4\u03b1\u03bb\u03af\u03b1": "\u03a1\u03ce\u03bc\u03b7",
    "\u039a\u03cd\u03c0\u03c1\u03bf\u03c2": "\u039b\u03b5\u03c5\u03ba\u03c9\u03c3\u03af\u03b1",
    "\u03a0\u03b5\u03c1\u03bf\u03cd": "\u039b\u03af\u03bc\u03b1",
}
_ADJECTIVES = {"red": "ruga", "big": "grando", "old": "velo", "new": "nova", "good": "bona", "wet": "moka"}
_NOUNS = {"house": "domo", "boat": "sipo", "book": "libro", "horse": "kaval", "bread": "pano", "hand": "mano"}


@dataclass(frozen=True, slots=True)
class SkillQuestion:
    """One question with its only right answer."""

    skill: str
    question: str
    answer: str


def _format(rng: random.Random) -> tuple[str, str]:
    style, word = rng.choice(tuple(_FORMATS)), rng.choice(_WORDS)
    return f"Write {word} in {style}." if style != "twice" else f"Write {word} twice.", _FORMATS[style](word)


def _arithmetic(rng: random.Random) -> tuple[str, str]:
    a, b = rng.randint(1, 4), rng.randint(1, 4)
    return f"{a} + {b} =", str(a + b)


def _sequence(rng: random.Random) -> tuple[str, str]:
    first, step = rng.randint(1, 5), rng.randint(1, 2)
    return " ".join(str(first + i * step) for i in range(3)) + " then?", str(first + 3 * step)


def _trace(rng: random.Random) -> tuple[str, str]:
    start, change = rng.randint(3, 5), rng.randint(1, 2)
    sign = rng.choice("+-")
    return f"x={start}; x{sign}={change}; x?", str(start + change if sign == "+" else start - change)


def _string(rng: random.Random) -> tuple[str, str]:
    first, second = rng.sample(_LETTERS, 2)
    return f"Swap {first} {second}", f"{second} {first}"


def _fact(rng: random.Random) -> tuple[str, str]:
    country = rng.choice(tuple(_CAPITALS))
    return f"Capital of {country}?", _CAPITALS[country]


def _greek_fact(rng: random.Random) -> tuple[str, str]:
    country = rng.choice(tuple(_GREEK_CAPITALS))
    return f"{country};", _GREEK_CAPITALS[country]


def _translation(rng: random.Random) -> tuple[str, str]:
    adjective, noun = rng.choice(tuple(_ADJECTIVES)), rng.choice(tuple(_NOUNS))
    return f"Translate: {adjective} {noun}", f"{_NOUNS[noun]} {_ADJECTIVES[adjective]}"


SKILLS: SkillSet = MappingProxyType(
    {
        "format": _format,
        "arithmetic": _arithmetic,
        "sequence": _sequence,
        "trace": _trace,
        "string": _string,
        "fact": _fact,
        "greek_fact": _greek_fact,
        "translation": _translation,
    }
)

SUITES: Mapping[str, SkillSet] = MappingProxyType({"quickstart": SKILLS, "broad": skills_broad.SKILLS})
"""The values of `world.skills`: the same eight skills with few questions and with many."""


def draw_questions(num_questions: int, rng: random.Random, skills: SkillSet = SKILLS) -> tuple[SkillQuestion, ...]:
    """Questions of the eight skills in turn, so that each has the same number up to one."""
    names = tuple(skills)
    return tuple(SkillQuestion(name, *skills[name](rng)) for name in (names[i % len(names)] for i in range(num_questions)))


def exam_questions(suite: str, num_questions: int, rng: random.Random) -> tuple[SkillQuestion, ...]:
    """The questions of an evaluation. Each counts once, so there may be fewer than asked for; the quickstart's repeat, as its stated numbers do."""
    questions = draw_questions(num_questions, rng, SUITES[suite])
    return questions if suite == "quickstart" else tuple(dict.fromkeys(questions))


def is_right(question: SkillQuestion, answer: str) -> bool:
    """Exact equality up to spaces around the answer."""
    return answer.strip() == question.answer
