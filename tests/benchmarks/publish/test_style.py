"""The same rows give the same picture, byte for byte; digests notice changes."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

pytest.importorskip("matplotlib", reason="not installed: pip install matplotlib")

from benchmarks.publish import style

ROWS = [{"provider": "fastformer", "ms_p50": 1.5}, {"provider": "sdpa", "ms_p50": 3.0}]


def picture(rows=ROWS, title="Time & <space>"):
    fig = style.figure(title, footer="AMD EPYC, 2 threads", height=3)
    (axes,) = fig.axes
    for row in rows:
        name = row["provider"]
        axes.plot([1, 2, 3], [row["ms_p50"]] * 3, color=style.color_of(name), label=name)
    axes.set(xlabel="seqlen", ylabel="ms")
    style.label_lines(axes)
    return fig


def test_the_same_rows_give_the_same_bytes(tmp_path: Path) -> None:
    first = style.save(picture(), "first", ROWS, tmp_path).read_text(encoding="utf-8")
    assert style.save(picture(), "again", list(reversed(ROWS)), tmp_path).read_text(encoding="utf-8") == first
    assert "<dc:date" not in first and "Time &amp; &lt;space&gt;" in first
    ElementTree.fromstring(first)  # it is XML


def test_the_digests_notice_changes() -> None:
    text = style.svg(picture(), ROWS)
    assert style.rows_of(text) == style.digest(ROWS)
    assert style.digest([ROWS[0], {**ROWS[1], "ms_p50": 3.1}]) != style.digest(ROWS) != style.digest(ROWS[:1])
    moved = re.sub(r'd="M (\d+)', r'd="M 9\1', text, count=1)
    assert moved != text
    with pytest.raises(ValueError, match="changed after it was drawn"):
        style.rows_of(moved)
    with pytest.raises(ValueError, match="digests"):
        style.rows_of("<svg></svg>")


def test_bad_calls(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="got none"):
        style.save(picture(), "empty", [], tmp_path)
    with pytest.raises(ValueError, match=r"\.\./x"):
        style.save(picture(), "../x", ROWS, tmp_path)
