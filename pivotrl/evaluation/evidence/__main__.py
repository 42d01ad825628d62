"""`python -m pivotrl.evaluation.evidence SPEC --out docs`: the page of evidence and its record from run directories.

With `--record FILE` in place of SPEC the page is written from a committed record. Called by `make evidence`.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from pivotrl.config.load import load_section
from pivotrl.config.tables import TablesConfig
from pivotrl.errors import user_errors_end
from pivotrl.evaluation.evidence.make import PAGE, RECORD, make_record, page_files
from pivotrl.evaluation.evidence.page import FIGURES
from pivotrl.evaluation.evidence.record import from_bytes, to_bytes
from pivotrl.rundir import atomic_write


def main() -> None:
    """Writes the files; a user's error is one line and exit code 2."""
    parser = argparse.ArgumentParser(prog="python -m pivotrl.evaluation.evidence", description="Writes evidence.md and its record.")
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("spec", nargs="?", type=Path, help="specification of the runs, for example recipes/evidence/tables.yaml")
    source.add_argument("--record", type=Path, help="a committed record to write the page from")
    parser.add_argument("--out", type=Path, required=True, help="directory of the page: docs")
    words = parser.parse_args()
    with user_errors_end("evidence"):
        write_evidence(words.spec, words.record, words.out)


def write_evidence(spec: Path | None, record_file: Path | None, out: Path) -> None:
    """Writes evidence.md and evidence/ below `out`: from a specification with the record, from a record without.

    Raises:
        UserError: for a specification, run or record that cannot be read, before anything is written.
    """
    if spec is not None:
        data = to_bytes(make_record(load_section(TablesConfig, file=spec), spec))
    else:
        assert record_file is not None, "the command line demands one of the two"
        data = record_file.read_bytes()
    # The page is made of the bytes that are committed.
    files = page_files(from_bytes(data))
    if spec is not None:
        files[RECORD] = data
    for stale in (out / FIGURES).glob("*.svg"):
        if f"{FIGURES}/{stale.name}" not in files:
            stale.unlink()
    for name, content in files.items():
        (out / name).parent.mkdir(parents=True, exist_ok=True)
        atomic_write(out / name, content)
    sys.stderr.write(f"evidence: {out / PAGE}\n")


if __name__ == "__main__":
    main()
