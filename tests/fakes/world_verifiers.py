"""The verifier of each world's recipe."""

from __future__ import annotations

from pathlib import Path

from pivotrl.build_verifiers import build_verifier
from pivotrl.config.load import load_recipe
from pivotrl.verifiers.protocol import Verifier

RECIPES = Path(__file__).resolve().parents[2] / "recipes"
FOLDERS = {"order_desk": "quickstart", "terminal": "world_terminal", "swe": "world_swe", "search": "world_search"}


def verifier_of(name: str) -> Verifier:
    loaded = load_recipe(RECIPES / FOLDERS[name])
    return build_verifier(loaded.recipe.verifier, expand=Path)
