"""report.html shows the records of a run, needs no other file, and escapes its texts."""

from __future__ import annotations

import json
import re
import sys

import pytest

from fastformer.training import start
from fastformer.training.report import read_metrics, write_report
from fastformer.training.report_charts import Line, chart, heatmap
from tests.training.tiny import changed, lines

pytest.importorskip("jinja2", reason="the page is a template of jinja2's")


def test_the_page_of_a_run(config, tmp_path, ran) -> None:
    start(changed(config, val_examples=4, val_every=6, steps=12, report=True), tmp_path / "run").train()
    page = (tmp_path / "run" / "report.html").read_text()
    assert str(tmp_path / "run" / "report.html") in ran("report", str(tmp_path / "run")).out
    # Nothing is loaded from anywhere.
    assert not re.findall(r"(?:src|href)=|url\(|@import|<script|<link", page)
    last, (*_, validation) = lines(tmp_path / "run", "train")[-1], lines(tmp_path / "run", "validation")
    assert f"{last['loss']:.4f}" in page and validation["chrf_signature"] in page
    assert "max_tokens: 64" in page
    for source, found, reference in validation["samples"]:
        assert all(text in page for text in (source, found[:100], reference))
    assert page.count('class="heat"') == 2 and page.count('class="chart"') >= 6
    # 12 updates and as many dots, of which each says its value.
    titles = re.findall(r"<title>training loss, update (\d+): ([\d.]+)</title>", page)
    assert [int(step) for step, _ in titles] == list(range(1, 13))
    assert float(titles[-1][1]) == pytest.approx(last["loss"], rel=1e-3)


def test_the_texts_of_a_run_are_escaped(tmp_path) -> None:
    evil = "<script>alert(1)</script>"
    rows = [
        {"step": 1, "kind": "train", "loss": 2.0, "lr": 1e-3, "tokens_per_second": 9.0, "padding": 0.1},
        {"step": 1, "kind": "validation", "nll": 2.0, "kept": True, "samples": [[evil] * 3], "bleu_signature": evil},
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "config.yaml").write_text(evil)
    assert evil not in write_report(tmp_path).read_text()
    assert evil not in heatmap([evil], [evil], [[0.5]], evil) + chart([Line(evil, [(1, 1)])], evil)


def test_the_report_of_a_resumed_run_and_of_an_empty_one(tmp_path) -> None:
    for folder in (tmp_path, tmp_path / "none"):
        with pytest.raises(ValueError, match=r"metrics\.jsonl"):
            write_report(folder)
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "kind": "train", "loss": 1.0}\n{"step": 2, "ki')
    assert [row["step"] for row in read_metrics(tmp_path / "metrics.jsonl")] == [1]
    (tmp_path / "metrics.jsonl").write_text("")
    with pytest.raises(ValueError, match="got none"):
        write_report(tmp_path)


def test_a_missing_library_is_reported_before_the_training(config, tmp_path, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "jinja2", None)
    with pytest.raises(ImportError, match=r"fastformer\[chat\]"):
        start(changed(config, report=True), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def places(picture: str) -> list[list[float]]:
    return [[float(x) for x in point.split(",")] for point in re.search(r'points="([^"]*)"', picture)[1].split()]


@pytest.mark.parametrize("log", [False, True])
def test_a_line_spans_the_whole_curve(log) -> None:
    found = places(chart([Line("a", [(0, 1.0), (50, 10.0), (100, 100.0)])], "y", log=log))
    assert found[0] == [62, 220] and found[2] == [468, 12] and found[1][0] == 265
    assert found[1][1] == pytest.approx(116 if log else 220 - 208 / 11, abs=0.1)


def test_no_points_and_very_many() -> None:
    assert chart([Line("a", [])], "y") == chart([Line("a", [(1, float("nan"))])], "y") == ""
    assert "nan" not in chart([Line("a", [(1, 1.0), (2, float("inf")), (3, 2.0)])], "y")
    many = places(chart([Line("a", [(i, float(i)) for i in range(100_000)])], "y"))
    assert len(many) <= 401 and many[-1] == [468, 12]
