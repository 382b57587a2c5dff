"""Draws the curves of several seeds as one line."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from benchmarks.experiments.experiment import Row
from benchmarks.publish import style

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# The colour and dashes of the lines, in their order.
LOOKS: tuple[Mapping[str, Any], ...] = (
    {"color": style.VERMILLION, "linestyle": "-"},
    {"color": style.BLUE, "linestyle": "--"},
    {"color": style.VERMILLION, "linestyle": ":"},
    {"color": style.BLUE, "linestyle": "-."},
)


def draw_curves(rows: Sequence[Row], title: str, footer: str) -> Figure:
    """Draws a thick line for each provider, the mean of its seeds, and a thin one for each seed; y is logarithmic."""
    seeds = len({row["shape"]["seed"] for row in rows})
    fig = style.figure(title, footer=f"{footer}; {seeds} seeds, thick: their mean" if seeds > 1 else footer)
    (axes,) = fig.axes
    for provider, look in zip(dict.fromkeys(row["provider"] for row in rows), LOOKS, strict=False):
        curves = [row["curve"] for row in rows if row["provider"] == provider]
        for curve in curves:
            axes.plot(curve["x"], curve["y"], **look, linewidth=0.7, alpha=0.5)
        axes.plot(*mean_curve(curves), **look, linewidth=2.0, label=provider)
    axes.set(xlabel=rows[0]["curve"]["x_label"], ylabel=rows[0]["curve"]["y_label"], yscale="log")
    plain_ticks(axes)
    style.legend(fig, columns=2)  # the names are long
    return fig


def mean_curve(curves: Sequence[Mapping[str, Any]]) -> tuple[list[float], list[float]]:
    """Returns the mean of x and the geometric mean of y at each point, up to the length of the shortest curve."""
    xs = [statistics.fmean(points) for points in zip(*(curve["x"] for curve in curves), strict=False)]
    ys = [
        math.exp(statistics.fmean(map(math.log, points)))
        for points in zip(*(curve["y"] for curve in curves), strict=False)
    ]
    return xs, ys


def plain_ticks(axes: Axes) -> None:
    """Labels ticks with 0.1 instead of 10^-1, and with few of the numbers in between."""
    from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

    axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axes.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())
