"""Writes report.html, a self-contained report of a run that needs no other files and no network."""

from __future__ import annotations

import importlib
import json
import logging
import os
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fastformer.checkpoints import load_model
from fastformer.data.tokenizer import TOKENIZER
from fastformer.files import check_places, write_atomically
from fastformer.generation import Translator
from fastformer.models.weights import WEIGHTS
from fastformer.training.progress import METRICS, duration
from fastformer.training.report_charts import Line, chart, heatmap
from fastformer.training.run_config import CONFIG

logger = logging.getLogger("fastformer")

REPORT = "report.html"
_TEMPLATE = Path(__file__).with_name("report.html.j2")
_HEATMAPS = 2  # samples that are drawn
_TOKENS = 40  # of a side that is drawn
_SAMPLE = 300  # characters
Row = dict[str, Any]


def template() -> Any:
    """Loads the template of the page, which escapes its values.

    Raises:
        ImportError: jinja2 is not installed.
    """
    try:
        jinja2 = importlib.import_module("jinja2")
    except ImportError as error:
        raise ImportError("a report needs jinja2: pip install 'fastformer[chat]'") from error
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True)
    return environment.from_string(_TEMPLATE.read_text(encoding="utf-8"))


def write_report(run: str | os.PathLike[str]) -> Path:
    """Writes report.html into a run folder.

    Args:
        run: the folder; its training may still be running.

    Returns:
        The path of the file.

    Raises:
        ValueError: no run, or a run without metrics so far.
        ImportError: jinja2 is not installed.
    """
    page, folder = template(), Path(run)
    if not (folder / METRICS).is_file():
        raise ValueError(f"expected a run folder with a {METRICS}, as `fastformer train` writes it, got {folder}")
    rows = read_metrics(folder / METRICS)
    if not rows:
        raise ValueError(f"expected at least one line of numbers in {folder / METRICS}, got none")
    check_places(folder, (REPORT,))
    scores = [row for row in rows if row["kind"] != "train"]
    samples: list[list[str]] = next((row["samples"] for row in reversed(scores) if row.get("samples")), [])
    text = page.render(
        name=folder.resolve().name,
        written=time.strftime("%Y-%m-%d %H:%M"),
        facts=_facts(rows, scores),
        charts=_charts(rows, scores),
        signatures=_signatures(scores),
        samples=[[_cut(part) for part in sample] for sample in samples],
        heatmaps=_heatmaps(folder, [source for source, _, _ in samples]),
        config=_text_of(folder / CONFIG),
    )
    write_atomically(folder / REPORT, text.encode("utf-8", "replace"))
    return folder / REPORT


def read_metrics(path: Path) -> list[Row]:
    """Reads the complete lines of metrics.jsonl; a running training may be about to write the last one."""
    rows = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            row = json.loads(line)
        except ValueError:
            continue
        if isinstance(row, dict) and isinstance(row.get("step"), int) and isinstance(row.get("kind"), str):
            rows.append(row)
    return rows


def _line(name: str, rows: Sequence[Row], key: str, scale: float = 1.0) -> Line:
    return Line(name, [(row["step"], scale * row[key]) for row in rows if isinstance(row.get(key), int | float)])


def _charts(rows: Sequence[Row], scores: Sequence[Row]) -> list[tuple[str, str, list[str]]]:
    """Returns the title, the picture and the names of the lines of each chart that isn't empty."""
    train = [row for row in rows if row["kind"] == "train"]
    checked = [row for row in scores if row["kind"] == "validation"]
    loss = [_line("training loss", train, "loss"), _line("validation NLL", checked, "nll")]
    speed, padding = _line("real tokens a second", train, "tokens_per_second"), _line("padding", train, "padding", 100)
    plots = [
        ("Loss, nats a target token", loss, "loss", True),
        ("Learning rate", [_line("learning rate", train, "lr")], "learning rate", False),
        ("BLEU and chrF", [_line("BLEU", checked, "bleu"), _line("chrF", checked, "chrf")], "score", False),
        ("Exact match, %", [_line("exact match", checked, "exact_match", 100)], "%", False),
        ("Gradient norm", [_line("gradient norm", train, "grad_norm")], "norm", True),
        ("Real tokens a second", [speed], "tokens a second", False),
        ("Padding, % of what is computed", [padding], "%", False),
    ]
    charts = [(title, chart(lines, label, log=log), lines) for title, lines, label, log in plots]
    return [
        (title, picture, [line.name for line in lines if line.points] if len(lines) > 1 else [])
        for title, picture, lines in charts
        if picture
    ]


def _facts(rows: Sequence[Row], scores: Sequence[Row]) -> list[tuple[str, str]]:
    """Returns the numbers at the top of the page."""
    train = [row for row in rows if row["kind"] == "train"]
    facts = [("updates", f"{max(row['step'] for row in rows):,}")]
    if train:
        facts.append(("training loss, last", f"{train[-1]['loss']:.4f}"))
    saved = next((row for row in reversed(scores) if row.get("saved")), None)
    if saved is not None:
        what = "the average" if saved["kind"] == "average" else f"update {saved['step']:,}"
        facts.append(("model in the folder", what))
        for key, label, shown in (
            ("nll", "validation NLL", "{:.4f}"), ("bleu", "BLEU", "{:.2f}"), ("chrf", "chrF", "{:.2f}"),
            ("exact_match", "exact match", "{:.1%}"),
        ):  # fmt: skip
            if isinstance(saved.get(key), int | float):
                facts.append((label, shown.format(saved[key])))
    if train:
        facts.append(("real tokens a second", f"{statistics.median(row['tokens_per_second'] for row in train):,.0f}"))
        facts.append(("padding", f"{statistics.fmean(row['padding'] for row in train):.1%}"))
    seconds = max((row["seconds"] for row in rows if isinstance(row.get("seconds"), int | float)), default=0)
    return [*facts, ("trained for", duration(seconds))] if seconds else facts


def _signatures(scores: Sequence[Row]) -> list[tuple[str, str]]:
    """Returns sacreBLEU's signatures, which say how scores were computed."""
    keys = (("bleu_signature", "BLEU"), ("chrf_signature", "chrF"))
    signatures = {label: row[key] for row in scores for key, label in keys if isinstance(row.get(key), str)}
    return list(signatures.items())


def _heatmaps(folder: Path, sources: Sequence[str]) -> list[tuple[str, str]]:
    """Draws the cross-attention of the first samples, by the last layer of the folder's model, averaged over heads."""
    if not sources or not (folder / WEIGHTS).is_file() or not (folder / TOKENIZER).is_file():
        return []
    model, tokenizer = load_model(folder)
    if not hasattr(model, "attention_maps"):
        return []
    translator, heatmaps = Translator(model, tokenizer), []
    for text in sources[:_HEATMAPS]:
        source, target, weights = translator.attention(text)
        mean = weights[-1].mean(0)[:_TOKENS, :_TOKENS].tolist()
        picture = heatmap(target[:_TOKENS], source[:_TOKENS], mean, f"attention of the translation of {text}")
        heatmaps.append((_cut(text), picture))
    return heatmaps


def _cut(text: str) -> str:
    return text if len(text) <= _SAMPLE else text[: _SAMPLE - 1] + "…"


def _text_of(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace").removesuffix("...\n") if path.is_file() else ""
