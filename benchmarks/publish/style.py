"""The style of all pictures of the benchmarks, and their SVG.

    fig = style.figure("Loss over updates", footer="AMD EPYC, 2 threads")
    (axes,) = fig.axes
    axes.plot(x, y, color=style.color_of("fastformer"), label="fastformer")
    axes.set(xlabel="update", ylabel="loss (nats a token)")
    style.label_lines(axes)  # names where the lines end; or style.legend(fig), below the data
    style.save(fig, "experiment_loss", rows)

The background is transparent. Text, axes and ticks are INK, a grey that is legible on white and on black. If the
reader's colour scheme is known, a style inside the SVG makes it nearly black or nearly white. The metadata has a digest
of the rows and one of the drawing, so that a test can recognise a picture that is stale, or was edited by hand.
"""

from __future__ import annotations

import hashlib
import html
import io
import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PICTURES = Path(__file__).parents[1] / "pictures"

# Okabe and Ito's colours, which are distinct for all kinds of colour vision. Their yellow is invisible on white, and
# their black on black.
VERMILLION, SKY, GREEN, BLUE, PURPLE, ORANGE = "#d55e00", "#56b4e9", "#009e73", "#0072b2", "#cc79a7", "#e69f00"
OLIVE = "#999933"  # Tol's, for a seventh program in one picture
INK = "#767676"  # 4.5 : 1 against white and against black
GREY = "#8c8c8c"  # the baseline
_INK_ON = {"light": "#24292f", "dark": "#d8dee4"}

OURS = VERMILLION
_COLORS = {
    "fastformer": OURS,
    "accelerated": OURS,
    "cpp": OURS,
    "baseline": GREY,
    "fastformer.baseline": GREY,
    "as it is": GREY,
    "recompute": GREY,
    "eager": SKY,
    "torch.nn": SKY,
    "sdpa": BLUE,
    "compiled": GREEN,
    "ctranslate2": PURPLE,
    "faster-whisper": PURPLE,  # CTranslate2's
    "openvino": ORANGE,
    "onnxruntime": BLUE,
    "llama.cpp": GREEN,
    "ik_llama.cpp": PURPLE,
    "sentence-transformers": OLIVE,
    "transformers": SKY,
}
_OTHERS = (BLUE, GREEN, SKY, PURPLE, ORANGE)


def color_of(provider: str) -> str:
    """Returns a provider's colour, the same in every picture; all forms of fastformer have the colour `OURS`."""
    name = provider.lower()
    if name in _COLORS:
        return _COLORS[name]
    for part in ("baseline", "fastformer", "compile", "torch.nn", "cpp", *_COLORS):
        if part in name:
            return GREEN if part == "compile" else _COLORS[part]
    return _OTHERS[int(hashlib.sha256(name.encode()).hexdigest(), 16) % len(_OTHERS)]


def figure(title: str, *, footer: str = "", columns: int = 1, height: float = 4.0) -> Figure:
    """Makes an empty picture, 8 inches wide (768 pixels in a browser), with `columns` axes in `.axes`.

    Args:
        title: the title.
        footer: the machine, the threads, the model.
        columns: the number of axes beside each other.
        height: the height in inches.

    Raises:
        ImportError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("drawing needs matplotlib: pip install 'fastformer[plot]'") from error
    fig = Figure(figsize=(8, height), layout="constrained")
    _reserve(fig, 0.0)
    fig.suptitle(title, x=0.01, ha="left", fontsize=12, fontweight="bold", color=INK)
    for axes in fig.subplots(1, columns, squeeze=False).flat:
        axes.patch.set_visible(False)
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(which="both", colors=INK, labelsize=9)
        axes.set_axisbelow(True)
        axes.grid(color="#808080", alpha=0.25, linewidth=0.6)
    if footer:
        size = 8 * min(1.0, _FOOTER_LETTERS / len(footer))  # results of two machines make a long line
        fig.text(0.01, 0.06 / height, footer, fontsize=size, color=INK)
    return fig


_FOOTER = 0.22  # inches
_FOOTER_LETTERS = 115  # the number of characters that fit at 8 points


def _reserve(fig: Figure, inches: float) -> None:
    """Keeps the data this many inches above the footer."""
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    engine = fig.get_layout_engine()
    assert isinstance(engine, ConstrainedLayoutEngine)
    share = (_FOOTER + inches) / fig.get_figheight()
    engine.set(rect=(0.0, share, 1.0, 1 - share))


def label_lines(axes: Axes) -> None:
    """Labels each line of the axes at its end, to the right of the data; labels of close ends are moved apart.

    Call it last: it uses the current limits and scales. A line without a label of its own gets none.
    """
    from matplotlib.lines import Line2D

    gap = 0.055

    lines = [line for line in axes.lines if not str(line.get_label()).startswith("_")]
    axes.autoscale_view()  # limits are computed on demand, and the transform doesn't demand it
    transform = axes.transScale + axes.transLimits
    ends = []
    for line in lines:
        points = [
            (x, y) for x, y in line.get_xydata().tolist() if math.isfinite(y)  # type: ignore[union-attr]
        ]  # fmt: skip
        if points:
            ends.append((*transform.transform(points[-1]), line))
    ends.sort(key=lambda end: end[1])
    places: list[float] = []
    for _, height, _ in ends:
        places.append(max(height, places[-1] + gap) if places else height)
    # A label that was moved beyond the top goes back down, and moves the labels below it as far as needed.
    for index in reversed(range(len(places))):
        above = places[index + 1] if index + 1 < len(places) else 1 + gap
        places[index] = min(places[index], above - gap)
    for (right, height, line), place in zip(ends, places, strict=True):
        leader = Line2D(
            [right, 1.02, 1.035], [height, place, place], color=line.get_color(), linewidth=1.0, clip_on=False,
            transform=axes.transAxes, linestyle=line.get_linestyle(), alpha=0.7, label="_leader",
        )  # fmt: skip
        axes.add_artist(leader)
        axes.text(1.045, place, str(line.get_label()), va="center", fontsize=9, color=INK, transform=axes.transAxes)


def legend(fig: Figure, *, columns: int = 4) -> None:
    """Adds the names of everything that is labelled, once each, in rows below the data."""
    handles: dict[str, Any] = {}
    for axes in fig.axes:
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            handles.setdefault(label, handle)
    # Matplotlib fills columns from top to bottom; people read rows.
    columns = min(columns, len(handles)) or 1
    order = [name for start in range(columns) for name in list(handles)[start::columns]]
    _reserve(fig, 0.08 + 0.19 * math.ceil(len(handles) / columns))
    fig.legend(
        [handles[name] for name in order], order, loc="lower left", bbox_to_anchor=(0.0, _FOOTER / fig.get_figheight()),
        ncols=columns, frameon=False, fontsize=9, labelcolor=INK, handlelength=1.4, columnspacing=1.6, borderaxespad=0,
    )  # fmt: skip


def two_digits(value: float) -> str:
    """Formats two significant digits: 0.97, 2.3, 16, 210, with separators between thousands."""
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    digits = 1 - math.floor(math.log10(abs(float(f"{value:.1e}"))))
    return f"{round(value, digits):,.{max(digits, 0)}f}"


def digest(rows: Iterable[Mapping[str, Any]]) -> str:
    """Returns a digest of rows, independent of their order."""
    lines = sorted(json.dumps(row, sort_keys=True) for row in rows)
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]


def save(fig: Figure, name: str, rows: Sequence[Mapping[str, Any]], folder: Path = PICTURES) -> Path:
    """Writes `folder/name.svg`: the same bytes for the same rows and the same matplotlib.

    Args:
        fig: a result of `figure`, with the drawing.
        name: the name of the picture, without a suffix.
        rows: all lines of JSON that it was drawn from.
        folder: the folder to write to; it is created if it doesn't exist.

    Raises:
        ValueError: there are no rows, or the name contains more than a file name.
    """
    if not rows:
        raise ValueError(f"expected the rows that {name} was drawn from, got none")
    if Path(name).name != name or Path(name).suffix:
        raise ValueError(f"expected the name of a picture, such as ops_fp32, got {name!r}")
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.svg"
    path.write_text(svg(fig, rows), encoding="utf-8")
    return path


def svg(fig: Figure, rows: Sequence[Mapping[str, Any]]) -> str:
    """Returns the picture as text; see `save`."""
    import matplotlib
    from matplotlib.text import Text

    for text in fig.findobj(Text):
        if matplotlib.colors.same_color(text.get_color(), "black"):
            text.set_color(INK)
    for axes in fig.axes:
        for spine in axes.spines.values():
            spine.set_edgecolor(INK)
    fig.patch.set_visible(False)
    buffer = io.StringIO()
    # Glyphs as paths: letters have the same width everywhere, so nothing overlaps elsewhere that doesn't overlap here.
    with matplotlib.rc_context({"svg.hashsalt": "fastformer", "svg.fonttype": "path"}):
        fig.savefig(buffer, format="svg", metadata=dict.fromkeys(("Date", "Creator", "Format", "Type")))
    plain = re.sub(r"<!--.*?-->\n?", "", buffer.getvalue(), flags=re.DOTALL)
    head, tag, body = re.split(r"(<svg\b[^>]*>)", plain, maxsplit=1)
    title = "" if fig.get_suptitle() is None else html.escape(fig.get_suptitle())
    marked = head + tag + f"\n<title>{title}</title>\n<style>\n{_scheme()}</style>" + body
    metadata = f"<metadata>rows {digest(rows)} drawing {_drawing(marked)}</metadata>"
    return marked.replace("</title>", f"</title>\n{metadata}", 1)


def _drawing(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _scheme() -> str:
    return "".join(
        f'@media (prefers-color-scheme: {scheme}) {{\n  [style*="fill: {INK}"] {{ fill: {ink} !important }}\n'
        f'  [style*="stroke: {INK}"] {{ stroke: {ink} !important }}\n}}\n'
        for scheme, ink in _INK_ON.items()
    )


def rows_of(text: str) -> str:
    """Returns the digest of the rows that an SVG was drawn from.

    Raises:
        ValueError: the text isn't a picture from `save`, or was changed since.
    """
    match = re.search(r"\n<metadata>rows (\w+) drawing (\w+)</metadata>", text)
    if match is None:
        raise ValueError("expected an SVG with the digests that `save` writes, got none")
    if _drawing(text.replace(match.group(0), "", 1)) != match.group(2):
        raise ValueError("the picture was changed after it was drawn")
    return match.group(1)
