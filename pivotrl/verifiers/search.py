"""Eq. 6 for search: the same words asked, the same page opened, evidence gathered before the answer, and the final answer itself.

Calls are compared as everywhere (`calls.py`), with three differences: queries are bags of words, batched queries and pages are sets, and a URL is the
page behind it. Whether to gather more evidence or to answer is part of the action: an answer where the expert still searches is premature, a search
where the expert answers is needless, and both earn 0.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence

from pivotrl.config.verifiers import SearchVerifierConfig
from pivotrl.types import Action, State, ToolCall, Verdict
from pivotrl.verifiers.argument_forms import canonical_form
from pivotrl.verifiers.argument_kinds import Kind, words_of_name
from pivotrl.verifiers.calls import CallsVerifier
from pivotrl.verifiers.message import fault_of
from pivotrl.verifiers.text_similarity import number_form, similar_text

_MAX_ANSWER_CHARS = 10_000
_TAGGED_ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL | re.IGNORECASE)
_NAMED_ANSWER = re.compile(r"^\W*(?:final|exact) answer\W*:[ \t*]*(.+)$", re.MULTILINE | re.IGNORECASE)
_ANSWER_TOKEN = re.compile(r"-?\d[\d,]*(?:\.\d+)?|\w+|[$%\u20ac\u00a3]")
_ARTICLES = frozenset({"a", "an", "the"})
# Names of arguments that say which page is opened.
_PAGE_NAMES = frozenset(
    {"url", "urls", "link", "page", "pages", "page id", "page ids", "section id", "section ids", "doc id", "document id", "article id"}
)


class SearchVerifier:
    """Binary reward for one turn of a search agent.

    Reasons: those of `CallsVerifier`; ``malformed``, ``no action`` (invalid); ``same page``, ``same answer`` (reward 1); ``answered before the
    evidence``, ``searched instead of answering``, ``different answer`` (reward 0); ``answer not judged`` (abstention).
    """

    def __init__(self, config: SearchVerifierConfig) -> None:
        self._config = config
        self._calls = CallsVerifier(config, is_search=True)

    def verify(self, state: State, expert: Action, action: Action) -> Verdict:
        if (fault := fault_of(action)) is not None:
            return fault
        if not expert.tool_calls:
            return self._verify_answer(expert, action)
        if not action.tool_calls:
            return Verdict.ok(0.0, "answered before the evidence")
        verdict = self._calls.verify_calls(state, expert.tool_calls, action.tool_calls)
        if verdict.reward == 0 and self._config.evidence == "page":
            pages = opened_pages(expert.tool_calls)
            if pages and pages == opened_pages(action.tool_calls):
                return Verdict.ok(1.0, "same page")
        return verdict

    def _verify_answer(self, expert: Action, action: Action) -> Verdict:
        if action.tool_calls:
            return Verdict.ok(0.0, "searched instead of answering")
        theirs, ours = final_answer(expert.content), final_answer(action.content)
        if normalised_answer(theirs) == normalised_answer(ours):
            return Verdict.ok(1.0, "same answer")
        match self._config.answer:
            case "abstain":
                return Verdict.abstain("answer not judged")
            case "similarity" if similar_text(theirs, ours, threshold=self._config.answer_similarity):
                return Verdict.ok(1.0, "same answer")
            case _:
                return Verdict.ok(0.0, "different answer")


def final_answer(text: str) -> str:
    """The answer in a message: what the last `<answer>` tag holds, else what follows the last line "Final answer:", else the whole message.

    >>> final_answer("It was in July. <answer>1969</answer>")
    '1969'
    """
    for pattern in (_TAGGED_ANSWER, _NAMED_ANSWER):
        found = pattern.findall(text[-_MAX_ANSWER_CHARS:])
        if found:
            return str(found[-1]).strip()
    return text.strip()


def normalised_answer(text: str) -> tuple[str, ...] | str:
    """Words without case, articles and punctuation, numbers by value; the text itself where it is long or nothing of it is left.

    >>> normalised_answer("The Eiffel Tower.") == normalised_answer("eiffel tower"), normalised_answer("12,500") == normalised_answer("12500.0")
    (True, True)
    """
    if len(text) > _MAX_ANSWER_CHARS:
        return text
    words = _ANSWER_TOKEN.findall(unicodedata.normalize("NFC", text).casefold())
    return tuple(number_form(word) for word in words if word not in _ARTICLES) or text


def opened_pages(calls: Sequence[ToolCall]) -> frozenset[object]:
    """The pages that the calls open; empty where one of them opens none. A section counts as its page (`page:section`)."""
    pages: set[object] = set()
    for call in calls:
        found = [page for name, value in (call.arguments_object() or {}).items() if _names_a_page(name) for page in _pages(value)]
        if not found:
            return frozenset()
        pages.update(found)
    return frozenset(pages)


def _names_a_page(name: str) -> bool:
    words = words_of_name(name)
    return " ".join(words[-2:]) in _PAGE_NAMES or words[-1:] == ["url"]


def _pages(value: object) -> list[object]:
    values = value if isinstance(value, list) else [value]
    texts = [text.strip() for text in values if isinstance(text, str) and text.strip()]
    return [canonical_form(Kind.PAGE, text) or text.partition(":")[0] for text in texts]
