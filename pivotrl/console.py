"""Where a verb prints its results: standard output, in tables that are never cut.

Bottom tier; progress and messages go to standard error instead (progress.py).
"""

from __future__ import annotations

import sys

from rich.console import Console

_FILE_WIDTH = 160


def results_console(*, file_width: int = _FILE_WIDTH) -> Console:
    """A console of the terminal's own width, or of `file_width` columns where the output goes to a file."""
    # Results hold the user's text (paths, log lines), whose brackets and colons are no markup.
    return Console(markup=False, emoji=False, width=None if sys.stdout.isatty() else file_width)
