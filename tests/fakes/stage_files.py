"""What a stage's directory holds, to be compared byte by byte."""

from __future__ import annotations

from pathlib import Path

_OF_THE_CLOCK = {"timing.json", "timing.jsonl"}


def contents(directory: Path) -> dict[str, bytes]:
    """Every file below that may not depend on the clock or on interruptions: no timing, no checkpoints."""
    files = (path for path in directory.rglob("*") if path.is_file() and path.name not in _OF_THE_CLOCK and "checkpoints" not in path.parts)
    return {str(path.relative_to(directory)): path.read_bytes() for path in files}
