"""When two texts for a person say the same in other words; English, and strict where it matters.

Two texts are the same where their words are, without case, spacing and punctuation. Otherwise they are similar only if all of this holds:

- the same numbers and codes, by value and as often (1,000 = 1000.00; 20% is not $20; -5 is not 5);
- the same deciding words, as often: negations, destructive and directional words, number words (`_DECIDING`, and the recipe's own list);
- both ask or neither does, by their marks or their first words;
- no two different objects of the same preposition (from Paris to Rome is not from Rome to Paris, to cancel is not to refund);
- what both say comes in the same order (content words, numbers, deciding words), but that one part of the sentence may stand in front of the other;
- short texts (fewer than `_MIN_LOOSE_WORDS` content words on a side) have the same content words: only function words differ;
- longer texts reach the threshold in rapidfuzz's normalised indel similarity of their sorted distinct content words, and every name (a word with a
  capital inside a sentence) stands on both sides. It is not `token_set_ratio`, which gives 1 to any subset: "the" would match every
  text with an article.

Queries (`similar_query`) are bags of words: whether they ask and in which order does not count.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from rapidfuzz import fuzz

# Longer texts are compared for equality only, which bounds the time of a verdict.
MAX_SIMILARITY_CHARS = 10_000
_MIN_LOOSE_WORDS = 10
# Two or three words mean something else when they change places.
_MIN_WORDS_TO_TURN = 4
_CACHED_TEXTS = 4096
_MAX_CACHED_CHARS = 1000

# The look-ahead (a number that runs on into letters is a code) is bounded, or many such numbers would cost quadratic time.
_TOKEN = re.compile(
    r"""(?:(?<![\w.])-)?\d[\d,]*(?:\.\d+)?\b(?![\w-]{0,40}[A-Za-z])
        | [aApP]\.[mM]\.
        | \w+(?:['\u2019-]\w+)*
        | [$%\u20ac\u00a3]""",
    re.VERBOSE,
)
_HAS_DIGIT = re.compile(r"\d")
# A comma separates thousands or it means something else (12,00 is no 1200).
_NUMBER = re.compile(r"(-?)(\d{1,3}(?:,\d{3})+|\d+)(\.\d+)?")
_SENTENCE_END = re.compile(r'[.!?:"\n(-]')


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


_PREPOSITIONS = _words("from to before after until till since than over under above below by against")
_DETERMINERS = _words("a an the this that these those my your our his her their its")
# Words that carry no decision by themselves; all others are content.
_FUNCTION_WORDS = (
    _DETERMINERS
    | _PREPOSITIONS
    | _words("""
        i you he she it we they me him us them mine yours ours is are was were be been being am do does did done doing have has had having would
        shall can could may might of in on at for with as and or but if then so because about into onto out up off there here what which who whom
        whose when where how why just now soon already also too very really please kindly thanks thank hello hi hey dear ok okay sorry sure well
        let lets get got like want wants wanted need needs needed""")
)
DESTRUCTIVE_WORDS = _words("""
    cancel cancelled canceled cancels cancelling cancellation delete deleted deletes deleting deletion remove removed removes removing removal drop
    dropped drops truncate destroy destroyed destroys erase erased erases wipe wiped wipes purge purged rm rmdir unlink kill killed terminate
    terminated shutdown uninstall uninstalled revoke revoked deactivate deactivated format overwrite overwritten discard discarded reset
    unsubscribe refund refunded block blocked ban banned close closed abort aborted""")
"""Words of actions that cannot be taken back: a text with one never matches a text without it."""
_DECIDING = DESTRUCTIVE_WORDS | _words("""
    not no never none nothing nobody neither nor without only except unless all both half first last next previous before after increase increased
    decrease decreased raise lower enable enabled disable disabled activate activated open opened start started stop stopped off down accept
    accepted reject rejected approve approved deny denied decline declined buy bought sell sold add added lock locked unlock unlocked true false yes
    more less most least zero one two three four five six seven eight nine ten eleven twelve twenty thirty forty fifty hundred thousand million once
    twice today tomorrow yesterday am pm will should must second seconds minute minutes hour hours day days week weeks month months
    year years tonight weekend monday tuesday wednesday thursday friday saturday sunday usd eur gbp %""")
# What a listed word does in a text, as bits; other words are content. Plain numbers, because this is the inner loop.
_DECIDES, _PREPOSITION, _DETERMINER = 1, 2, 4


def _role(word: str) -> int:
    if word in _DETERMINERS:
        return _DETERMINER
    return _DECIDES * (word in _DECIDING) | _PREPOSITION * (word in _PREPOSITIONS)


_ROLES = {word: _role(word) for word in _DECIDING | _FUNCTION_WORDS}
_UNITS = _words("usd eur gbp %")
# Contractions of function words and the possessive.
_SILENT = _words("s ve re m d")
_STEMS_BEFORE_NT = {"won't": "will", "can't": "can", "shan't": "will"}
_SAME_WORD = {"cannot": "not", "dont": "not", "cant": "not", "a.m.": "am", "p.m.": "pm", "shall": "will", "canceled": "cancelled"}
_SAME_WORD |= {"$": "usd", "dollar": "usd", "dollars": "usd", "\u20ac": "eur", "euro": "eur", "euros": "eur", "\u00a3": "gbp", "percent": "%"}
# A sentence that begins so is a question, whether or not its mark was typed.
_QUESTION = re.compile(
    r"""\?
        | (?:^|[.!:\n])\s{0,9}(?:ok[,.]?\s|and\s|so,?\s)?
          (?: (?:could|would|can|will|shall|may|should|do|does|did|is|are|was|were|have|has)
              \s(?:you|we|i|they|he|she|it|there|this|that|the|your|my)\b
            | (?:what|which|who|whom|whose|how)\b )""",
    re.VERBOSE | re.IGNORECASE,
)


@dataclass(frozen=True, slots=True)
class TextReading:
    """What counts in a text."""

    words: tuple[str, ...]
    """Every word without case and punctuation."""
    deciding: tuple[str, ...]
    """Numbers by value, codes, and deciding words, each as often as it is said."""
    content: frozenset[str]
    """Content words without case and plural, deciding words left out."""
    order: tuple[str, ...]
    """Deciding and content words in the order of their first use; "capacity of the stadium" is read as "stadium capacity"."""
    names: frozenset[str]
    """Content words that have a capital inside a sentence."""
    objects: dict[str, set[str]]
    """What follows each preposition."""
    asks: bool


def fold(text: str) -> str:
    """Text without case, with single spaces, in one Unicode form."""
    text = " ".join(text.split()).casefold()
    return text if text.isascii() else unicodedata.normalize("NFC", text)


def similar_text(first: str, second: str, *, threshold: float, deciding: frozenset[str] = frozenset()) -> bool:
    """Whether two texts say the same by the rules of this module. Reflexive and symmetric.

    Args:
        threshold: in [0, 1], for texts of `_MIN_LOOSE_WORDS` content words and more.
        deciding: further words that must stand on both sides.
    """
    if first == second or fold(first) == fold(second):
        return True
    if max(len(first), len(second)) > MAX_SIMILARITY_CHARS:
        return False
    a, b = read_text(first, deciding), read_text(second, deciding)
    if a.asks is not b.asks:
        return False
    return _are_same_words(a, b) or (_share_order(a, b) and _share_words(a, b, threshold))


def similar_query(first: str, second: str, *, threshold: float, deciding: frozenset[str] = frozenset()) -> bool:
    """`similar_text` for search queries, whose order and question mark do not count."""
    if first == second or fold(first) == fold(second):
        return True
    if max(len(first), len(second)) > MAX_SIMILARITY_CHARS:
        return False
    a, b = read_text(first, deciding), read_text(second, deciding)
    return _are_same_words(a, b) or _share_words(a, b, threshold)


def read_text(text: str, deciding: frozenset[str] = frozenset()) -> TextReading:
    """The reading of a text, remembered for the short ones that many samples share."""
    return _remembered(text, deciding) if len(text) <= _MAX_CACHED_CHARS else _read(text, deciding)


@lru_cache(maxsize=_CACHED_TEXTS)
def _remembered(text: str, deciding: frozenset[str]) -> TextReading:
    return _read(text, deciding)


def _read(text: str, deciding: frozenset[str]) -> TextReading:
    words: list[str] = []
    decisive: list[str] = []
    order: list[str] = []
    seen: set[str] = set()
    names: set[str] = set()
    objects: dict[str, set[str]] = {}
    preposition = before = owned = ""
    for word, is_name in _tokens(text):
        words.append(word)
        role = _DECIDES if word in deciding else _ROLES.get(word)
        if role is None:
            if word.isalpha() or _HAS_DIGIT.search(word) is None:
                word = word[:-1] if word[-1] == "s" and len(word) > 3 and word[-2] != "s" else word
                if is_name:
                    names.add(word)
                if word not in seen:
                    seen.add(word)
                    order.insert(order.index(owned) if owned in seen else len(order), word)
            else:
                role = _DECIDES
        if role is not None:
            if role == _DETERMINER:
                continue
            if role & _DECIDES:
                decisive.append(word)
                if word not in seen:
                    seen.add(word)
                    order.append(word)
        if preposition:
            objects.setdefault(preposition, set()).add(word)
        preposition = word if role is not None and role & _PREPOSITION else ""
        owned, before = before if word == "of" else "", word
    asks = _QUESTION.search(text) is not None
    return TextReading(tuple(words), tuple(decisive), frozenset(seen.difference(decisive)), tuple(order), frozenset(names), objects, asks)


def _tokens(text: str) -> list[tuple[str, bool]]:
    """Words without case, contractions written out and numbers by value, and whether each is a name."""
    if not text.isascii():
        text = unicodedata.normalize("NFC", text)
    tokens: list[tuple[str, bool]] = []
    end = 0
    for match in _TOKEN.finditer(text):
        word, (start, after) = match.group(), match.span()
        is_name = end > 0 and word[0].isupper() and word != "I" and _SENTENCE_END.search(text, end, start) is None
        end = after
        folded = word.casefold()
        if folded.isalpha():
            tokens.append((_SAME_WORD.get(folded, folded), is_name))
        elif _HAS_DIGIT.search(folded):
            tokens.append((number_form(folded), is_name))
        else:
            tokens += [(_SAME_WORD.get(part, part), is_name) for part in _written_out(folded) if part]
    return tokens


def _written_out(word: str) -> Sequence[str]:
    """The words of a contraction or a compound: won't is will not, follow-up is follow up, e-mail is email."""
    word = word.replace("\u2019", "'")
    stem, _, ending = word.rpartition("'")
    if word.endswith("n't"):
        return (_STEMS_BEFORE_NT.get(word, word[:-3]), "not")
    if ending == "ll":
        return (stem, "will")
    parts = (stem if ending in _SILENT else word).split("-")
    return ("".join(parts),) if any(len(part) == 1 for part in parts) else parts


def number_form(word: str) -> str:
    """A number by value, other words as they are: ``1,000.50`` is ``1000.5``."""
    match = _NUMBER.fullmatch(word)
    if match is None:
        return word
    sign, whole, fraction = match.groups()
    return f"{sign}{whole.replace(',', '').lstrip('0') or '0'}{(fraction or '').rstrip('0').rstrip('.')}"


def _are_same_words(first: TextReading, second: TextReading) -> bool:
    """Whether only case, spaces and punctuation differ; of a text without words, nothing is known."""
    return first.words == second.words and len(first.words) > 0


def _share_words(first: TextReading, second: TextReading, threshold: float) -> bool:
    if sorted(first.deciding) != sorted(second.deciding) or not (first.content or first.deciding) or _other_objects(first, second):
        return False
    if first.content == second.content:
        return True
    if min(len(first.content), len(second.content)) < _MIN_LOOSE_WORDS or not (first.names <= second.content and second.names <= first.content):
        return False
    return fuzz.ratio(" ".join(sorted(first.content)), " ".join(sorted(second.content))) >= 100 * threshold


def _share_order(first: TextReading, second: TextReading) -> bool:
    """Whether the words that both texts hold come in the same order, or one part of the sentence stands in front of the other. Currency may
    stand on either side of its amount."""
    shared = (set(first.order) & set(second.order)) - _UNITS
    ours, theirs = ([word for word in reading.order if word in shared] for reading in (first, second))
    if ours != theirs and (len(ours) < _MIN_WORDS_TO_TURN or not _is_turned(ours, theirs)):
        return False
    return _is_turned(*([word for word in reading.deciding if word not in _UNITS] for reading in (first, second)))


def _is_turned(first: Sequence[str], second: Sequence[str]) -> bool:
    """Whether the second sequence is the first, or the first with its end put in front."""
    turned = "\0".join(("", *first, *first, ""))
    return len(first) == len(second) and "\0".join(("", *second, "")) in turned


def _other_objects(first: TextReading, second: TextReading) -> bool:
    """Whether one preposition has objects on both sides and none of them is shared."""
    return any(objects.isdisjoint(second.objects[word]) for word, objects in first.objects.items() if word in second.objects)
