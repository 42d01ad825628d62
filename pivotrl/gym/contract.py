"""What an exported row must be: row.schema.json beside this file, and the two rules that a JSON schema cannot say.

The rules: every expected tool is in the row's tools, with arguments that are a JSON object; an `expected_answer` is a JSON object.
Called by export alone; import is lenient.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

from jsonschema import Draft202012Validator

SCHEMA = "row.schema.json"


@dataclass(frozen=True, slots=True)
class Problem:
    """Why a row may not be exported."""

    what: str
    """The part of the row and its value, for example ``agent_ref is missing``."""
    rule: str
    fix: str


def problem_of(row: Mapping[str, Any]) -> Problem | None:
    """The first breach of the contract, or None."""
    error = next(_validator().iter_errors(row), None)
    if error is not None:
        # The deepest cause of a row that fits no alternative says most.
        while error.context:
            error = min(error.context, key=lambda cause: -len(cause.absolute_path))
        place = ".".join(map(str, error.absolute_path)) or "the row"
        return Problem(f"{place}: {error.message:.160}", f"the row must fit {SCHEMA}", "correct the row at its source and import it again")
    expected = row.get("expected_action")
    return _answer_problem(row["expected_answer"]) if not expected else _calls_problem(expected, row["responses_create_params"]["tools"])


def _calls_problem(expected: Mapping[str, Any], tools: list[Mapping[str, Any]]) -> Problem | None:
    calls = expected.get("calls", [expected]) if expected["type"] != "message" else []
    names = {tool["name"] for tool in tools}
    for call in calls:
        if call["name"] not in names:
            return Problem("the expected tool is not in tools", "every expected tool must be in the row's tools", "import with --tools FILE")
        if not _is_object(call["arguments"]):
            return Problem("expected arguments are not a JSON object", "a grader must be able to read them", "correct the row at its source")
    return None


def _answer_problem(answer: Any) -> Problem | None:
    if _is_object(answer):
        return None
    return Problem("expected_answer is not a JSON object", "a terminal row holds the expert's reply as JSON text", "correct the row at its source")


def _is_object(text: Any) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except (TypeError, ValueError, RecursionError):
        return False


@cache
def _validator() -> Draft202012Validator:
    schema = json.loads(resources.files("pivotrl.gym").joinpath(SCHEMA).read_text(encoding="utf-8"))
    Draft202012Validator.check_schema(schema)
    return Draft202012Validator(schema)
