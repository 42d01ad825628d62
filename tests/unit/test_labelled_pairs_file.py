"""The labelled suite itself: readable, large and balanced enough, its parts apart; and the errors of a broken file."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from pivotrl.errors import UserError
from pivotrl.types import ParseOutcome
from pivotrl.verifiers.labelled import LabelledPair, is_labelled_file, read_pairs

LABELLED = Path(__file__).parents[1] / "labelled"
DOMAINS = ("conversational", "swe", "terminal", "search", "message")


@pytest.fixture(scope="module")
def halves() -> dict[str, list[LabelledPair]]:
    return {half: read_pairs(LABELLED / f"{half}.jsonl") for half in ("dev", "held", "fresh")}


def test_suite_is_large_and_balanced(halves: dict[str, list[LabelledPair]]) -> None:
    pairs = [pair for half in halves.values() for pair in half]
    labels = Counter((pair.domain, pair.is_equivalent) for pair in pairs if not pair.needs_judge)
    assert {domain for domain, _ in labels} == set(DOMAINS)
    assert sum(labels.values()) >= 400
    assert abs(len(halves["dev"]) - len(halves["held"])) < 20
    for domain in DOMAINS:
        share = labels[domain, True] / (labels[domain, True] + labels[domain, False])
        assert min(labels[domain, True], labels[domain, False]) >= 30
        assert 0.3 < share < 0.7, (domain, share)


def test_no_pair_occurs_twice(halves: dict[str, list[LabelledPair]]) -> None:
    lines = [json.loads(line) for half in halves for line in (LABELLED / f"{half}.jsonl").read_text().splitlines()]
    assert len({line["id"] for line in lines}) == len(lines)
    assert len({json.dumps([line["state"], line["expert"], line["action"]], sort_keys=True) for line in lines}) == len(lines)
    assert all(line["reason"].strip() for line in lines)


def test_raw_completions_are_parsed_and_calls_are_not(halves: dict[str, list[LabelledPair]]) -> None:
    outcomes = Counter(pair.action.parse for half in halves.values() for pair in half)
    assert outcomes[ParseOutcome.MALFORMED] >= 4
    assert outcomes[ParseOutcome.ABSENT] >= 100
    assert all(pair.expert.parse is not ParseOutcome.MALFORMED for half in halves.values() for pair in half)


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ('{"id": 1}', "KeyError"),
        ("[]", "TypeError"),
        ("{", "JSONDecodeError"),
        ('{"id": "a", "domain": "swe", "state": "none", "expert": "x", "action": "y", "equivalent": true, "reason": "r"}', "none"),
        ('{"id": "a", "domain": "swe", "state": "s", "expert": "x", "action": "y", "equivalent": "yes", "reason": "r"}', "true or false"),
        (
            '{"id": "a", "domain": "swe", "state": "s", "expert": "x", "action": {"text": "", "format": "f"}, "equivalent": true, "reason": "r"}',
            "format 'f'",
        ),
    ],
)
def test_a_broken_line_is_named(tmp_path: Path, line: str, complaint: str) -> None:
    (tmp_path / "states.json").write_text('{"s": {"tools": [], "tool_origin": "none"}}')
    path = tmp_path / "pairs.jsonl"
    path.write_text("\n" + line + "\n")
    with pytest.raises(UserError, match=r"pairs\.jsonl:2") as caught:
        read_pairs(path)
    assert complaint in str(caught.value)


def test_missing_states_and_foreign_files(tmp_path: Path) -> None:
    path = tmp_path / "pairs.jsonl"
    path.write_text("{}\n")
    assert not is_labelled_file(path)
    assert not is_labelled_file(tmp_path / "absent.jsonl")
    assert is_labelled_file(LABELLED / "dev.jsonl")
    with pytest.raises(UserError, match=r"states\.json"):
        read_pairs(path)
