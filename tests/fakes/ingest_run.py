"""An ingest stage on invented files, as a process that kills itself at a chosen moment: ``python -m fakes.ingest_run DATA RUN MOMENT``."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pivotrl import rundir
from pivotrl.config.schema import IngestConfig
from pivotrl.rundir import Stage
from pivotrl.trajectories import ingest, parts
from pivotrl.trajectories.ingest import ingest_inputs, run_ingest

MOMENTS = (
    "add:1",
    "add:7",
    "add:20",
    "finish:1",
    "finish:2",
    "merge:1",
    "merge:1:after",
    "retire_parts:1",
    "retire_parts:1:after",
    "clean_up:1:after",
)


def config(**changes: Any) -> IngestConfig:
    return IngestConfig(**{"paths": (), "held_out_frac": 0.3, **changes})


def run(data: Path, out: Path, **changes: Any) -> dict[str, Any]:
    """Runs or resumes RUN/ingest on `data`; the commit is fixed, so that edits elsewhere do not show in the manifest."""
    rundir.source_commit = lambda: "fixed"
    chosen = config(**changes)
    stage = Stage.open(out, "ingest", config=chosen.model_dump(mode="json"), inputs=ingest_inputs(chosen, [data]), seed=5)
    return run_ingest(stage, chosen, paths=[data], run_seed=5)


def _dying(function: Callable[..., Any], number: int, *, is_after: bool) -> Callable[..., Any]:
    calls = 0

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == number and not is_after:
            os.kill(os.getpid(), signal.SIGKILL)
        result = function(*args, **kwargs)
        if calls == number:
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    return wrapped


def main() -> None:
    data, out, moment = sys.argv[1:]
    ingest._PART_BYTES = 4096
    name, number, *when = moment.split(":")
    owner: Any = parts.Part if name in ("add", "finish") else ingest
    setattr(owner, name, _dying(getattr(owner, name), int(number), is_after=bool(when)))
    run(Path(data), Path(out))


if __name__ == "__main__":
    main()
