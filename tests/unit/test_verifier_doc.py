"""The example of docs/adding_a_verifier.md runs as it is printed and does what the page says."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, get_args

import pytest
import yaml
from pydantic import TypeAdapter

from pivotrl.build_verifiers import build_verifier
from pivotrl.config.load import section_models
from pivotrl.config.verifiers import VerifierConfig
from pivotrl.types import Action, ParseOutcome, State, ToolCall, ToolOrigin, VerdictKind

PAGE = Path(__file__).resolve().parents[2] / "docs" / "adding_a_verifier.md"


@pytest.fixture(scope="module")
def verifier() -> Any:
    (block,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    namespace: dict[str, Any] = {}
    exec(compile(block, str(PAGE), "exec"), namespace)
    return namespace["SameWordsVerifier"]()


def _search(arguments: str, name: str = "search") -> Action:
    return Action("", (ToolCall(name, arguments),), None, ParseOutcome.PARSED)


@pytest.mark.parametrize(
    ("action", "kind", "reward"),
    [
        (_search('{"query": "Derby winner 1964"}'), VerdictKind.OK, 1),
        (_search('{"query": "1964 derby Winner"}'), VerdictKind.OK, 1),
        (_search('{"query": "1965 derby winner"}'), VerdictKind.OK, 0),
        (_search('{"query": "Derby winner 1964"}', "open"), VerdictKind.OK, 0),
        (_search("{}"), VerdictKind.INVALID, 0),
        (_search('{"query": '), VerdictKind.INVALID, 0),
        (Action("x", (), None, ParseOutcome.MALFORMED), VerdictKind.INVALID, 0),
    ],
)
def test_the_example_judges_as_described(verifier: Any, action: Action, kind: VerdictKind, reward: float) -> None:
    verdict = verifier.verify(State((), (), ToolOrigin.NONE), _search('{"query": "Derby winner 1964"}'), action)
    assert (verdict.kind, verdict.reward) == (kind, reward)


def test_the_files_it_names_exist() -> None:
    root = PAGE.parents[1]
    named = re.findall(r"`((?:pivotrl|tests)/[\w/]+\.py)`", PAGE.read_text())
    assert named
    assert [name for name in named if not (root / name).exists()] == []


def test_every_form_is_on_the_page_and_its_example_is_a_section() -> None:
    page = PAGE.with_name("verifiers.md").read_text()
    forms = {get_args(model.model_fields["type"].annotation)[0] for model in section_models(VerifierConfig)}
    assert [form for form in sorted(forms) if f"`{form}`" not in page] == []
    (example,) = re.findall(r"```yaml\n(.*?)```", page, re.DOTALL)
    build_verifier(TypeAdapter[VerifierConfig](VerifierConfig).validate_python(yaml.safe_load(example)), expand=Path)
