"""How fast the doctor reads data: rows per second of processor time by one process and by eight, on copies of a file that all differ.

    python benchmarks/doctor_rows.py FILE.json --copies 20

FILE holds episodes as tau-bench writes them; they are written as one JSONL file of OpenAI messages. Processor time, since other work on the
machine is none of the doctor's: of eight processes the caller's and an eighth of the others' together, as where each has a core. Prints the
ratio of the two.
"""

from __future__ import annotations

import argparse
import json
import resource
import tempfile
from pathlib import Path

from pivotrl.config.schema import IngestConfig
from pivotrl.doctor.data import check_data
from pivotrl.doctor.findings import Findings

PAPER_ROWS = 281_774
"""The paper's tau2 trajectories."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--copies", type=int, default=20)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rows.jsonl"
        _write_copies(options.file, path, options.copies)
        speeds = [_rows_per_s(path, num_processes) for num_processes in (1, 8)]
    print(f"ratio {speeds[1] / speeds[0]:.2f}")


def _rows_per_s(path: Path, num_processes: int) -> float:
    config = IngestConfig(paths=(str(path),), held_out_frac=0.02)
    before = _processor_s()
    seen = check_data(config, [path], Findings(), run_seed=0, sample_size=64, num_processes=num_processes)
    own_s, others_s = (after - earlier for after, earlier in zip(_processor_s(), before, strict=True))
    speed = seen.num_rows / (own_s + others_s / num_processes)
    size_mb, paper_s = path.stat().st_size / 1e6, PAPER_ROWS / speed
    print(f"{num_processes} processes: {seen.num_rows:,} rows of {size_mb:,.0f} MB, {speed:,.0f} rows/s, {paper_s:,.0f} s for {PAPER_ROWS:,} rows")
    return speed


def _processor_s() -> tuple[float, float]:
    """This process's processor time, and that of its children which have ended."""
    usage = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    own, others = (one.ru_utime + one.ru_stime for one in usage)
    return own, others


def _write_copies(source: Path, target: Path, copies: int) -> None:
    """Every copy's texts end in its number, so that no row is a copy of another."""
    content = json.loads(source.read_bytes())
    with target.open("w") as stream:
        for copy in range(copies):
            for row in content:
                stream.write(json.dumps({"messages": _numbered(row["traj"], copy), "task_id": f"{row['task_id']} {copy}"}) + "\n")


def _numbered(value: object, copy: int) -> object:
    if isinstance(value, dict):
        return {key: f"{item} {copy}" if key == "content" and isinstance(item, str) else _numbered(item, copy) for key, item in value.items()}
    return [_numbered(item, copy) for item in value] if isinstance(value, list) else value


if __name__ == "__main__":
    main()
