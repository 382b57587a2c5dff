"""Pictures and the report can be made from any rows: few, missing, of one provider, disturbed, or none."""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("matplotlib", reason="not installed: pip install matplotlib")

import pytest
from matplotlib.patches import Rectangle

from benchmarks.plot import main
from benchmarks.publish import report, style
from benchmarks.publish.charts import CHARTS, charts
from benchmarks.publish.latest import Results
from tests.benchmarks.conftest import Refused

SHARED = {"device": "EPYC", "capability": "AVX512", "cores": 2, "threads": 2, "torch": "2.13", "triton": None,
          "python": "3.11", "commit": "abc1234", "dirty": False, "command": "python -m x",
          "time": "2026-01-02"}  # fmt: skip


def line(op: str, provider: str, ms: float | None, suite: str = "ops", **fields: Any) -> dict[str, Any]:
    times = {} if ms is None else {"ms_p50": ms, "ms_p20": 0.9 * ms, "ms_p80": 1.1 * ms}
    return SHARED | {"suite": suite, "op": op, "provider": provider, "shape": {}} | times | fields


def rotary(provider: str, ms: float | None, dtype: str = "float32", **fields: Any) -> dict[str, Any]:
    return line("rotary", provider, ms, mode="fwdbwd", dtype=dtype, shape={"seqlen": 512}, **fields)


def decoding(provider: str, batch: int, ms: float, threads: int = 2) -> dict[str, Any]:
    shape = {"preset": "base", "batch": batch, "num_beams": 1}
    return line("decoding", provider, ms, "decoding", shape=shape, threads=threads, tokens_s=batch * 24e3 / ms)


def scaling(provider: str, seqlen: int, ms: float) -> dict[str, Any]:
    shape = {"seqlen": seqlen}
    return line("scaling", provider, ms, "scaling", shape=shape, mode="fwdbwd", dtype="float32", peak_mib=seqlen / 8)


ROWS = [
    rotary("fastformer", 2.0),
    rotary("eager", 5.0),
    rotary("fastformer", 2.0, "bfloat16"),
    rotary("eager", 1.0, "bfloat16"),  # ours loses
    rotary("sdpa", None, missing="pip install sdpa"),
    *(decoding(name, batch, ms) for batch in (1, 8) for name, ms in (("recompute", 90), ("kv_cache", 30), ("cpp", 9))),
    *(scaling(name, n, n**p / 1e3) for n in (128, 256, 512, 1024) for name, p in (("fastformer", 2), ("lstm", 1))),
    line("token_times", "cpp", None, "decoding", model="base", precision="int8", shape={"tokens": 3},
         curve={"x": [2, 3], "y": [1.0, 1.1], "x_label": "position", "y_label": "ms"}),
]  # fmt: skip
DRAWN = {"ops", "decoding_ladder", "decoding_throughput", "scaling", "token_times"}


def write(folder: Path, rows: list[dict[str, Any]]) -> Path:
    (folder / "cpu.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def run(folder: Path, *names: str) -> int:
    return main([*names, "--results", str(folder), "--out", str(folder / "pictures")])


def test_pictures_without_rows_name_their_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(write(tmp_path, ROWS)) == 0
    assert {path.stem for path in (tmp_path / "pictures").iterdir()} == DRAWN
    out = capsys.readouterr().out
    for name in charts().keys() - DRAWN:
        assert re.search(f"^{name} is not drawn, its rows are missing: (python -m|make) ", out, re.MULTILINE)
    for path in (tmp_path / "pictures").iterdir():
        ElementTree.fromstring(path.read_text(encoding="utf-8"))
    assert run(tmp_path, "ops") == 0 and run(tmp_path, "peers") == 1


def test_bars_are_ratios_and_losses_go_to_the_left(tmp_path: Path) -> None:
    rows = CHARTS["ops"].select(Results(write(tmp_path, ROWS)))
    assert [(row["provider"], row["dtype"]) for row in rows] == [
        (name, dtype) for dtype in ("float32", "bfloat16") for name in ("fastformer", "eager")
    ]
    fp32, bf16 = CHARTS["ops"].draw(rows).axes
    for axes, ratio in ((fp32, 2.5), (bf16, 0.5)):
        (bar,) = (patch for patch in axes.patches if isinstance(patch, Rectangle) and patch.get_alpha() is None)
        assert bar.get_x() == 1 and bar.get_x() + bar.get_width() == pytest.approx(ratio)
        assert axes.get_xlim()[0] < min(ratio, 1) and axes.get_xlim()[1] > ratio
        assert [text.get_text() for text in axes.texts] == [style.two_digits(ratio)]


def test_no_results(tmp_path: Path, refused: Refused) -> None:
    assert run(write(tmp_path, [])) == 0 and not (tmp_path / "pictures").exists()
    assert "no folder" in refused(main, "--results", str(tmp_path / "none"))
    assert "nothing" in refused(main, "nothing", "--results", str(tmp_path))
    (tmp_path / "cpu.jsonl").write_text('{"op": "a"}\n[1]\n')
    assert "cpu.jsonl, line 2" in refused(main, "--results", str(tmp_path))


# The report.


def page(folder: Path, rows: list[dict[str, Any]]) -> str:
    write(folder, rows)
    assert report.main(["--results", str(folder), "--out", str(folder / "out" / "page.html")]) == 0
    return (folder / "out" / "page.html").read_text(encoding="utf-8")


def test_the_report_has_tables_pictures_losses_and_what_is_missing(tmp_path: Path) -> None:
    disturbed = rotary("fastformer reference", 7.0, rounds=12, disturbed=0.5, quiet=False, share=0.42, bound="memory",
                       floor_ms=2.94, peak_mib=1234.0, backends={"rotary": "reference"}, speedup=0.7)  # fmt: skip
    text = page(tmp_path, [*ROWS, disturbed])
    assert text.count("<svg") == len(DRAWN) and not re.search(r'(src|href)="(?!#)', text.replace("xlink:href", ""))
    for shown in ("EPYC", "abc1234", "python -m x", "pip install sdpa", "50% of 12 turns", "42 % of memory", "1,234"):
        assert shown in text
    losses = text[text.index('id="losses"') : text.index('id="ops"')]
    assert "rotary: fwdbwd, bfloat16" in losses and ">0.50<" in losses and "float32" not in losses
    assert not re.findall(r"\bnan\b|None", re.sub(r"<svg.*?</svg>", "", text, flags=re.DOTALL))
    assert page(tmp_path, [])


def test_rows_are_escaped(tmp_path: Path) -> None:
    text = page(tmp_path, [rotary("<b>", 2.0, command="a <i> & b")])
    assert "&lt;b&gt;" in text and "a &lt;i&gt; &amp; b" in text and "<i>" not in text


def test_providers_of_different_work_are_not_ranked(tmp_path: Path) -> None:
    results = Results(write(tmp_path, [scaling("fastformer", 128, 9.0), scaling("fastformer window", 128, 1.0)]))
    assert not list(report.slower(results))
    faster = [rotary("fastformer", 2.0), rotary("eager", 1.0, ours=1.1)]  # in turns of the same rounds
    assert not list(report.slower(Results(write(tmp_path, faster))))


# The same rows give the same picture, byte for byte; digests notice changes.


ROWS_STYLE = [{"provider": "fastformer", "ms_p50": 1.5}, {"provider": "sdpa", "ms_p50": 3.0}]


def picture(rows=ROWS_STYLE, title="Time & <space>"):
    fig = style.figure(title, footer="AMD EPYC, 2 threads", height=3)
    (axes,) = fig.axes
    for row in rows:
        name = row["provider"]
        axes.plot([1, 2, 3], [row["ms_p50"]] * 3, color=style.color_of(name), label=name)
    axes.set(xlabel="seqlen", ylabel="ms")
    style.label_lines(axes)
    return fig


def test_the_same_rows_give_the_same_bytes(tmp_path: Path) -> None:
    first = style.save(picture(), "first", ROWS_STYLE, tmp_path).read_text(encoding="utf-8")
    assert style.save(picture(), "again", list(reversed(ROWS_STYLE)), tmp_path).read_text(encoding="utf-8") == first
    assert "<dc:date" not in first and "Time &amp; &lt;space&gt;" in first
    ElementTree.fromstring(first)  # it is XML


def test_the_digests_notice_changes() -> None:
    text = style.svg(picture(), ROWS_STYLE)
    assert style.rows_of(text) == style.digest(ROWS_STYLE)
    assert (
        style.digest([ROWS_STYLE[0], {**ROWS_STYLE[1], "ms_p50": 3.1}])
        != style.digest(ROWS_STYLE)
        != style.digest(ROWS_STYLE[:1])
    )
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
        style.save(picture(), "../x", ROWS_STYLE, tmp_path)
