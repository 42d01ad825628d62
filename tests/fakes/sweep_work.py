"""Work of a sweep without any recipe: in importable functions, since worker processes get it by name."""

from __future__ import annotations

import os
from pathlib import Path

from pivotrl.sweeping.runs import SweepRun


def noted(run: SweepRun, root: Path) -> str | None:
    """Appends the run's name and this process to a file. A `bad` run fails always, a `shaky` one the first time, a `deadly` one ends its process."""
    with (root / "work.log").open("a") as stream:
        stream.write(f"{run.name} {os.getpid()}\n")
    tried = sum(line.startswith(f"{run.name} ") for line in (root / "work.log").read_text().splitlines())
    if run.arm == "deadly":
        os._exit(9)
    return "no luck" if run.arm == "bad" or (run.arm == "shaky" and tried == 1) else None
