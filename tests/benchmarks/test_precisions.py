"""Each row of `python -m benchmarks.precisions` has that precision's translations, or its perplexity."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("sacrebleu", reason="not installed: pip install 'fastformer[train]'")

import torch

from benchmarks import precisions
from fastformer.data.tokenizer import ByteTokenizer
from fastformer.models import GPT
from fastformer.ops import _extension
from tests.benchmarks.running import checked_rows

RIGHT = ["ein Hund läuft durch das Gras", "zwei Männer sitzen auf einer Bank"]


class FakeTranslator:
    """A translator that is right, except for the second line in int8 with beams."""

    def __init__(self, precision: str) -> None:
        self.precision = precision

    def translate(self, texts: list[str], *, num_beams: int) -> list[str]:
        assert texts == ["a dog", "two men"]
        return [RIGHT[0], "zwei Hunde"] if (self.precision, num_beams) == ("int8", 4) else RIGHT


def test_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def opened(run: str, *, device: str, precision: str) -> FakeTranslator:
        assert (run, device) == ("RUN", "cpu")
        return FakeTranslator(precision)

    monkeypatch.setattr("benchmarks.precisions.Translator.from_pretrained", opened)
    (tmp_path / "en").write_text("a dog\ntwo men\n", encoding="utf-8")
    (tmp_path / "de").write_text("\n".join(RIGHT) + "\n", encoding="utf-8")
    out = tmp_path / "rows.jsonl"
    assert precisions.main(["RUN", str(tmp_path / "en"), str(tmp_path / "de"), "--out", str(out)]) == 0
    rows = {(row["precision"], row["shape"]["num_beams"]): row for row in checked_rows(out)}
    assert rows.keys() == {(precision, beams) for precision in ("fp32", "bf16", "int8", "int4") for beams in (1, 4)}
    for case, row in rows.items():
        assert row["same_tokens"] == (1 if case == ("int8", 4) else 2)
        assert (row["sacrebleu_test2016"] < 99) == (row["chrf_test2016"] < 99) == (case == ("int8", 4))
    assert "1 of 2 lines as in fp32" in capsys.readouterr().out


@pytest.mark.skipif(_extension.module() is None, reason="no C++ extension for this CPU")
def test_a_perplexity_equals_the_models(tmp_path: Path) -> None:
    torch.manual_seed(0)
    tokenizer = ByteTokenizer()
    special = {"vocab_size": tokenizer.vocab_size, "special_ids": tokenizer.special_ids}
    model = GPT.from_preset("tiny", d_model=32, num_heads=2, num_layers=2, max_len=16, **special).eval()
    model.save_pretrained(tmp_path, tokenizer)
    text, out = tmp_path / "text", tmp_path / "rows.jsonl"
    text.write_text("the dog reads a book in the park, two birds read another one", encoding="utf-8")
    assert precisions.main([str(tmp_path), str(text), "--window", "16", "--out", str(out)]) == 0
    windows = torch.tensor(tokenizer.encode(text.read_text())[:48]).view(3, 16)
    with torch.inference_mode():
        log_probs = model(windows[:, :-1]).log_softmax(-1)
    expected = float((-log_probs.gather(2, windows[:, 1:, None])).mean().exp())
    rows = checked_rows(out)
    for row, most in zip(rows, (1e-5, 1e-2, 2e-2, 0.2), strict=True):
        assert row["perplexity"] == pytest.approx(expected, rel=most), row["precision"]
    assert len({row["perplexity"] for row in rows}) == 4
