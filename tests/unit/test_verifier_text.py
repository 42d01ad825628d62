"""Texts and queries that say the same, and the ones that only look alike; the message verifier's contents."""

from __future__ import annotations

from typing import Any

import pytest
from fakes.processor_time import processor_seconds
from hypothesis import given, settings
from hypothesis import strategies as st

from pivotrl.config.verifiers import MessageVerifierConfig
from pivotrl.types import Action, ParseOutcome, State, ToolCall, ToolOrigin, Verdict, VerdictKind
from pivotrl.verifiers.message import MessageVerifier
from pivotrl.verifiers.text_similarity import similar_query, similar_text

LONG = "The customer bought a blue garden chair in March, found the left arm loose, sent two photos and asks for a replacement part by post."

SAME = [
    ("Your order W12 has been cancelled.", "your order W12 has now been canceled!"),
    ("I'll send it to you.", "I will send it to you"),
    ("It isn't ready.", "It is not ready."),
    ("The capacity of the stadium is 90,000.", "The stadium's capacity is 90000."),
    ("The meeting is on Thursday at 10:00 in room 4.", "Thursday at 10:00 in room 4 is the meeting."),
    ("It costs $20.50.", "It costs 20.5 dollars."),
    ("Could you give me your e-mail?", "could you give me your email"),
    (LONG, LONG.replace("The customer", "Our customer").replace("asks for", "is asking for")),
]
DIFFERENT = [
    ("Your order W12 has been cancelled.", "Your order W13 has been cancelled."),
    ("Your order W12 has been cancelled.", "Your order W12 has not been cancelled."),
    ("It is cancelled.", "Cancel it?"),
    ("Transfer it from Paris to Rome.", "Transfer it from Rome to Paris."),
    ("Ann owes Bo money.", "Bo owes Ann money."),
    ("I want to return the lamp.", "I want to keep the lamp."),
    ("A discount of 20%.", "A discount of $20."),
    ("The balance is 5.", "The balance is -5."),
    ("The price is 1,200 EUR.", "The price is 12,00 EUR."),
    ("The refund takes five days.", "The refund takes six days."),
    ("Please send the parcel.", "Please send the parcel and the invoice."),
    ("one from Ann about the budget and one from Bo about the invoice", "one from Ann about the invoice and one from Bo about the budget"),
    ("The refund goes to the card you paid with and takes some days.", "the"),
    ("Delete the old photos of the trip.", "Archive the old photos of the trip."),
    (LONG, LONG.replace("March", "April")),
    (LONG, LONG.replace("two photos", "three photos")),
    (LONG, LONG.replace("asks", "does not ask")),
    ("It is not in room 4, and room 5 is not free.", "It is not in room 4, and room 5 is free."),
    ("Pay 3 of 5 now and 5 of 3 later.", "Pay 3 of 5 now and 3 of 5 later."),
    ("", "the"),
    ("...", "!!!"),
]


@pytest.mark.parametrize(("first", "second"), SAME)
def test_the_same_in_other_words(first: str, second: str) -> None:
    assert similar_text(first, second, threshold=0.8)
    assert similar_text(second, first, threshold=0.8)


@pytest.mark.parametrize(("first", "second"), DIFFERENT)
def test_alike_and_not_the_same(first: str, second: str) -> None:
    assert not similar_text(first, second, threshold=0.5)
    assert not similar_text(second, first, threshold=0.5)


def test_the_threshold_decides_for_long_texts_only() -> None:
    near = LONG.replace("garden", "balcony")
    assert similar_text(LONG, near, threshold=0.8)
    assert not similar_text(LONG, near, threshold=0.99)
    assert not similar_text("a blue garden chair", "a blue balcony chair", threshold=0.0)


def test_a_recipe_s_word_decides() -> None:
    first, second = LONG, LONG.replace("asks for", "settles for")
    assert similar_text(first, second, threshold=0.7)
    assert not similar_text(first, second, threshold=0.7, deciding=frozenset({"settles"}))


@pytest.mark.parametrize(
    ("first", "second", "is_same"),
    [
        ("population of Iceland", "What is the population of Iceland?", True),
        ("1805 battle won by Napoleon", "battle won by Napoleon in 1805", True),
        ("battle won by Napoleon in 1805", "battle lost by Napoleon in 1805", False),
        ("flights from Oslo to Rome", "flights from Rome to Oslo", False),
        ("python 3.13 release date", "python release date", False),
    ],
)
def test_queries_are_bags_of_words(first: str, second: str, is_same: bool) -> None:
    assert similar_query(first, second, threshold=0.8) is is_same
    assert similar_query(second, first, threshold=0.8) is is_same


_SOME_TEXT = st.text(max_size=60) | st.lists(
    st.sampled_from(
        [
            "not",
            "can't",
            "n't",
            "_",
            "W12",
            "1,000",
            "-5",
            "$20",
            "Ann",
            "Bo",
            "from",
            "to",
            "of",
            "the",
            "delete",
            "chair",
            "chairs",
            "e-mail",
            "?",
            ".",
            "a.m.",
            "I'll",
        ]
    ),
    max_size=25,
).map(" ".join)


@settings(max_examples=300)
@given(first=_SOME_TEXT, second=_SOME_TEXT)
def test_similarity_is_reflexive_symmetric_and_total(first: str, second: str) -> None:
    for similar in (similar_text, similar_query):
        assert similar(first, first, threshold=1.0)
        assert similar(first, second, threshold=0.8) == similar(second, first, threshold=0.8)


REPEATED = ["a", "1-", "1,", "a-", "A b ", "of ", "from x ", "\u0130", "' ", "$", "x'", "?\n", "\n", "is ", "ok ", "n't ", "a of b ", "a.m."]


@pytest.mark.parametrize("piece", REPEATED)
def test_repeated_pieces_stay_within_the_time_bound(piece: str) -> None:
    text = (piece * 10_000)[:9_990]
    assert processor_seconds(lambda: similar_text(text, text + " b", threshold=0.8))[0] < 1


STATE = State((), (), ToolOrigin.NONE)


def _says(text: str) -> Action:
    return Action(text, (), None, ParseOutcome.ABSENT)


def _verify(content: Any, expert: Action, action: Action) -> Verdict:
    return MessageVerifier(MessageVerifierConfig(type="message", content=content)).verify(STATE, expert, action)


@pytest.mark.parametrize(
    ("content", "text", "reward"),
    [
        ("facts", "Ann, W12 comes on 5 May, I promise.", 1),
        ("facts", "W12 comes on 5 May.", 0),
        ("facts", "Ann, W12 does not come on 5 May.", 0),
        ("facts", "Ann, W12 comes on 6 May.", 0),
        ("facts", "Ann, does W12 come on 5 May?", 0),
        ("exact", "Hello Ann, your order W12 comes on 5 May. ", 1),
        ("exact", "Hello Ann, order W12 comes on 5 May.", 0),
        ("similarity", "Hello Ann, order W12 comes on 5 May.", 1),
        ("similarity", "Ann, W12 arrives on 5 May.", 0),
        ("any", "Whatever.", 1),
    ],
)
def test_contents(content: str, text: str, reward: float) -> None:
    assert _verify(content, _says("Hello Ann, your order W12 comes on 5 May."), _says(text)).reward == reward


def test_a_message_without_facts_is_compared_whole() -> None:
    assert _verify("facts", _says("Hello there."), _says("hello there")).reward == 1
    assert _verify("facts", _says("Hello there."), _says("Good day to you.")).reward == 0


def test_speak_or_call_and_what_is_not_judged() -> None:
    call = Action("", (ToolCall("f", "{}"),), None, ParseOutcome.PARSED)
    assert _verify("any", _says("Hi."), call).reason == "called instead of speaking"
    assert _verify("any", call, _says("Hi.")).reason == "spoke instead of calling"
    assert _verify("any", call, call).kind is _verify("abstain", _says("Hi."), _says("Hi.")).kind is VerdictKind.ABSTAIN
    assert _verify("any", _says("Hi."), _says(" \n")).kind is VerdictKind.INVALID
    assert _verify("any", _says("Hi."), Action("<tool_call>", (), None, ParseOutcome.MALFORMED)).kind is VerdictKind.INVALID
