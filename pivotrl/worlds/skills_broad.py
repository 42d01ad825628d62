"""The eight out-of-domain skills with many questions each: a suite on which a small policy does not stand at its ceiling.

In the spirit of the paper's eight benchmarks: instruction format, arithmetic, competition-style sequences, tracing code, transforming text,
looking up facts, the same facts in another script, and translation between two toy languages with a grammar of their own. Each question has one
right answer.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from types import MappingProxyType

_WORDS = ("cat", "dog", "sun", "tree", "fish", "moon", "star", "rain")
_FORMATS: Mapping[str, Callable[[str, str], str]] = MappingProxyType(
    {
        "in brackets": lambda first, second: f"[{first}] [{second}]",
        "in capitals": lambda first, second: f"{first} {second}".upper(),
        "as a list": lambda first, second: f"- {first}\n- {second}",
        "as JSON": lambda first, second: f'["{first}", "{second}"]',
        "with commas": lambda first, second: f"{first}, {second}",
        "joined": lambda first, second: f"{first}-{second}",
    }
)
_FACTS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "capital": ("France Paris", "Italy Rome", "Spain Madrid", "Japan Tokyo", "Egypt Cairo", "Peru Lima", "Cuba Havana", "Iran Tehran"),
        "symbol": ("gold Au", "iron Fe", "tin Sn", "lead Pb", "silver Ag", "copper Cu", "sodium Na", "helium He"),
        "young": ("cow calf", "dog puppy", "horse foal", "sheep lamb", "cat kitten", "goat kid", "lion cub", "swan cygnet"),
    }
)
# Greek, escaped because sources are ASCII: countries and their capitals.
_GREEK = (
    "\u0393\u03b1\u03bb\u03bb\u03af\u03b1 \u03a0\u03b1\u03c1\u03af\u03c3\u03b9",
    "\u0399\u03c4\u03b1\u03bb\u03af\u03b1 \u03a1\u03ce\u03bc\u03b7",
    "\u039a\u03cd\u03c0\u03c1\u03bf\u03c2 \u039b\u03b5\u03c5\u03ba\u03c9\u03c3\u03af\u03b1",
    "\u03a0\u03b5\u03c1\u03bf\u03cd \u039b\u03af\u03bc\u03b1",
    "\u0395\u03bb\u03bb\u03ac\u03b4\u03b1 \u0391\u03b8\u03ae\u03bd\u03b1",
    "\u0399\u03c3\u03c0\u03b1\u03bd\u03af\u03b1 \u039c\u03b1\u03b4\u03c1\u03af\u03c4\u03b7",
    "\u0391\u03af\u03b3\u03c5\u03c0\u03c4\u03bf\u03c2 \u039a\u03ac\u03b9\u03c1\u03bf",
    "\u039a\u03bf\u03cd\u03b2\u03b1 \u0391\u03b2\u03ac\u03bd\u03b1",
)
_GREEK_ASK = ("\u03a0\u03c1\u03c9\u03c4\u03b5\u03cd\u03bf\u03c5\u03c3\u03b1", "\u03a7\u03ce\u03c1\u03b1")
_NOUNS = {"house": "domo", "boat": "sipo", "book": "libro", "horse": "kaval", "bread": "pano", "hand": "mano", "river": "fluo", "bird": "avi"}
_ADJECTIVES = {"red": "ruga", "big": "grando", "old": "velo", "new": "nova", "good": "bona", "wet": "moka"}
_NUMBERS = {"two": "du", "three": "tri", "four": "kvar"}


def _format(rng: random.Random) -> tuple[str, str]:
    style = rng.choice(tuple(_FORMATS))
    first, second = rng.sample(_WORDS, 2)
    return f"Write {first} {second} {style}.", _FORMATS[style](first, second)


def _arithmetic(rng: random.Random) -> tuple[str, str]:
    sign = rng.choice("+-*")
    a, b = (rng.randint(2, 5), rng.randint(2, 5)) if sign == "*" else (rng.randint(2, 12), rng.randint(1, 7))
    return f"{a} {sign} {b} =", str({"+": a + b, "-": a - b, "*": a * b}[sign])


def _sequence(rng: random.Random) -> tuple[str, str]:
    """Arithmetic, doubling, square and Fibonacci-like sequences; the rule has to be seen."""
    first, step, kind = rng.randint(1, 9), rng.randint(2, 4), rng.randrange(4)
    if kind == 0:
        terms = [first + step * index for index in range(5)]
    elif kind == 1:
        terms = [first * 2**index for index in range(5)]
    elif kind == 2:
        terms = [(first + index) ** 2 for index in range(5)]
    else:
        terms = [first, step, first + step, first + 2 * step, 2 * first + 3 * step]
    return " ".join(map(str, terms[:4])) + " then?", str(terms[4])


def _trace(rng: random.Random) -> tuple[str, str]:
    start, change, times, sign = rng.randint(1, 9), rng.randint(1, 3), rng.randint(2, 3), rng.choice("+-")
    value = start + times * change if sign == "+" else start - times * change
    return f"x={start}\nfor i in range({times}): x{sign}={change}\nx?", str(value)


def _transformation(rng: random.Random) -> tuple[str, str]:
    word, verb = "".join(rng.sample("abcdef", 3)), rng.choice(("Reverse", "Double", "Shift", "Swap"))
    answer = {
        "Reverse": word[::-1],
        "Double": "".join(letter * 2 for letter in word),
        "Shift": word[1:] + word[0],
        "Swap": word[1] + word[0] + word[2],
    }
    return f"{verb} {' '.join(word)}", " ".join(answer[verb])


def _fact(rng: random.Random) -> tuple[str, str]:
    relation = rng.choice(tuple(_FACTS))
    subject, value = rng.choice(_FACTS[relation]).split()
    return (f"{relation} of {subject}?", value) if rng.random() < 0.5 else (f"{value} is {relation} of?", subject)


def _greek_fact(rng: random.Random) -> tuple[str, str]:
    country, capital = rng.choice(_GREEK).split()
    return (f"{_GREEK_ASK[0]}: {country};", capital) if rng.random() < 0.5 else (f"{_GREEK_ASK[1]}: {capital};", country)


def _translation(rng: random.Random) -> tuple[str, str]:
    """The second language puts the adjective behind the noun and the number last, and marks the plural by a final s."""
    number, adjective, noun = (rng.choice(tuple(words)) for words in (_NUMBERS, _ADJECTIVES, _NOUNS))
    ours, theirs = f"{number} {adjective} {noun}s", f"{_NOUNS[noun]}s {_ADJECTIVES[adjective]} {_NUMBERS[number]}"
    return (f"Translate: {ours}", theirs) if rng.random() < 0.5 else (f"English: {theirs}", ours)


SKILLS: Mapping[str, Callable[[random.Random], tuple[str, str]]] = MappingProxyType(
    {
        "format": _format,
        "arithmetic": _arithmetic,
        "sequence": _sequence,
        "trace": _trace,
        "transformation": _transformation,
        "fact": _fact,
        "greek_fact": _greek_fact,
        "translation": _translation,
    }
)
