"""README's Python runs; `tests/docs/test_pages.py` tests its commands and its links."""

from __future__ import annotations

import re
from pathlib import Path

import torch

from tests.encoding.folders import bert

README = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)


def block_with(text: str) -> str:
    (match,) = [block for language, block in BLOCKS if language == "python" and text in block]
    return match


def test_the_python_of_the_first_minute_runs() -> None:
    names: dict[str, object] = {}
    exec(block_with("from_preset"), names)
    assert {"layer", "model", "tokens"} <= names.keys()


def test_a_model_that_exists_is_accelerated(tmp_path, monkeypatch, capsys) -> None:
    """Nothing is downloaded: a small BERT with random weights is in a folder of the name."""
    (tmp_path / "bert-base-uncased").mkdir()
    bert(tmp_path / "bert-base-uncased")
    monkeypatch.chdir(tmp_path)
    exec(block_with("accelerate(model)"), {"batch": {"input_ids": torch.randint(5, 20, (2, 7))}})
    assert "2 BertLayer" in capsys.readouterr().out


def test_a_marian_translates(tmp_path, monkeypatch, capsys) -> None:
    from tests.checkpoints.families import marian

    marian(tmp_path / "opus-mt-en-de")
    monkeypatch.chdir(tmp_path)
    exec(block_with("Translator"), {})
    whole, pieces = capsys.readouterr().out.split("\n")
    assert whole and pieces == whole, "what is streamed is the whole translation"
