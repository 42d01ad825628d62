"""Detection is precise: one adapter for every real file, none for other JSON, and hostile values never escape as anything but a reason."""

import contextlib
import copy
import random
from pathlib import Path
from typing import Any

import orjson
import pytest

from pivotrl.trajectories.files import discover, probe
from pivotrl.trajectories.registry import FORMATS, adapter, all_adapters
from pivotrl.trajectories.source import RawRow, RowDropped, RowQuarantined

FOLDER_FORMATS = {
    "tau2": {"tau2"},
    "tau_bench": {"tau_bench"},
    "agentdojo": {"agentdojo"},
    "swe_agent": {"swe_agent"},
    "swe_smith": {"swe_smith", "swe_agent"},
    "mini_swe_agent": {"mini_swe_agent"},
    "openhands": {"openhands"},
    "terminus2": {"terminus2"},
    "search": {"chatml_tools", "verifiers"},
    "gym_rows": {"nemo_gym"},
    "sharegpt": {"sharegpt"},
    "codex": {"codex"},
    "atif": {"atif"},
}

UNRELATED: dict[str, Any] = {
    "package.json": {"name": "left-pad", "version": "1.0.0", "scripts": {"test": "jest"}, "dependencies": {"a": "^1"}},
    "numbers.json": [1, 2, 3],
    "empty_list.json": [],
    "empty.json": {},
    "dataset_infos.json": {"default": {"features": {"messages": {"dtype": "string"}}, "splits": {"train": {"num_examples": 3}}}},
    "card.json": {"id": "org/set", "tags": ["sft"], "cardData": {"license": "mit"}, "messages": "none"},
    "config.json": {"model_type": "qwen3", "hidden_size": 8, "info": {"a": 1}},
    "tsconfig.json": {"compilerOptions": {"strict": True}, "files": []},
    "events.jsonl": [{"timestamp": 1, "type": "click", "payload": {}}],
    "sft.jsonl": [{"prompt": "Say hi.", "completion": "Hi."}],
    "preference.jsonl": [{"chosen": "a", "rejected": "b", "prompt": "p"}],
    "openapi.json": {"openapi": "3.0", "info": {"title": "x", "version": "1"}, "paths": {}},
    "notebook.json": {"cells": [{"cell_type": "code", "source": []}], "metadata": {}, "nbformat": 4},
    "geo.json": {"type": "FeatureCollection", "features": [{"type": "Feature", "geometry": None}]},
    "messages.json": {"messages": [], "info": None},
    "i18n.json": {"messages": [{"id": 1, "text": "hello"}]},
    "gym.json": {"trajectory": [[0, 1], [1, 2]], "info": {}},
}


def claims(path: Path, root: Path) -> set[str]:
    head = probe(path, root)
    return {candidate.name for candidate in all_adapters() if candidate.sniff(head)}


def test_every_real_file_has_exactly_one_adapter(shared_data: Path) -> None:
    found = discover([shared_data]).files
    assert len(found) > 200
    for file in found:
        folder = file.name.split("/")[0]
        names = claims(file.path, file.root)
        assert len(names) == 1, f"{file.name}: {names}"
        assert names <= FOLDER_FORMATS[folder], f"{file.name}: {names}"


def test_a_file_alone_is_detected_without_its_folder(shared_data: Path) -> None:
    for file in discover([shared_data]).files:
        assert len(claims(file.path, file.path.parent)) == 1, file.name


@pytest.mark.parametrize("name", UNRELATED)
def test_unrelated_json_is_claimed_by_none(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    value = UNRELATED[name]
    lines = value if name.endswith(".jsonl") else [value]
    path.write_bytes(b"\n".join(orjson.dumps(line) for line in lines) + b"\n")
    assert claims(path, tmp_path) == set()


def test_each_module_is_named_after_its_format() -> None:
    assert [adapter(name).name for name in FORMATS] == list(FORMATS)


def nodes(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Places of all values inside a JSON value."""
    found = [path]
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        found += nodes(item, (*path, key))
    return found


def damaged(value: Any, rng: random.Random) -> Any:
    """The value with one part replaced by something that does not belong there, or removed."""
    places = [place for place in nodes(value) if place]
    place = rng.choice(places)
    value = copy.deepcopy(value)
    holder = value
    for key in place[:-1]:
        holder = holder[key]
    if rng.random() < 0.2:
        del holder[place[-1]]
    else:
        holder[place[-1]] = rng.choice([None, 5, 1.5, True, "", "text", [], [1], {}, {"a": 1}, [[]], [None], "<tool_call>", "{"])
    return value


def first_rows(shared_data: Path, name: str, num_rows: int) -> list[RawRow]:
    chosen = adapter(name)
    files = [file for file in discover([shared_data]).files if claims(file.path, file.root) == {name} and file.num_bytes < 5_000_000]
    rows: list[RawRow] = []
    for unit in chosen.group([file.path for file in files], shared_data):
        for row in chosen.rows(unit):
            if isinstance(row, RawRow):
                rows.append(row)
                break
        if len(rows) == num_rows:
            break
    return rows


@pytest.mark.parametrize("name", [name for name in FORMATS if name != "openai_chat"])
def test_damaged_rows_give_a_reason_never_another_error(shared_data: Path, name: str) -> None:
    rng = random.Random(5)
    chosen = adapter(name)
    num_converted = 0
    for row in first_rows(shared_data, name, num_rows=3):
        small = row if len(orjson.dumps(row.value)) < 200_000 else None
        for _ in range(60 if small else 8):
            value = damaged(row.value, rng)
            with contextlib.suppress(RowQuarantined, RowDropped):
                chosen.convert(RawRow(row.name, row.index, row.line, value, row.shared), None)
                num_converted += 1
    assert num_converted > 0


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("value", [None, 5, "text", [], [1], {}, {"messages": [None]}, {"history": [1]}, {"conversations": [[]]}])
def test_rows_of_any_shape_give_a_reason(name: str, value: Any) -> None:
    with pytest.raises((RowQuarantined, RowDropped)):
        adapter(name).convert(RawRow("x.json", 0, None, value), None)
