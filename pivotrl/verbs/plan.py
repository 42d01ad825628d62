"""The verb `plan`: files and options of the user's to a table of layouts. The work is in pivotrl/planning/. Called by cli.py."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from pivotrl.config.load import load_recipe, load_section
from pivotrl.config.planning import ClusterConfig, PlanConfig
from pivotrl.config.schema import Recipe
from pivotrl.console import results_console
from pivotrl.errors import UserError
from pivotrl.planning.inputs import load_model
from pivotrl.planning.page import print_plan, print_terms
from pivotrl.planning.proposals import assess, propose
from pivotrl.planning.recipe import plan_of


def run_plan(
    model: Path, cluster: Path | None, plan_file: Path | None, overrides: Sequence[str], *, num_shown: int, recipe: Path | None = None
) -> bool:
    """Prints what a layout takes, or the best layouts; returns whether one fits.

    Args:
        cluster: None: parameters, FLOPs and the terms of memory are printed, and nothing is judged.
        overrides: words of the plan; with a recipe, those whose first part is a section of the recipe are the recipe's.
        recipe: a recipe whose nodes, step, layout and engine are the plan's.

    Raises:
        UserError: for a model, cluster, recipe, option or layout that cannot be, before anything is computed.
    """
    options = load_section(PlanConfig, file=plan_file, overrides=overrides) if recipe is None else _of_recipe(recipe, plan_file, overrides)
    machine = None if cluster is None else load_section(ClusterConfig, file=cluster)
    name, shape = load_model(model)
    layout = options.parallel
    if machine is None:
        print_terms(results_console(), name, shape, options)
        return True
    found = propose(shape, options, machine, num_shown=num_shown) if layout is None else [assess(shape, layout, options, machine)]
    print_plan(results_console(), name, shape, options, machine, found, is_asked=layout is not None)
    return bool(found) and found[0].fits


def _of_recipe(recipe: Path, plan_file: Path | None, overrides: Sequence[str]) -> PlanConfig:
    if plan_file is not None:
        raise UserError(
            "--plan and --recipe are both given", rule="a recipe states the plan", fix="give one of them, and the rest as words key=value"
        )
    of_recipe = [word for word in overrides if word.split("=")[0].split(".")[0] in Recipe.model_fields]
    stated = plan_of(load_recipe(recipe, of_recipe).recipe).model_dump(exclude_none=True)
    words = [f"{key}={json.dumps(value)}" for key, value in stated.items()]
    return load_section(PlanConfig, file=None, overrides=[*words, *(word for word in overrides if word not in of_recipe)])
