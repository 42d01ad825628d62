"""When two sets of arguments mean the same: canonical trees by the tool's schema, and similarity for prose.

Every rule maps one side to a canonical tree without looking at the other, so equality of trees is an equivalence, blind to JSON formatting.
Only prose is compared pairwise (`text_similarity.py`). Rules:

- numbers by value (1 = 1.0); true is never 1; "1" = 1 only where the schema allows exactly one scalar type (then that type decides);
- strings by their kind (`argument_kinds.py`), most of them by a parser (`argument_forms.py`); outer space never counts. An enum's member may be
  written without case and with spaces, hyphens or underscores, where that names one member
  only;
- strings of no kind: JSON objects and lists by value; what begins as a path or a web address does (`/`, `./`, `~/`, `http://`) as such; single
  words that hold more than letters (``W123``, dates, mails), camelCase and text that looks like code exactly; other words and prose
  without case and with folded spaces;
- optional members that are null are left out; missing members get the schema's default; lists with uniqueItems are sets, lists that the recipe
  calls unordered are bags;
- members unknown to the schema count like any other, so an invented argument is a difference.

Bounds, so that hostile arguments cost little: values nested deeper than `_MAX_DEPTH` levels are `TooDeep`; strings longer than their parser's
bound are compared exactly; where the arguments are longer than `MAX_PARSED_CHARS`, no string is parsed.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any, cast

import orjson

from pivotrl.verifiers.argument_forms import canonical_form
from pivotrl.verifiers.argument_kinds import Kind
from pivotrl.verifiers.argument_schema import Coercion, Order, ValueRule
from pivotrl.verifiers.matching import MAX_MATCHED, maximum_matching
from pivotrl.verifiers.sql_form import looks_like_sql, sql_form
from pivotrl.verifiers.text_similarity import fold

MAX_PARSED_CHARS = 16_000
"""Argument text of all calls of an action together, characters, up to which its strings are given to parsers."""
_MAX_DEPTH = 64
_MAX_JSON_CHARS = 16_000
# A longer digit string is no number that anyone meant, and Python refuses to convert very long ones.
_MAX_NUMBER_CHARS = 64

_NUMBER = re.compile(r"-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][+-]?\d+)?")
_CODE = re.compile(r"[{}<>=|$\\`\[\];]|\w\(|(?:^|\s)-{1,2}[A-Za-z]")
_CODE_IN_PROSE = re.compile(r"[{}|\\`]|\w\(|(?:^|\s)-{1,2}[A-Za-z]|&&|[=!<>]=")
# What is a URL or a path whatever it is called: no words in it, and a beginning that nothing else has.
_SHAPE = re.compile(r"(?:(https?://)|~?/|\.\.?/)\S+\Z")
_CHOICE_SEPARATORS = re.compile(r"[\s_-]+")
_BOOLEAN_WORDS = {"true": True, "false": False}

# Strings that a number may stand for; a date, a path or a command is never meant by one.
_KINDS_OF_NUMBERS = (Kind.PLAIN, Kind.EXACT, Kind.TEXT, Kind.QUERY)

type Tree = dict[str, Any]
type Similar = Callable[[Prose, Prose], bool]


class TooDeep(ValueError):
    """Arguments nested deeper than `_MAX_DEPTH`; never leaves the verifier."""


class Truth(Enum):
    """Canonical booleans: not equal to 0 and 1, as Python's are."""

    TRUE = "true"
    FALSE = "false"


@dataclass(frozen=True, slots=True)
class Prose:
    """A text for a person, compared by similarity."""

    text: str
    is_query: bool = False


@dataclass(frozen=True, slots=True)
class Unordered:
    """A list whose places mean nothing; items sorted by `keys`."""

    keys: tuple[str, ...]
    items: tuple[Any, ...]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Unordered) and other.keys == self.keys

    def __hash__(self) -> int:
        return hash(self.keys)


@dataclass(frozen=True, slots=True)
class Arguments:
    """One call's arguments as read and as compared. Not to be changed."""

    values: dict[str, Any]
    tree: Tree


def key_difference(expert: Arguments, values: dict[str, Any], rule: ValueRule) -> tuple[str, str] | None:
    """The difference that the names alone tell, before any value is read: (reason, argument name), or None where they tell none."""
    for key in expert.tree:
        if key not in values and key not in rule.defaults:
            return "missing argument", key
    for key in values:
        if key not in expert.tree and key not in rule.members and key not in rule.ignored:
            return "unexpected argument", key
    return None


def read_object(text: str) -> dict[str, Any] | None:
    """The arguments of a call as JSON values, or None where they are not a JSON object. Blank text is no arguments."""
    try:
        values: Any = orjson.loads(text) if text.strip() else {}
    except (orjson.JSONDecodeError, ValueError):
        return None
    return cast("dict[str, Any]", values) if isinstance(values, dict) else None


def arguments_tree(values: dict[str, Any], rule: ValueRule, *, is_parsed: bool, like: Arguments | None = None) -> Tree:
    """The canonical tree of a call's arguments.

    Args:
        is_parsed: whether strings are given to parsers; the same for both sides of a comparison.
        like: the other side, read under the same rule; a string that is spelled as its string has its canonical form.

    Raises:
        TooDeep: for values nested too deeply.
    """
    return _Reader(is_parsed=is_parsed).object_tree(values, rule, 0, like)


def same_tree(first: Any, second: Any, similar: Similar) -> bool:
    """Whether two canonical trees mean the same. Symmetric where `similar` is."""
    if isinstance(first, Prose):
        return isinstance(second, Prose) and similar(first, second)
    if first == second:
        return True
    if isinstance(first, dict):
        return (
            isinstance(second, dict)
            and first.keys() == second.keys()
            and all(same_tree(member, second[key], similar) for key, member in first.items())
        )
    if isinstance(first, list):
        return isinstance(second, list) and len(first) == len(second) and all(same_tree(a, b, similar) for a, b in zip(first, second, strict=True))
    if isinstance(first, Unordered):
        if not isinstance(second, Unordered) or not 0 < len(first.items) == len(second.items) <= MAX_MATCHED:
            return False
        pairs = maximum_matching(len(first.items), len(second.items), lambda i, j: same_tree(first.items[i], second.items[j], similar))
        return len(pairs) == len(first.items)
    return False


def difference(expert: Tree, action: Tree, similar: Similar) -> tuple[str, str] | None:
    """The first difference in a stable order: (reason, argument name), or None where there is none."""
    for key in expert:
        if key not in action:
            return "missing argument", key
    for key in action:
        if key not in expert:
            return "unexpected argument", key
    for key, value in expert.items():
        other = action[key]
        if value is not other and not same_tree(value, other, similar):
            return "wrong argument value", key
    return None


class _Reader:
    """Values to trees."""

    __slots__ = ("_is_parsed",)

    def __init__(self, *, is_parsed: bool) -> None:
        self._is_parsed = is_parsed

    def object_tree(self, value: dict[str, Any], rule: ValueRule, depth: int, like: Arguments | None = None) -> Tree:
        if depth > _MAX_DEPTH:
            raise TooDeep
        members, known = rule.members, like.values if like is not None else None
        tree: Tree = {}
        for key, member in value.items():
            if (member is None and key in rule.droppable_nulls) or key in rule.ignored:
                continue
            if known is not None and isinstance(member, str) and known.get(key) == member:
                tree[key] = like.tree[key]  # pyright: ignore[reportOptionalMemberAccess] - known is its values
            else:
                tree[key] = self.tree(member, members[key], depth)
        for key, default in rule.defaults.items():
            if key not in tree and key not in rule.ignored:
                tree[key] = self.tree(default, members[key], depth)
        return tree

    def tree(self, value: Any, rule: ValueRule, depth: int) -> Any:
        if rule.forms:
            rule = next((form for form in rule.forms if form.fits(value)), rule)
        if isinstance(value, str):
            return self._string_tree(value, rule, depth)
        if isinstance(value, bool):
            return Truth.TRUE if value else Truth.FALSE
        if isinstance(value, int | float):
            if rule.coercion is Coercion.STRING and rule.kind in _KINDS_OF_NUMBERS:
                return self._string_tree(str(value), rule, depth)
            return int(value) if isinstance(value, float) and value.is_integer() else value
        if isinstance(value, dict):
            return self.object_tree(cast("dict[str, Any]", value), rule, depth + 1)
        if isinstance(value, list):
            return self._list_tree(cast("list[Any]", value), rule, depth + 1)
        return None

    def _list_tree(self, value: list[Any], rule: ValueRule, depth: int) -> Any:
        if depth > _MAX_DEPTH:
            raise TooDeep
        items, first = rule.items or _ANY_VALUE, rule.first_items
        tree = [self.tree(item, first[index] if index < len(first) else items, depth) for index, item in enumerate(value)]
        if rule.order is Order.COUNTS:
            return tree
        keyed = [(_sort_key(item), item) for item in tree]
        if rule.order is Order.SET:
            keyed = list(dict(keyed).items())
        keyed.sort(key=lambda pair: pair[0])
        return Unordered(tuple(key for key, _ in keyed), tuple(item for _, item in keyed))

    def _string_tree(self, value: str, rule: ValueRule, depth: int) -> Any:
        text = value.strip()
        if not text.isascii():
            text = unicodedata.normalize("NFC", text)
        if rule.coercion is Coercion.NUMBER and len(text) <= _MAX_NUMBER_CHARS and _NUMBER.fullmatch(text):
            number = float(text) if any(character in ".eE" for character in text) else int(text)
            return int(number) if isinstance(number, float) and number.is_integer() else number
        if rule.coercion is Coercion.BOOLEAN and text.casefold() in _BOOLEAN_WORDS:
            return Truth.TRUE if _BOOLEAN_WORDS[text.casefold()] else Truth.FALSE
        if rule.choices:
            return _choice(text, rule.choices)
        match rule.kind:
            case Kind.PLAIN:
                return self._plain_tree(text, depth)
            case Kind.EXACT:
                return text
            case Kind.CODE:
                return value.replace("\r\n", "\n").rstrip()
            case Kind.TEXT | Kind.QUERY:
                return self._prose_tree(text, rule.kind is Kind.QUERY, depth)
            case Kind.JSON:
                return self._json_tree(text, depth)
            case _:
                form = canonical_form(rule.kind, text) if self._is_parsed else None
                return text if form is None else form

    def _prose_tree(self, text: str, is_query: bool, depth: int) -> Any:  # noqa: FBT001 - one of two kinds
        if is_query and self._is_parsed and looks_like_sql(text) and (form := sql_form(text)) is not None:
            return form
        if len(text.split(None, 1)) < 2:
            return self._plain_tree(text, depth)
        return text if _CODE_IN_PROSE.search(text) else Prose(text, is_query)

    def _plain_tree(self, text: str, depth: int) -> Any:
        if text[:1] in ("{", "["):
            return self._json_tree(text, depth)
        if self._is_parsed and (shape := _SHAPE.match(text)) is not None:
            form = canonical_form(Kind.URL if shape.group(1) else Kind.PATH, text)
            return text if form is None else form
        if text.replace("'", "").isalpha():
            return text.casefold() if text.islower() or text.isupper() or text.istitle() else text
        return text if len(text.split(None, 1)) < 2 or _CODE.search(text) else fold(text)

    def _json_tree(self, text: str, depth: int) -> Any:
        """JSON written into a string, by value; apart from the value itself, which is no string."""
        if len(text) > _MAX_JSON_CHARS:
            return text
        try:
            value = orjson.loads(text)
        except (orjson.JSONDecodeError, ValueError):
            return text
        return "json", self.tree(value, _ANY_VALUE, depth + 1)


class _AnyMembers(dict[str, ValueRule]):
    def __missing__(self, key: str) -> ValueRule:
        return _ANY_VALUE


_ANY_VALUE = ValueRule(members=_AnyMembers())


def _choice(text: str, choices: tuple[Any, ...]) -> str:
    """The one member of an enum that a text names, or the text itself."""
    if text in choices:
        return text
    name = _choice_name(text)
    named = [choice for choice in choices if isinstance(choice, str) and _choice_name(choice) == name]
    return named[0] if len(named) == 1 else text


def _choice_name(text: str) -> str:
    return _CHOICE_SEPARATORS.sub(" ", text.strip()).casefold()


def _sort_key(tree: Any) -> str:
    match tree:
        case dict():
            return repr(sorted((key, _sort_key(member)) for key, member in cast("Tree", tree).items()))
        case list() | tuple():
            return repr([_sort_key(item) for item in cast("list[Any]", tree)])
        case Prose():
            return f"prose:{fold(tree.text)!r}"
        case Unordered():
            return repr(tree.keys)
        case _:
            return f"{type(tree).__name__}:{tree!r}"
