"""docs/paper_index.md: every file it names exists, every key is in the schema, and the production recipe holds the value that stands beside it."""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import pytest
from pydantic import BaseModel

from pivotrl.config.load import load_recipe
from pivotrl.config.schema import Recipe
from pivotrl.metrics import registered

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "paper_index.md").read_text()
EQUATIONS, SYMBOLS = PAGE.split("## Symbols")
TAU2 = ROOT / "recipes" / "qwen3_30b_a3b" / "tau2"
GIVEN = ("model.path=/checkpoint", "ingest.paths=[/trajectories]")
# Rows whose value is no value of one key: the user's own, one by domain, an ablation's, a whole section, or the production value of another family.
WITHOUT_VALUE = {
    *(
        "model.path",
        "ingest.paths",
        "ingest.domain",
        "verifier",
        "select.rule",
        "select.as_many_as",
        "verifier.type",
        "parallel",
        "launch",
        "sft",
        "train.episodes",
        "train.correction",
    ),
    # The sum of both is what the page states.
    *("render.max_prompt_tokens", "train.optimizer.warmup_steps", "moe.expert_bias_update_rate"),
}


def _rows(part: str) -> list[list[str]]:
    lines = [line for line in part.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if not re.match(r"\| (paper|symbol) \|", line)]


ROWS = _rows(SYMBOLS)


def _sections(annotation: Any) -> Iterator[type[BaseModel]]:
    """Every section that a key may hold, through unions and lists."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    value = getattr(annotation, "__value__", None)
    for inner in (*get_args(annotation), *([value] if value is not None else [])):
        yield from _sections(inner)


def _fields(key: str) -> list[Any]:
    """Annotations of a dotted key in every form that its section may have; none where no form has it."""
    sections: list[type[BaseModel]] = [Recipe]
    *path, last = key.split(".")
    for name in path:
        sections = [inner for one in sections if name in one.model_fields for inner in _sections(one.model_fields[name].annotation)]
    return [one.model_fields[last].annotation for one in sections if last in one.model_fields]


def _keys(cell: str) -> list[tuple[str, str | None]]:
    """Keys of a cell with the value that follows a colon; `.name` stands beside the key before it, a bare name of a rule in its section."""
    found: list[tuple[str, str | None]] = []
    for word in re.findall(r"`([^`]+)`", cell):
        if "/" in word or word.isupper():
            continue
        key, _, value = word.partition(": ")
        before = found[-1][0].rpartition(".")[0] if found else ""
        if key.startswith("."):
            key = before + key
        elif found and "." not in key and not _fields(key):
            key = f"{before}.{key}"
        found.append((key, value or None))
    return found


def test_the_page_is_read_as_it_is_written() -> None:
    assert len(_rows(EQUATIONS)) >= 15
    assert len(ROWS) >= 31
    assert _keys("`train.optimizer.lr`, `.decay`") == [("train.optimizer.lr", None), ("train.optimizer.decay", None)]
    assert _fields("train.optimizer.nothing") == _fields("nothing.lr") == []


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0])
def test_each_key_is_in_the_schema(row: list[str]) -> None:
    for key, value in _keys(row[1]):
        fields = _fields(key)
        assert fields, f"{row[0]}: no section has the key {key}"
        literals = {choice for field in fields if get_origin(field) is Literal for choice in get_args(field)}
        assert value is None or value in literals, f"{row[0]}: {key} takes {sorted(map(str, literals))}"


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0])
def test_the_recipe_holds_the_value_that_the_page_states(row: list[str]) -> None:
    """The first words of the cell are tau2's on Qwen3-30B-A3B; after a semicolon stand those of other recipes."""
    values: Any = load_recipe(TAU2, GIVEN).recipe.model_dump(mode="json")
    stated = re.findall(r"[A-Za-z_][\w]*|[-+]?\d[\d,.]*(?:e-?\d+)?", row[2].partition(";")[0])
    words = {word.rstrip(".,") for word in stated}
    numbers = {float(word.replace(",", "")) for word in words if word[0].isdigit()}
    for key, _ in _keys(row[1]):
        if key in WITHOUT_VALUE:
            continue
        value = values
        for name in key.split("."):
            value = value[name]
        assert (float(value) in numbers) if not isinstance(value, str) or value[0].isdigit() else (value in words), f"{key} is {value}, not {row[2]}"


def test_the_context_is_the_sum_that_the_page_states() -> None:
    recipe = load_recipe(TAU2, GIVEN).recipe
    (row,) = [row for row in ROWS if "render.max_prompt_tokens" in row[1]]
    assert row[2].startswith(f"{recipe.render.max_prompt_tokens + recipe.sampling.max_new_tokens:,};")


def test_each_file_metric_and_name_is_there() -> None:
    metrics = {spec.name for spec in registered()}
    for row in [*_rows(EQUATIONS), *ROWS]:
        folder = ROOT
        for word in re.findall(r"`([^`]+)`", " ".join(row)):
            if re.search(r"\.(py|json)$", word):
                # A bare name lies beside the file before it.
                path = ROOT / word if "/" in word else folder / word
                assert path.is_file(), f"{row[0]}: {word}"
                folder = path.parent
            elif "/" in word:
                assert word in metrics, f"{row[0]}: {word}"
            elif word.isupper():
                (module,) = re.findall(r"`(pivotrl/\S+)\.py`", " ".join(row))
                assert hasattr(importlib.import_module(module.replace("/", ".")), word), f"{row[0]}: {word}"


def test_each_figure_of_a_file_is_written_under_its_name() -> None:
    sources = "".join(path.read_text() for path in sorted((ROOT / "pivotrl").rglob("*.py")))
    names = [word for row in _rows(EQUATIONS) for word in re.findall(r"`([^`]+)`", row[1]) if not re.search(r"[/.]", word)]
    assert names
    assert [name for name in names if f'"{name}"' not in sources] == []
