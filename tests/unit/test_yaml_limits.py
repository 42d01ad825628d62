"""Hostile YAML ends as a user's error in every reader; what is written out within the limits is read as OmegaConf reads it.

A case that were not refused early would not end, or not fit into memory.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from pivotrl.config import interpolation
from pivotrl.config.load import load_recipe, load_section
from pivotrl.config.parallel import ParallelConfig
from pivotrl.config.tables import FileSource, TablesConfig
from pivotrl.config.yaml_text import MAX_BYTES, MAX_DEPTH, MAX_VALUES, read_yaml
from pivotrl.errors import UserError
from pivotrl.evaluation.tables.harness import read_harness
from pivotrl.planning.inputs import load_model

ROOT = Path(__file__).resolve().parents[2]
LISTS = "a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n" + "".join(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]\n" for i in range(1, 40))
MERGES = "a0: &a0 {x: 1}\n" + "".join(f"a{i}: &a{i} {{<<: [{', '.join([f'*a{i - 1}'] * 10)}]}}\n" for i in range(1, 40))
HOSTILE = {
    "aliases of aliases": (LISTS, "more than 100,000 values"),
    "merged aliases": (MERGES, "more than 100,000 values"),
    "values": ("a: [" + "1," * (MAX_VALUES + 1) + "]", "more than 100,000 values"),
    "levels": ("a: " + "[" * 100_000, "more than 32 levels"),
    "circle": ("a: &a {b: [*a]}", "alias 'a' stands for something that holds it"),
    "bytes": ("a: " + "x" * MAX_BYTES, "bytes"),
    "digits": ("a: " + "9" * 6_000, "4300 digits"),
    "wrong tag": ("a: !!int x", "invalid literal"),
    "timestamp": ("a: !!timestamp x", "is not readable YAML"),
    "object": ("a: !!python/object/apply:os.system [x]", "could not determine a constructor"),
    "two documents": ("a: 1\n---\nb: 2", "expected a single document"),
}


def _recipe(folder: Path, text: str) -> None:
    (folder / "recipe.yaml").write_text(text)
    load_recipe(folder)


def _extended(folder: Path, text: str) -> None:
    (folder / "base.yaml").write_text(text)
    _recipe(folder, "extends: base.yaml\n")


def _tables(folder: Path, text: str) -> None:
    (folder / "tables.yaml").write_text(text)
    load_section(TablesConfig, file=folder / "tables.yaml")


def _model(folder: Path, text: str) -> None:
    (folder / "model.yaml").write_text(text)
    load_model(folder / "model.yaml")


def _results(folder: Path, text: str) -> None:
    (folder / "results.yml").write_text(text)
    source = {"format": "nemo_evaluator", "path": str(folder / "results.yml"), "arm": "a", "benchmark": "b", "seed": 0}
    read_harness([folder / "results.yml"], FileSource.model_construct(**source))


@pytest.mark.parametrize("text_and_words", HOSTILE.values(), ids=list(HOSTILE))
@pytest.mark.parametrize("read", [_recipe, _extended, _tables, _model, _results])
def test_hostile_files_are_refused_by_name_in_every_reader(
    read: Callable[[Path, str], None], text_and_words: tuple[str, str], tmp_path: Path
) -> None:
    text, words = text_and_words
    with pytest.raises(UserError, match=words) as refused:
        read(tmp_path, text)
    assert str(tmp_path) in str(refused.value)


@pytest.mark.parametrize(
    "word", [f"seed={LISTS.splitlines()[0]}, {{a: &a [*a]}}", "seed=" + "[" * 1_000, ".".join("a" * 500) + "=1", "[=1", "a=!!int x"]
)
def test_hostile_overrides_are_refused(word: str) -> None:
    with pytest.raises(UserError) as refused:
        load_section(ParallelConfig, file=None, overrides=[word])
    assert len(str(refused.value)) < 1_000


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("".join(f"a{i}: ${{a{i + 1}}}${{a{i + 1}}}\n" for i in range(40)) + "a40: x\n", "stands for too much"),
        ("".join(f"a{i}: {{l: '${{a{i + 1}}}', r: '${{a{i + 1}}}'}}\n" for i in range(40)) + "a40: x\n", "stands for too much"),
        ("".join(f"a{i}: {{l: '${{..a{i + 1}}}${{..a{i + 1}}}'}}\n" for i in range(40)) + "a40: x\n", "stands for too much"),
        ("".join(f"a{i}: ${{a{i + 1}}}\n" for i in range(3_000)) + "a3000: x\n", "stands for too much"),
        ("long: " + "x" * 2**20 + "\na: [" + "'${long}', " * 100 + "]\n", "stands for too much"),
        ("a: ${b.${c}}\nb: {d: 1}\nc: d\n", r"a \$\{...\} holds no other"),
        ("a: ${b}\nb: ${a}\n", "Recursive interpolation"),
        ("a: {b: '${a}'}\n", "Interpolation to parent"),
    ],
    ids=["text", "sections", "relative", "chain", "long", "nested", "circle", "parent"],
)
def test_references_that_stand_for_too_much_are_refused(text: str, words: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=words):
        _recipe(tmp_path, text)


def test_references_are_counted_as_what_they_stand_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """The leaf is 1, a reference one more than what it names: `three` is 1 + 3 * 2, `nine` 1 + 3 * 8, the whole 1 + 1 + 7 + 25."""
    tree = {"leaf": "xy", "three": ["${leaf}"] * 3, "nine": ["${three}"] * 3}
    monkeypatch.setattr(interpolation, "MAX_VALUES", 34)
    interpolation.refuse_explosion(tree, source="x")
    monkeypatch.setattr(interpolation, "MAX_VALUES", 33)
    with pytest.raises(UserError, match="the recipe of x stands for too much"):
        interpolation.refuse_explosion(tree, source="x")


@pytest.mark.parametrize("path", sorted((ROOT / "configs").rglob("*.yaml")) + sorted((ROOT / "recipes").rglob("*.yaml")), ids=lambda path: path.name)
def test_the_projects_own_files_read_as_omegaconf_reads_them(path: Path) -> None:
    assert read_yaml(path.read_text(), source=path.name) == OmegaConf.to_container(OmegaConf.load(path), resolve=False)


def test_aliases_within_the_limits_are_read() -> None:
    assert read_yaml("a: &a {x: 1}\nb: *a\nc: {<<: *a, y: 2}\n", source="x") == {"a": {"x": 1}, "b": {"x": 1}, "c": {"x": 1, "y": 2}}
    deep = "[" * MAX_DEPTH + "]" * MAX_DEPTH
    assert str(read_yaml(deep, source="x")) == deep
    assert read_yaml("", source="x") is None
