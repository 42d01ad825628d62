"""When two sets of arguments mean the same: canonical trees by the tool's schema, and similarity for free text.

Every rule maps one side to a canonical tree without looking at the other, so equivalence of trees is reflexive, symmetric and
blind to JSON formatting. Rules:

- numbers by value (1 = 1.0); true is never 1; "1" = 1 only where the schema allows exactly one scalar type (then that type decides);
- strings: surrounding space never counts. Enum values, formats, patterns and ids keep everything else. So do single words that hold
  more than letters (``W123``, paths, dates, mails) or are camelCase, and text that looks like code or a command. What remains
  (words and prose) is compared without case and with folded spaces;
- prose of five words or more on both sides may differ up to the similarity threshold, but not in its numbers and codes, nor in
  whether it negates (English);
- optional members that are null are left out; missing members get the schema's default; lists with uniqueItems are sets;
- members unknown to the schema count like any other, so an invented argument is a difference.

Bounds, so that hostile arguments cost little: values nested deeper than `_MAX_DEPTH` levels are `TooDeep`; texts longer than
`_MAX_SIMILARITY_CHARS` are compared for equality only.
"""

from __future__ import annotations

import re
import unicodedata
from enum import Enum
from typing import Any

from rapidfuzz import fuzz

from pivotrl.types import ToolCall
from pivotrl.verifiers.argument_schema import ANY_VALUE, Coercion, ValueRule

_MAX_DEPTH = 64
_MAX_SIMILARITY_CHARS = 10_000
_MIN_PROSE_WORDS = 5
# A longer digit string is no number that anyone meant, and Python refuses to convert very long ones.
_MAX_NUMBER_CHARS = 64

_NUMBER = re.compile(r"-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][+-]?\d+)?")
_CODE = re.compile(r"[{}<>=|$\\`\[\];]|\w\(|(?:^|\s)-{1,2}[A-Za-z]")
_WORD = re.compile(r"\w+")
# Anchored at a word's beginning: unanchored, a long word without digits would cost quadratic time.
_WORD_WITH_DIGIT = re.compile(r"\b\w*\d\w*")
# "t" is what remains of don't, can't, won't.
_NEGATIONS = frozenset({"not", "no", "never", "none", "without", "cannot", "t"})
_BOOLEAN_WORDS = {"true": True, "false": False}


class TooDeep(ValueError):
    """Arguments nested deeper than `_MAX_DEPTH`; never leaves the verifier."""


class Truth(Enum):
    """Canonical booleans: not equal to 0 and 1, as Python's are."""

    TRUE = "true"
    FALSE = "false"


def arguments_tree(call: ToolCall, rule: ValueRule) -> dict[str, Any] | None:
    """The canonical tree of a call's arguments, or None where they are not a JSON object. Blank text is no arguments.

    Raises:
        TooDeep: for values nested too deeply.
    """
    arguments = call.arguments_object()
    if arguments is None:
        if call.arguments.strip():
            return None
        arguments = {}
    return _object_tree(arguments, rule, 0)


def same_arguments(first: dict[str, Any], second: dict[str, Any], *, text_similarity: float) -> bool:
    """Whether two canonical trees mean the same."""
    return first == second or _same_tree(first, second, text_similarity)


def difference(expert: dict[str, Any], action: dict[str, Any], *, text_similarity: float) -> tuple[str, str] | None:
    """The first difference in a stable order: (reason, argument name), or None where there is none."""
    if same_arguments(expert, action, text_similarity=text_similarity):
        return None
    for key in expert:
        if key not in action:
            return "missing argument", key
    for key in action:
        if key not in expert:
            return "unexpected argument", key
    for key, value in expert.items():
        if not _same_tree(value, action[key], text_similarity):
            return "wrong argument value", key
    raise AssertionError("trees differ, so one member does")


def similar_text(first: str, second: str, *, threshold: float) -> bool:
    """Whether two prose texts say nearly the same: their word sets are similar, they hold the same numbers, and both or neither negate.

    Similarity is rapidfuzz's normalised indel similarity of the sorted distinct words. It is not its `token_set_ratio`, which gives 1 to
    any subset, so that "the" would match every text with an article.
    """
    first, second = fold(first), fold(second)
    if first == second:
        return True
    if max(len(first), len(second)) > _MAX_SIMILARITY_CHARS:
        return False
    words_first, words_second = set(_WORD.findall(first)), set(_WORD.findall(second))
    if not words_first or not words_second:
        return False
    if set(_WORD_WITH_DIGIT.findall(first)) != set(_WORD_WITH_DIGIT.findall(second)):
        return False
    if words_first.isdisjoint(_NEGATIONS) != words_second.isdisjoint(_NEGATIONS):
        return False
    score = fuzz.ratio(" ".join(sorted(words_first)), " ".join(sorted(words_second)))
    return score >= 100 * threshold


def fold(text: str) -> str:
    """Text without case, with single spaces, in one Unicode form."""
    text = " ".join(text.split()).casefold()
    return text if text.isascii() else unicodedata.normalize("NFC", text)


def _tree(value: Any, rule: ValueRule, depth: int) -> Any:
    if isinstance(value, str):
        return _string_tree(value, rule)
    if isinstance(value, bool):
        return Truth.TRUE if value else Truth.FALSE
    if isinstance(value, int | float):
        if rule.coercion is Coercion.STRING:
            return str(value)
        return int(value) if isinstance(value, float) and value.is_integer() else value
    if isinstance(value, dict):
        return _object_tree(value, rule, depth + 1)
    if isinstance(value, list):
        return _list_tree(value, rule, depth + 1)
    return None


def _object_tree(value: dict[str, Any], rule: ValueRule, depth: int) -> dict[str, Any]:
    if depth > _MAX_DEPTH:
        raise TooDeep
    members = rule.members
    tree = {
        key: _tree(member, members.get(key, ANY_VALUE), depth)
        for key, member in value.items()
        if member is not None or key not in rule.droppable_nulls
    }
    for key, default in rule.defaults.items():
        if key not in tree:
            tree[key] = _tree(default, members[key], depth)
    return tree


def _list_tree(value: list[Any], rule: ValueRule, depth: int) -> list[Any]:
    if depth > _MAX_DEPTH:
        raise TooDeep
    items = rule.items or ANY_VALUE
    tree = [_tree(item, items, depth) for item in value]
    if not rule.is_set:
        return tree
    by_key = {_sort_key(item): item for item in tree}
    return [by_key[key] for key in sorted(by_key)]


def _sort_key(tree: Any) -> str:
    if isinstance(tree, dict):
        return repr(sorted((key, _sort_key(member)) for key, member in tree.items()))
    if isinstance(tree, list):
        return repr([_sort_key(item) for item in tree])
    return f"{type(tree).__name__}:{tree!r}"


def _string_tree(value: str, rule: ValueRule) -> Any:
    text = value.strip()
    if not text.isascii():
        text = unicodedata.normalize("NFC", text)
    if rule.coercion is Coercion.NUMBER and len(text) <= _MAX_NUMBER_CHARS and _NUMBER.fullmatch(text):
        number = float(text) if any(character in ".eE" for character in text) else int(text)
        return int(number) if isinstance(number, float) and number.is_integer() else number
    if rule.coercion is Coercion.BOOLEAN and text.casefold() in _BOOLEAN_WORDS:
        return Truth.TRUE if _BOOLEAN_WORDS[text.casefold()] else Truth.FALSE
    if rule.is_exact:
        return text
    if text.isalpha():
        return text.casefold() if text.islower() or text.isupper() or text.istitle() else text
    return text if _is_code(text) else fold(text)


def _is_code(text: str) -> bool:
    """Single words that hold more than letters, code and command lines: case and spaces may matter."""
    return len(text.split(None, 1)) < 2 or _CODE.search(text) is not None


def _same_tree(first: Any, second: Any, text_similarity: float) -> bool:
    if isinstance(first, str):
        return isinstance(second, str) and (first == second or _same_prose(first, second, text_similarity))
    if isinstance(first, dict):
        return (
            isinstance(second, dict)
            and first.keys() == second.keys()
            and all(_same_tree(member, second[key], text_similarity) for key, member in first.items())
        )
    if isinstance(first, list):
        return (
            isinstance(second, list)
            and len(first) == len(second)
            and all(_same_tree(a, b, text_similarity) for a, b in zip(first, second, strict=True))
        )
    return first == second


def _same_prose(first: str, second: str, text_similarity: float) -> bool:
    if max(len(first), len(second)) > _MAX_SIMILARITY_CHARS or _is_code(first) or _is_code(second):
        return False
    if min(len(first.split()), len(second.split())) < _MIN_PROSE_WORDS:
        return False
    return similar_text(first, second, threshold=text_similarity)
