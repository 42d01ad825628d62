"""Figures as SVG and PNG files through matplotlib, the same bytes for the same numbers.

No clock, no random ids, matplotlib's own font. Called by write.py.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pivotrl.evaluation.tables.curves import Figure
from pivotrl.rundir import atomic_write

_STYLE: dict[Any, Any] = {
    "svg.hashsalt": "pivotrl",
    "svg.fonttype": "path",
    "font.family": "DejaVu Sans",
    "font.size": 9.0,
    "axes.grid": True,
    "grid.alpha": 0.3,
}
# Blue and orange of Okabe and Ito (2008), told apart by readers with any colour vision; dashes for print.
_LINES = (("#0072B2", "-"), ("#D55E00", "--"), ("#009E73", ":"))
_PANEL_INCHES = (4.2, 3.0)


_METADATA = {"svg": {"Date": None, "Creator": None}, "png": {"Software": None}}


def write_figure(figure: Figure, directory: Path) -> None:
    """Writes KEY.svg and KEY.png into the directory."""
    for suffix, data in figure_bytes(figure, tuple(_METADATA)).items():
        atomic_write(directory / f"{figure.key}.{suffix}", data)


def figure_bytes(figure: Figure, suffixes: Sequence[str]) -> dict[str, bytes]:
    """The figure as files by suffix: ``svg``, ``png``."""
    import matplotlib as mpl
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure as Canvas

    found: dict[str, bytes] = {}
    with mpl.rc_context(_STYLE):
        width, height = _PANEL_INCHES
        drawn = Canvas(figsize=(width * len(figure.panels), height), layout="constrained")
        FigureCanvasAgg(drawn)
        axes = drawn.subplots(1, len(figure.panels), sharey=True, squeeze=False)[0]
        for index, (axis, (x_label, lines)) in enumerate(zip(axes, figure.panels, strict=True)):
            for (colour, dashes), line in zip(_LINES, lines, strict=False):
                axis.plot([x for x, _ in line.points], [y for _, y in line.points], dashes, color=colour, label=line.name, marker="o", markersize=2.5)
                if line.band:
                    x, low, high = ([point[part] for point in line.band] for part in range(3))
                    axis.fill_between(x, low, high, color=colour, alpha=0.15, linewidth=0)
            axis.set_xlabel(x_label)
            if index == 0:
                axis.set_ylabel(figure.y_label)
                axis.legend(frameon=False)
        for suffix in suffixes:
            buffer = io.BytesIO()
            drawn.savefig(buffer, format=suffix, dpi=150, metadata=_METADATA[suffix])
            found[suffix] = buffer.getvalue()
    return found
