"""The skill suite: every skill in turn, answers that are right, and a check that takes nothing else."""

from __future__ import annotations

import random

from pivotrl.worlds.skills import SKILLS, SUITES, SkillQuestion, draw_questions, exam_questions, is_right


def test_questions_take_the_skills_in_turn_and_depend_on_the_seed_alone() -> None:
    questions = draw_questions(40, random.Random(1))
    assert [question.skill for question in questions] == [*SKILLS] * 5
    assert questions == draw_questions(40, random.Random(1))
    assert questions != draw_questions(40, random.Random(2))


def test_computed_answers_agree_with_python() -> None:
    """Reads the question's text and computes the answer another way."""
    for question in draw_questions(800, random.Random(3)):
        text, answer = question.question, question.answer
        if question.skill == "arithmetic":
            assert str(eval(text.removesuffix(" ="))) == answer
        elif question.skill == "sequence":
            first, second, third = map(int, text.removesuffix(" then?").split())
            assert third - second == second - first
            assert int(answer) - third == second - first
        elif question.skill == "trace":
            scope: dict[str, int] = {}
            exec(text.removesuffix(" x?"), scope)
            assert str(scope["x"]) == answer
        elif question.skill == "string":
            assert answer == " ".join(reversed(text.removeprefix("Swap ").split()))
        elif question.skill == "translation":
            assert len(answer.split()) == 2


def test_each_question_has_one_answer() -> None:
    answers: dict[str, set[str]] = {}
    for question in draw_questions(4000, random.Random(4)):
        answers.setdefault(question.question, set()).add(question.answer)
    assert {len(one) for one in answers.values()} == {1}
    assert len(answers) > 120


def test_only_the_answer_is_right() -> None:
    question = SkillQuestion("arithmetic", "2 + 2 =", "4")
    assert is_right(question, " 4\n")
    assert not any(is_right(question, wrong) for wrong in ("", "44", "4.0", "four", "2 + 2 = 4"))


def test_the_broad_suite_agrees_with_python() -> None:
    """Reads the question's text and computes the answer another way; a question has one answer, and the set is too large to be a handful."""
    answers: dict[str, set[str]] = {}
    for question in draw_questions(16_000, random.Random(5), SUITES["broad"]):
        text, answer = question.question, question.answer
        answers.setdefault(text, set()).add(answer)
        if question.skill == "arithmetic":
            assert str(eval(text.removesuffix(" ="))) == answer
        elif question.skill == "trace":
            scope: dict[str, int] = {}
            exec(text.removesuffix("x?"), scope)
            assert str(scope["x"]) == answer
        elif question.skill == "transformation":
            verb, *letters = text.split()
            a, b, c = letters
            assert answer.split() == {"Reverse": [c, b, a], "Double": [a, a, b, b, c, c], "Shift": [b, c, a], "Swap": [b, a, c]}[verb]
        elif question.skill == "translation":
            assert len(answer.split()) == 3
    assert 1200 < len(answers) < 2500
    assert [text for text, one in answers.items() if len(one) > 1] == []


def test_an_exam_asks_each_question_once_but_in_the_quickstart() -> None:
    broad = exam_questions("broad", 1600, random.Random(6))
    assert len(set(broad)) == len(broad)
    assert {question.skill for question in broad} == set(SUITES["broad"])
    assert exam_questions("quickstart", 320, random.Random(6)) == draw_questions(320, random.Random(6))
