"""A package with the interface of bfcl-eval that the adapter uses, and two tasks of our own: a lamp that is switched and a counter without state."""

from __future__ import annotations

import json
from pathlib import Path

CLASSES = """
class Lamp:
    def __init__(self):
        self.is_on = False
        self.colours = []
        self._secret = 0

    def _load_scenario(self, config, long_context=False):
        self.is_on = config.get("is_on", False)

    def switch(self, is_on):
        self._secret += 1
        self.is_on = is_on
        return {"is_on": is_on}

    def paint(self, colour, coats=1):
        if coats < 1:
            raise ValueError("no coat")
        self.colours.append((colour, coats))
        return f"{colour} {coats}"

    def explode(self):
        raise SystemExit


class Sums:
    def add(self, a, b):
        return a + b

    def power(self, base, exponent):
        return base**exponent
"""
CONFIG = """
CLASS_FILE_PATH_MAPPING = {"Lamp": "bfcl_eval.classes", "Sums": "bfcl_eval.classes"}
MULTI_TURN_FUNC_DOC_FILE_MAPPING = {"Lamp": "lamp.json", "Sums": "sums.json"}
STATELESS_CLASSES = ["Sums"]
"""


def _doc(name: str, required: list[str], **properties: dict) -> dict:
    return {"name": name, "description": name, "parameters": {"type": "dict", "properties": properties, "required": required}}


DOCS = {
    "lamp.json": [
        _doc("switch", ["is_on"], is_on={"type": "boolean"}),
        _doc("paint", ["colour"], colour={"type": "string"}, coats={"type": "integer", "default": 1}),
    ],
    "sums.json": [
        _doc("add", ["a", "b"], a={"type": "float"}, b={"type": "any"}),
        _doc("power", ["base", "exponent"], base={"type": "integer"}, exponent={"type": "integer"}),
    ],
}
TASKS = [
    {
        "id": "multi_turn_base_0",
        "question": [
            [{"role": "user", "content": "Light, and paint it."}],
            [{"role": "user", "content": "Thanks."}],
            [{"role": "user", "content": "Add."}],
        ],
        "initial_config": {"Lamp": {"is_on": False}},
        "involved_classes": ["Lamp", "Sums"],
    },
    {
        "id": "multi_turn_base_1",
        "question": [[{"role": "user", "content": "Dark."}]],
        "initial_config": {"Lamp": {"is_on": True}},
        "involved_classes": ["Lamp"],
        "excluded_function": ["paint"],
    },
]
ANSWERS = [
    {"id": "multi_turn_base_0", "ground_truth": [["switch(True)", "paint('red', coats=2)"], [], ["add(a=1, b=2)"]]},
    {"id": "multi_turn_base_1", "ground_truth": [["switch(is_on=False)"]]},
]


def write_package(root: Path) -> Path:
    """Writes the package below `root`, which then belongs on the import path."""
    package = root / "bfcl_eval"
    texts = {
        "__init__.py": "",
        "classes.py": CLASSES,
        "constants/__init__.py": "",
        "constants/executable_backend_config.py": CONFIG,
        "data/BFCL_v9_multi_turn_base.json": _lines(TASKS),
        "data/possible_answer/BFCL_v9_multi_turn_base.json": _lines(ANSWERS),
        **{f"data/multi_turn_func_doc/{name}": _lines(rows) for name, rows in DOCS.items()},
    }
    for name, text in texts.items():
        path = package / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def _lines(rows: list[dict]) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)
