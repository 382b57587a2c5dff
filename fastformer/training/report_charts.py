"""Draws charts and heatmaps as SVG for a page, without a library, in colours that follow its light or dark theme."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

_WIDTH, _HEIGHT = 480, 260
_LEFT, _RIGHT, _TOP, _BOTTOM = 62, 12, 12, 40
_POINTS = 400  # the most points of a line; more are thinned out, so that the page of a long run stays small
_MARKED = 40  # the most points that are drawn as dots, with their values as titles
Point = tuple[float, float]


@dataclass(frozen=True)
class Line:
    """A line of a chart: its name, and (x, y) in ascending order of x."""

    name: str
    points: Sequence[Point]


def chart(lines: Sequence[Line], y_label: str, *, log: bool = False) -> str:
    """Draws lines over the number of the update as an SVG; empty without a point.

    Args:
        lines: at most three.
        y_label: the label of the y axis, with its unit.
        log: whether the y axis is logarithmic; all values must then be above 0.
    """
    lines = [Line(line.name, [p for p in line.points if all(map(math.isfinite, p))]) for line in lines]
    lines = [line for line in lines if line.points]
    if not lines:
        return ""
    xs = [x for line in lines for x, _ in line.points]
    ys = [y for line in lines for _, y in line.points]
    log = log and min(ys) > 0 and max(ys) > 1.2 * min(ys)
    x_axis = _Axis(min(xs), max(xs), _LEFT, _WIDTH - _RIGHT)
    y_axis = _Axis(min(ys), max(ys), _HEIGHT - _BOTTOM, _TOP, log=log)
    parts = [
        f'<svg class="chart" viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{escape(y_label)} by update">'
    ]
    for value in y_axis.ticks():
        y = y_axis.place(value)
        parts.append(f'<line class="grid" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{_number(value)}</text>')
    for value in x_axis.ticks(5):
        x = x_axis.place(value)
        anchor = "end" if x > _WIDTH - 30 else "middle"
        parts.append(f'<text x="{x:.1f}" y="{_HEIGHT - _BOTTOM + 18}" text-anchor="{anchor}">{_number(value)}</text>')
    middle = (_LEFT + _WIDTH - _RIGHT) / 2
    parts.append(f'<text x="{middle}" y="{_HEIGHT - 4}" text-anchor="middle">update</text>')
    for number, line in enumerate(lines):
        thin = _thinned(line.points)
        places = [(x_axis.place(x), y_axis.place(y)) for x, y in thin]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
        parts.append(f'<polyline class="line c{number}" points="{path}"/>')
        for (x, y), (step, value) in zip(places, thin, strict=True):
            if len(thin) <= _MARKED:
                told = escape(f"{line.name}, update {_number(step)}: {value:.4g}")
                dot = f'<circle class="dot c{number}" cx="{x:.1f}" cy="{y:.1f}" r="3">'
                parts.append(f"{dot}<title>{told}</title></circle>")
    return "".join([*parts, "</svg>"])


def heatmap(rows: Sequence[str], columns: Sequence[str], weights: Sequence[Sequence[float]], title: str) -> str:
    """Draws a weight from 0 to 1 for each row and column as an SVG, with the columns' names written upwards above it.

    Args:
        rows, columns: the tokens.
        weights: (rows, columns).
        title: the text for screen readers.
    """
    cell, letter = 22, 8
    left = 12 + letter * max(map(len, rows), default=1)
    top = 12 + letter * max(map(len, columns), default=1)
    width, height = left + cell * len(columns) + 4, top + cell * len(rows) + 4
    parts = [f'<svg class="heat" style="max-width:{width}px" viewBox="0 0 {width} {height}" role="img" '
             f'aria-label="{escape(title)}">']  # fmt: skip
    for j, token in enumerate(columns):
        x = left + cell * j + cell / 2 + 4
        parts.append(f'<text transform="translate({x},{top - 5}) rotate(-90)">{escape(token)}</text>')
    for i, token in enumerate(rows):
        y = top + cell * i
        parts.append(f'<text x="{left - 6}" y="{y + cell / 2 + 5}" text-anchor="end">{escape(token)}</text>')
        for j, weight in enumerate(weights[i]):
            told = escape(f"{token} looks at {columns[j]}: {weight:.2f}")
            parts.append(
                f'<rect class="cell" x="{left + cell * j}" y="{y}" width="{cell - 1}" height="{cell - 1}" '
                f'fill-opacity="{min(max(weight, 0.0), 1.0):.2f}"><title>{told}</title></rect>'
            )
    return "".join([*parts, "</svg>"])


class _Axis:
    """An axis, which maps values to places between two ends of a picture."""

    def __init__(self, low: float, high: float, begin: float, end: float, *, log: bool = False) -> None:
        if low == high:
            low, high = (low * 0.9, high * 1.1) if low else (0.0, 1.0)
        if low > high:
            low, high = high, low
        self._low, self._high, self._log = low, high, log
        self._begin, self._end = begin, end

    def place(self, value: float) -> float:
        low, high = self._low, self._high
        share = math.log(value / low) / math.log(high / low) if self._log else (value - low) / (high - low)
        return self._begin + share * (self._end - self._begin)

    def ticks(self, most: int = 5) -> list[float]:
        """Returns round numbers between the ends."""
        if self._log:
            powers = range(math.floor(math.log10(self._low)), math.ceil(math.log10(self._high)) + 1)
            for digits in ((1,), (1, 3), (1, 2, 5), (1, 1.5, 2, 3, 4, 5, 6, 8)):
                ticks = [d * 10.0**p for p in powers for d in digits if self._low <= d * 10.0**p <= self._high]
                if len(ticks) >= 3:
                    return ticks[:: -(-len(ticks) // (most + 2))]
        raw = (self._high - self._low) / most
        size = 10.0 ** math.floor(math.log10(raw))
        step = next(size * factor for factor in (1, 2, 2.5, 5, 10) if size * factor >= raw)
        first = math.ceil(self._low / step - 1e-9)
        return [step * i for i in range(first, math.floor(self._high / step + 1e-9) + 1)]


def _number(value: float) -> str:
    """Formats a number briefly: "12,000", "0.35", "2e-05"."""
    if value == 0:
        return "0"
    if abs(value) < 1e-3:
        return f"{value:.2g}"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def _thinned(points: Sequence[Point]) -> list[Point]:
    """Returns at most _POINTS of the points, with the last one among them."""
    step = -(-len(points) // _POINTS)
    return [*points[:-1:step], points[-1]]
