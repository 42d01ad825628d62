"""GNU getopt's reading of a command line: which words are options, with which values, and which are operands.

Words that the shell would expand are options only where their literal text already says so. Called by `shell_arguments`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pivotrl.verifiers.shell_commands import CommandRule, Option
from pivotrl.verifiers.shell_nodes import Expanded, Word

_MAX_OPTION_CHARS = 4096

type OptionValues = list[tuple[Option, Word | None]]


class NotCovered(ValueError):
    """Arguments outside the rules; never leaves `shell_arguments`."""


def split_options(arguments: Sequence[Word], rule: CommandRule) -> tuple[OptionValues, list[Word], int | None]:
    """Options, operands, and the number of operands before ``--`` (None where there is none).

    Raises:
        NotCovered: for an unknown option, a missing value, and operands between which an option changes what is done.
    """
    options: OptionValues = []
    operands: list[Word] = []
    moved_at = 0
    place = 0
    while place < len(arguments):
        word = arguments[place]
        place += 1
        if word == "--":
            return options, operands + list(arguments[place:]), len(operands)
        if not _is_option(word) or (rule.operand_prefix and isinstance(word, str) and word.startswith(rule.operand_prefix)):
            operands.append(word)
            if not rule.permutes:
                return options, operands + list(arguments[place:]), None
            continue
        found, takes_next = _options_of(word, rule.options, rule.numeric)
        if takes_next:
            if place == len(arguments):
                raise NotCovered
            found[-1] = (found[-1][0], arguments[place])
            place += 1
        if operands and any(option.name in rule.positional for option, _ in found if rule.positional):
            moved_at = len(operands)
        options += [(option, value) for option, value in found if option.value != "!"]
    if moved_at and len(operands) > moved_at:
        raise NotCovered
    return options, operands, None


def leading_options(arguments: Sequence[Word], known: Mapping[str, Option]) -> tuple[OptionValues, list[Word]]:
    """Options before the first operand, and the rest.

    Raises:
        NotCovered: as `split_options`.
    """
    options: OptionValues = []
    place = 0
    while place < len(arguments) and _is_option(arguments[place]):
        found, takes_next = _options_of(arguments[place], known, None)
        place += 1
        if takes_next:
            if place == len(arguments):
                raise NotCovered
            found[-1] = (found[-1][0], arguments[place])
            place += 1
        options += [(option, value) for option, value in found if option.value != "!"]
    return options, list(arguments[place:])


def _options_of(word: Word, known: Mapping[str, Option], numeric: str | None) -> tuple[OptionValues, bool]:
    """The options in one word, and whether the last takes the next word as its value."""
    text, tail = (word, ()) if isinstance(word, str) else (word.parts[0], word.parts[1:])
    assert isinstance(text, str)
    if text.startswith("--"):
        name, equals, value = text[2:].partition("=")
        option = known.get(name)
        if option is None or len(name) < 2 or (tail and not equals):
            raise NotCovered
        return [(option, _value(value, tail) if equals else None)], _check_long(option, has_value=bool(equals))
    if numeric is not None and text[1:].isdigit() and not tail:
        return [(known[numeric], text[1:])], False
    if len(text) > _MAX_OPTION_CHARS:
        raise NotCovered
    found: OptionValues = []
    for place in range(1, len(text)):
        option = known.get(text[place])
        if option is None:
            raise NotCovered
        rest = text[place + 1 :]
        if option.value in ("=", "/"):
            return [*found, (option, _value(rest, tail) if rest or tail else None)], not (rest or tail)
        if option.value == "?":
            return [*found, (option, _value(rest, tail) if rest or tail else None)], False
        found.append((option, None))
    if tail:
        raise NotCovered
    return found, False


def _check_long(option: Option, *, has_value: bool) -> bool:
    if has_value and option.value in ("", "+"):
        raise NotCovered
    return option.value in ("=", "/") and not has_value


def _value(text: str, tail: tuple[object, ...]) -> Word:
    if not tail:
        return text
    return Expanded((text, *tail) if text else tail)  # pyright: ignore[reportArgumentType]


def _is_option(word: Word) -> bool:
    if isinstance(word, str):
        return len(word) > 1 and word[0] == "-"
    first = word.parts[0]
    if isinstance(first, str):
        return first.startswith("-")
    # What a variable or command puts here may be an option.
    return False
