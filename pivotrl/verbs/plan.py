"""The verb `plan`: files and options of the user's to a table of layouts. The work is in pivotrl/planning/. Called by cli.py."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from pivotrl.config.load import load_section
from pivotrl.config.planning import ClusterConfig, PlanConfig
from pivotrl.console import results_console
from pivotrl.planning.inputs import load_model
from pivotrl.planning.page import print_plan
from pivotrl.planning.proposals import assess, propose


def run_plan(model: Path, cluster: Path, plan_file: Path | None, overrides: Sequence[str], *, num_shown: int) -> bool:
    """Prints what a layout takes, or the best layouts; returns whether one fits.

    Raises:
        UserError: for a model, cluster, option or layout that cannot be, before anything is computed.
    """
    options, machine = load_section(PlanConfig, file=plan_file, overrides=overrides), load_section(ClusterConfig, file=cluster)
    name, shape = load_model(model)
    layout = options.parallel
    found = propose(shape, options, machine, num_shown=num_shown) if layout is None else [assess(shape, layout, options, machine)]
    print_plan(results_console(), name, shape, options, machine, found, is_asked=layout is not None)
    return bool(found) and found[0].fits
