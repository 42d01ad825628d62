"""Speed of the whole ingest stage on the user's files beside plain ``json.loads`` of the same bytes, on one core.

    python benchmarks/ingest_speed.py FILE_OR_DIRECTORY... [--copies N] [--rounds N]

Copies of each file, with marks in the text that keep deduplication from dropping them, make a short sample long enough; they live in a temporary
directory. The two are timed in turn, in processor time of this process, because both slow down together when others use the machine; the ratio
of their best rounds is the figure to compare between machines.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"
# Words that are frequent in ordinary text, so that no two copies are near-duplicates.
_MARKED_WORDS = re.compile(rb"(?<= )(the|to|a|is|and|for|of|you|your)(?= )")


def make_copies(paths: Sequence[Path], folder: Path, num_copies: int) -> list[Path]:
    """Writes the copies; the first one is the file as it is."""
    from pivotrl.trajectories.files import discover

    copies: list[Path] = []
    for file in discover(paths).files:
        data = file.path.read_bytes()
        for number in range(num_copies):
            copy = folder / f"{number:03d}" / file.name
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.write_bytes(_MARKED_WORDS.sub(rb"\g<1>%d" % number, data) if number else data)
            copies.append(copy)
    return copies


def loads_s(files: Sequence[Path]) -> float:
    """Processor seconds of reading and parsing every file, line by line where it is JSONL."""
    started_s = time.process_time()
    for path in files:
        data = path.read_bytes()
        for text in data.split(b"\n") if path.suffix == ".jsonl" else [data]:
            if text:
                json.loads(text)
    return time.process_time() - started_s


def ingest_s(data: Path, out: Path) -> tuple[float, int]:
    """Processor seconds of hashing the inputs and running the stage, and the number of trajectories kept."""
    from pivotrl.config.schema import IngestConfig
    from pivotrl.rundir import Stage
    from pivotrl.trajectories.ingest import ingest_inputs, run_ingest

    shutil.rmtree(out, ignore_errors=True)
    config = IngestConfig(paths=(str(data),), held_out_frac=0.1)
    started_s = time.process_time()
    stage = Stage.open(out, "ingest", config=config.model_dump(mode="json"), inputs=ingest_inputs(config, [data]), seed=0)
    audit = run_ingest(stage, config, paths=[data], run_seed=0)
    elapsed_s = time.process_time() - started_s
    return elapsed_s, sum(entry["trajectories"]["kept"] for entry in audit["formats"].values())


def main() -> None:
    parser = argparse.ArgumentParser(description="Speed of the ingest stage beside json.loads.")
    parser.add_argument("paths", nargs="+", type=Path)
    parser.add_argument("--copies", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder) / "data"
        files = make_copies(arguments.paths, data, arguments.copies)
        num_mb = sum(path.stat().st_size for path in files) / 1e6
        best_loads_s = best_ingest_s = float("inf")
        for _ in range(arguments.rounds):
            best_loads_s = min(best_loads_s, loads_s(files))
            elapsed_s, num_kept = ingest_s(data, Path(folder) / "run")
            best_ingest_s = min(best_ingest_s, elapsed_s)
    print(f"{num_mb:,.1f} MB in {len(files)} files, {num_kept:,} trajectories kept, best of {arguments.rounds} rounds")
    print(f"ingest      {num_mb / best_ingest_s:7.1f} MB/s")
    print(f"json.loads  {num_mb / best_loads_s:7.1f} MB/s")
    print(f"ratio       {best_loads_s / best_ingest_s:7.3f}")


if __name__ == "__main__":
    main()
