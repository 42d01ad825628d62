"""Inline SVG for the report: lines over steps, histograms, nothing that needs a script, a font or the network.

Colours are CSS classes of the page (templates/report.css), so a chart follows the reader's light or dark setting. Every
chart carries axis labels with units, a title and a description for screen readers; text is escaped here.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

# One panel is drawn at about its real size on a phone, so that 11 units of text are 11 pixels there.
_WIDTH, _HEIGHT = 360.0, 216.0
_LEFT, _RIGHT, _TOP, _BOTTOM = 50.0, 12.0, 26.0, 40.0
# Above this many points a marker per point would be a smear; the line alone is drawn.
_MAX_MARKERS = 60
_TICKS = 4


@dataclass(frozen=True, slots=True)
class Series:
    """One line of a chart."""

    name: str
    points: tuple[tuple[float, float], ...]
    """(x, y) with finite y; a step without a value is left out and the line bridges it."""
    band: tuple[tuple[float, float, float], ...] = ()
    """(x, low, high) of an interval around the line, or nothing."""


@dataclass(frozen=True, slots=True)
class Bar:
    """One bar of a histogram."""

    label: str
    count: int
    num_highlighted: int
    """The part of `count` drawn in the accent colour from the bottom up: what the reader is looking for."""


@dataclass(frozen=True, slots=True)
class _Frame:
    """Maps data to the panel."""

    x_low: float
    x_high: float
    y_low: float
    y_high: float

    def x(self, value: float) -> float:
        return _LEFT + (value - self.x_low) / (self.x_high - self.x_low) * (_WIDTH - _LEFT - _RIGHT)

    def y(self, value: float) -> float:
        return _HEIGHT - _BOTTOM - (value - self.y_low) / (self.y_high - self.y_low) * (_HEIGHT - _TOP - _BOTTOM)


def line_chart(title: str, *, x_label: str, y_label: str, series: Sequence[Series], y_floor: float | None, y_ceiling: float | None) -> str:
    """An SVG of up to four lines over a shared x axis; "" where no series has a point.

    Args:
        y_label: quantity with its unit, written above the axis.
        y_floor: smallest value the y axis shows even where no point is near it (0 for shares); None fits the data.
        y_ceiling: largest value the y axis shows even where no point is near it (1 for shares); None fits the data.
    """
    drawn = [one for one in series if one.points]
    if not drawn:
        return ""
    xs = [x for one in drawn for x, _ in one.points]
    ys = [y for one in drawn for _, y in one.points] + [bound for one in drawn for _, low, high in one.band for bound in (low, high)]
    low = min(ys) if y_floor is None else min(y_floor, *ys)
    high = max(ys) if y_ceiling is None else max(y_ceiling, *ys)
    if high <= low and y_floor is not None:
        # All values lie on the floor: room above it, never a scale below it.
        high = low + 1
    y_ticks = nice_ticks(low, high)
    x_ticks = [tick for tick in nice_ticks(min(xs), max(xs)) if min(xs) <= tick <= max(xs)] or [min(xs)]
    frame = _Frame(min(xs), max(xs) if max(xs) > min(xs) else min(xs) + 1, min(low, y_ticks[0]), max(high, y_ticks[-1]))
    parts = [_y_axis(frame, y_ticks, y_label), _x_axis([(frame.x(tick), tick_text(tick)) for tick in x_ticks], x_label)]
    for index, one in enumerate(drawn):
        parts.append(_band(frame, one, index))
        parts.append(_line(frame, one, index))
    if len(drawn) > 1:
        parts.append(_legend([one.name for one in drawn]))
    last = "; ".join(f"{one.name}: from {one.points[0][1]:.4g} to {one.points[-1][1]:.4g}" for one in drawn)
    return _svg(title, f"{y_label} over {x_label}. {last}.", parts)


def histogram(title: str, *, x_label: str, y_label: str, bars: Sequence[Bar], marker: tuple[float, str] | None) -> str:
    """An SVG of equally wide bars; "" where all are empty.

    Args:
        marker: (position in bars from the left edge, label) of a vertical line, for example a threshold; None for none.
    """
    if not any(bar.count for bar in bars):
        return ""
    y_ticks = [tick for tick in nice_ticks(0, max(bar.count for bar in bars)) if tick == int(tick)]
    frame = _Frame(0, len(bars), 0, max(y_ticks[-1], max(bar.count for bar in bars)))
    every = math.ceil(len(bars) / 11)
    labels = [(frame.x(index + 0.5), bar.label) for index, bar in enumerate(bars) if index % every == 0 or index == len(bars) - 1]
    parts = [_y_axis(frame, y_ticks, y_label), _x_axis(labels, x_label)]
    for index, bar in enumerate(bars):
        parts.append(f"<g><title>{escape(bar.label)}: {bar.count:,}, of which {bar.num_highlighted:,} highlighted</title>")
        parts += [_column(frame, index, bar.count, "bar"), _column(frame, index, bar.num_highlighted, "bar accent"), "</g>"]
    if marker is not None:
        x = frame.x(marker[0])
        parts.append(f'<line class="marker" x1="{x:.1f}" x2="{x:.1f}" y1="{_TOP:.1f}" y2="{frame.y(0):.1f}"/>')
        anchor, shift = ("end", -4) if marker[0] > len(bars) / 2 else ("start", 4)
        parts.append(f'<text class="marker-label" x="{x + shift:.1f}" y="{_TOP + 9:.1f}" text-anchor="{anchor}">{escape(marker[1])}</text>')
    return _svg(title, ", ".join(f"{bar.label}: {bar.count}" for bar in bars), parts)


def nice_ticks(low: float, high: float) -> list[float]:
    """Round numbers (1, 2 or 5 times a power of ten apart) that cover [low, high].

    >>> nice_ticks(0, 1)
    [0.0, 0.25, 0.5, 0.75, 1.0]
    >>> nice_ticks(3, 3)
    [2.5, 3.0, 3.5]
    """
    if high <= low:
        half = abs(low) / 2 if 0 < abs(low) < 1 else 0.5
        return [float(low - half), float(low), float(low + half)]
    rough = (high - low) / _TICKS
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= rough * (1 - 1e-9))
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [round(index * step, 12) for index in range(first, last + 1)]


def tick_text(value: float) -> str:
    """A tick's number, short.

    >>> [tick_text(value) for value in (0.0, 0.25, 1500.0, 2000000.0, 0.00002)]
    ['0', '0.25', '1.5k', '2M', '2e-05']
    """
    for size, suffix in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:.4g}{suffix}"
    return f"{value:.4g}"


def _svg(title: str, description: str, parts: Sequence[str]) -> str:
    head = f'<svg class="chart" viewBox="0 0 {_WIDTH:.0f} {_HEIGHT:.0f}" role="img" aria-label="{escape(title)}">'
    return f"{head}<desc>{escape(description)}</desc>{''.join(parts)}</svg>"


def _y_axis(frame: _Frame, ticks: Sequence[float], label: str) -> str:
    lines = [f'<text class="axis-label" x="4" y="13">{escape(label)}</text>']
    for tick in ticks:
        y = frame.y(tick)
        lines.append(f'<line class="grid" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        lines.append(f'<text class="tick" x="{_LEFT - 6}" y="{y + 3.5:.1f}" text-anchor="end">{tick_text(tick)}</text>')
    return "".join(lines)


def _x_axis(ticks: Sequence[tuple[float, str]], label: str) -> str:
    base = _HEIGHT - _BOTTOM
    lines = [f'<line class="axis" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{base}" y2="{base}"/>']
    lines += [f'<text class="tick" x="{x:.1f}" y="{base + 15}" text-anchor="middle">{escape(text)}</text>' for x, text in ticks]
    middle = (_LEFT + _WIDTH - _RIGHT) / 2
    lines.append(f'<text class="axis-label" x="{middle}" y="{_HEIGHT - 7}" text-anchor="middle">{escape(label)}</text>')
    return "".join(lines)


def _column(frame: _Frame, index: int, count: int, kind: str) -> str:
    left, right, top = frame.x(index + 0.1), frame.x(index + 0.9), frame.y(count)
    return f'<rect class="{kind}" x="{left:.1f}" y="{top:.1f}" width="{right - left:.1f}" height="{frame.y(0) - top:.1f}"/>'


def _line(frame: _Frame, series: Series, index: int) -> str:
    path = " ".join(f"{frame.x(x):.1f},{frame.y(y):.1f}" for x, y in series.points)
    parts = [f'<polyline class="line s{index}" points="{path}"/>']
    if len(series.points) <= _MAX_MARKERS:
        for x, y in series.points:
            dot = f'<circle class="dot s{index}" cx="{frame.x(x):.1f}" cy="{frame.y(y):.1f}" r="2">'
            parts.append(f"{dot}<title>{escape(series.name)}, {tick_text(x)}: {y:.4g}</title></circle>")
    return "".join(parts)


def _band(frame: _Frame, series: Series, index: int) -> str:
    if not series.band:
        return ""
    there = [f"{frame.x(x):.1f},{frame.y(high):.1f}" for x, _, high in series.band]
    back = [f"{frame.x(x):.1f},{frame.y(low):.1f}" for x, low, _ in reversed(series.band)]
    return f'<polygon class="band s{index}" points="{" ".join(there + back)}"/>'


def _legend(names: Sequence[str]) -> str:
    """Names in the top right corner, right to left, in the colour of their line."""
    spans = "".join(f'<tspan class="legend s{index}" dx="{8 if index else 0}">{escape(name)}</tspan>' for index, name in enumerate(names))
    return f'<text class="legend-row" x="{_WIDTH - _RIGHT}" y="{13}" text-anchor="end">{spans}</text>'
