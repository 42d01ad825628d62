"""The expression of a ``find`` command: its pure tests are joined by "and", so their order among themselves cannot matter.

POSIX.1-2024 and GNU findutils. Called by `shell_arguments`.
"""

from __future__ import annotations

from collections.abc import Sequence

from pivotrl.verifiers.shell_nodes import Word
from pivotrl.verifiers.shell_options import NotCovered

_TEST_NAMES = "name iname path ipath wholename regex iregex type size mtime mmin atime amin ctime newer user group perm links"
_TESTS = frozenset("-" + name for name in _TEST_NAMES.split())
_FLAGS = frozenset(("-empty", "-readable", "-writable", "-executable"))
_GLOBAL = frozenset(("-maxdepth", "-mindepth"))
# Options of BSD's find, and those that change how links are followed.
_UNREAD = frozenset(("-E", "-X", "-d", "-s", "-x", "-L", "-H", "-P"))


def begins_expression(word: Word) -> bool:
    """Whether a word ends the list of starting points.

    Raises:
        NotCovered: for an option that is not read here.
    """
    if not isinstance(word, str):
        return False
    if word in _UNREAD:
        raise NotCovered
    return word.startswith("-") or word in ("(", ")", "!", ",")


def find_expression(expression: Sequence[Word]) -> tuple[Word, ...]:
    """The expression with neighbouring pure tests sorted (they are joined by "and"), and depth limits, which apply everywhere, in front."""
    limits: list[tuple[Word, ...]] = []
    ordered: list[tuple[Word, ...]] = []
    run: list[tuple[Word, ...]] = []
    place = 0
    while place < len(expression):
        word = expression[place]
        if word in _GLOBAL or word in _TESTS:
            if place + 1 == len(expression):
                raise NotCovered
            (limits if word in _GLOBAL else run).append((word, expression[place + 1]))
            place += 2
        elif word in _FLAGS:
            run.append((word,))
            place += 1
        elif word in ("-a", "-and"):
            place += 1
        else:
            # Alternatives, negations, parentheses and actions end a run; what they apply to keeps its place.
            if word in ("!", "-not"):
                raise NotCovered
            ordered += [*_sorted(run), (word,)]
            run = []
            place += 1
            if word in ("-exec", "-execdir", "-ok"):
                ordered += [(argument,) for argument in expression[place:]]
                place = len(expression)
    ordered += _sorted(run)
    return tuple(word for item in [*_sorted(limits), *ordered] for word in item)


def _sorted(items: list[tuple[Word, ...]]) -> list[tuple[Word, ...]]:
    return sorted(items, key=repr)
