"""Search turns: the same words asked, the same page opened, evidence before answers, and the answer itself."""

from __future__ import annotations

import json
from typing import Any

import pytest

from pivotrl.config.verifiers import SearchVerifierConfig
from pivotrl.types import Action, ParseOutcome, State, Tool, ToolCall, ToolOrigin, Verdict, VerdictKind
from pivotrl.verifiers.search import SearchVerifier, final_answer, opened_pages

STRINGS = {"type": "array", "items": {"type": "string"}}
TOOLS = (
    Tool(
        "search", "", {"type": "object", "properties": {"query": STRINGS, "num_results": {"type": "integer", "default": 10}}, "required": ["query"]}
    ),
    Tool("visit", "", {"type": "object", "properties": {"url": STRINGS, "goal": {"type": "string"}}, "required": ["url"]}),
    Tool("view_sections", "", {"type": "object", "properties": {"page_id": {"type": "string"}}}),
    Tool("read_section", "", {"type": "object", "properties": {"section_id": {"type": "string"}}}),
)


def _verify(expert: Action, action: Action, origin: ToolOrigin = ToolOrigin.ROW, **config: Any) -> Verdict:
    verifier = SearchVerifier(SearchVerifierConfig.model_validate({"type": "search", **config}))
    verdict = verifier.verify(State((), TOOLS, origin), expert, action)
    assert verifier.verify(State((), TOOLS, origin), expert, expert).reward == 1
    return verdict


def _calls(name: str, **arguments: object) -> Action:
    return Action("", (ToolCall(name, json.dumps(arguments)),), None, ParseOutcome.PARSED)


def _says(text: str) -> Action:
    return Action(text, (), None, ParseOutcome.ABSENT)


@pytest.mark.parametrize("origin", [ToolOrigin.ROW, ToolOrigin.INFERRED])
@pytest.mark.parametrize(
    ("queries", "reward"),
    [
        (["Iceland population 2020", "who painted the Night Watch"], 1),
        (["the Night Watch: who painted it", "population of Iceland in 2020?"], 1),
        (["Iceland population 2020"], 0),
        (["Iceland population 2021", "who painted the Night Watch"], 0),
        (["Iceland population 2020", "who painted the Night Watch", "Rembrandt"], 0),
        ([], 0),
        ([""], 0),
    ],
)
def test_queries(origin: ToolOrigin, queries: list[str], reward: float) -> None:
    expert = _calls("search", query=["who painted the Night Watch", "population of Iceland in 2020"])
    assert _verify(expert, _calls("search", query=queries), origin).reward == reward


@pytest.mark.parametrize(
    ("urls", "reward"),
    [
        (["http://en.example.org/wiki/A#History", "https://example.org/b/"], 1),
        (["https://example.org/b", "https://www.en.example.org/wiki/A"], 1),
        (["https://en.example.org/wiki/A"], 0),
        (["https://en.example.org/wiki/a", "https://example.org/b"], 0),
        (["https://en.example.org/wiki/A", "https://example.org/b?page=2"], 0),
    ],
)
def test_pages(urls: list[str], reward: float) -> None:
    expert = _calls("visit", url=["https://en.example.org/wiki/A", "https://example.org/b"], goal="find the year")
    assert _verify(expert, _calls("visit", url=urls, goal="find the year")).reward == reward


def test_a_page_opened_another_way_counts_where_the_recipe_says_so() -> None:
    expert, other = _calls("read_section", section_id="ann_lee:career"), _calls("view_sections", page_id="ann_lee")
    assert _verify(expert, other).reason == "wrong tool"
    assert _verify(expert, other, evidence="page").reason == "same page"
    assert _verify(expert, _calls("view_sections", page_id="ann_leigh"), evidence="page").reward == 0
    assert _verify(expert, _calls("search", query=["ann_lee"]), evidence="page").reward == 0
    assert opened_pages(_calls("view_sections", page_id=" ").tool_calls) == frozenset()


def test_evidence_comes_before_the_answer_and_not_after_it() -> None:
    search, answer = _calls("search", query=["moon landing year"]), _says("<answer>1969</answer>")
    assert _verify(search, answer).reason == "answered before the evidence"
    assert _verify(answer, search).reason == "searched instead of answering"


@pytest.mark.parametrize(
    ("text", "reward"),
    [
        ("I looked it up twice.\n<answer>The  Eiffel tower.</answer>", 1),
        ("**Final answer:** Eiffel Tower", 1),
        ("Eiffel Tower", 1),
        ("<answer>Eiffel Tower, Big Ben, Colosseum, Louvre</answer>", 0),
        ("<answer>Big Ben</answer> and not the <answer>Eiffel Tower</answer>", 1),
        ("<answer>Eiffel Tower</answer> or rather <answer>Big Ben</answer>", 0),
        ("<answer></answer>", 0),
        ("I do not know.", 0),
    ],
)
def test_answers(text: str, reward: float) -> None:
    assert _verify(_says("<answer>Eiffel Tower</answer>"), _says(text)).reward == reward


def test_numbers_in_answers_count_by_value() -> None:
    expert = _says("<answer>12,500</answer>")
    assert _verify(expert, _says("<answer>12500.0</answer>")).reward == 1
    for other in ("-12,500", "12,501", "1,250", "12,500%", "$12,500"):
        assert _verify(expert, _says(f"<answer>{other}</answer>")).reward == 0


def test_how_answers_are_judged_is_the_recipe_s() -> None:
    expert, action = _says("Ann Lee designed the tower."), _says("The tower: Ann Lee designed it.")
    assert _verify(expert, _says("Ann Lee designed this tower."), answer="similarity").reward == 1
    assert _verify(expert, _says("Ann Lee designed this tower."), answer="normalised").reward == 0
    assert _verify(expert, action, answer="abstain").kind is VerdictKind.ABSTAIN
    assert final_answer("Exact Answer: 5\nConfidence: 90%") == "5"
