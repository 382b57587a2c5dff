"""The rows of `python -m benchmarks.precisions`: each precision's own translations, scored and held against fp32's."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("sacrebleu", reason="not installed: pip install 'fastformer[train]'")

from benchmarks import precisions
from benchmarks.measure import record

RIGHT = ["ein Hund läuft durch das Gras", "zwei Männer sitzen auf einer Bank"]


class Fake:
    """A translator that is right, but for the second line in int8 with beams."""

    def __init__(self, precision: str) -> None:
        self.precision = precision

    def translate(self, texts: list[str], *, num_beams: int) -> list[str]:
        assert texts == ["a dog", "two men"]
        return [RIGHT[0], "zwei Hunde"] if (self.precision, num_beams) == ("int8", 4) else RIGHT


def test_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def opened(run: str, *, device: str, precision: str) -> Fake:
        assert (run, device) == ("RUN", "cpu")
        return Fake(precision)

    monkeypatch.setattr("benchmarks.precisions.Translator.from_pretrained", opened)
    (tmp_path / "en").write_text("a dog\ntwo men\n", encoding="utf-8")
    (tmp_path / "de").write_text("\n".join(RIGHT) + "\n", encoding="utf-8")
    out = tmp_path / "rows.jsonl"
    assert precisions.main(["RUN", str(tmp_path / "en"), str(tmp_path / "de"), "--out", str(out)]) == 0
    rows: list[dict[str, Any]] = [json.loads(line) for line in out.read_text().splitlines()]
    for row in rows:
        record.check(row)
    found = {(row["precision"], row["shape"]["num_beams"]): row for row in rows}
    assert found.keys() == {(precision, beams) for precision in ("fp32", "bf16", "int8", "int4") for beams in (1, 4)}
    for case, row in found.items():
        assert row["same_tokens"] == (1 if case == ("int8", 4) else 2)
        assert (row["sacrebleu_test2016"] < 99) == (row["chrf_test2016"] < 99) == (case == ("int8", 4))
    assert "1 of 2 lines as in fp32" in capsys.readouterr().out
