"""Which suites an evaluation has, and where their scores lie. Imports no torch, so that a login node can check a recipe and write tables."""

from __future__ import annotations

from pivotrl.config.schema import EvalConfig
from pivotrl.errors import UserError

UNITS = "units"
"""Directory below eval/ with one file SUITE-CHECKPOINT.json per suite and checkpoint."""


def check_suites(config: EvalConfig) -> list[str]:
    """The suites' names in order.

    Raises:
        UserError: where one is named twice: results are stored under the name.
    """
    names = [suite.type for suite in config.suites]
    if len(set(names)) != len(names):
        raise UserError(f"eval.suites is {names}", rule="each suite may be named once", fix="merge the entries of one type")
    return names
