"""The benchmarks of preparing a corpus write valid rows, and make up the text that they describe."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

pytest.importorskip("pyarrow", reason="shards are files of Arrow")

from benchmarks import large_corpus, preparing
from benchmarks.measure.synthetic_text import write_pairs
from tests.benchmarks.running import checked_rows


def test_made_up_pairs(tmp_path: Path) -> None:
    path = write_pairs(tmp_path / "a.tsv", 500, seed=1, shortest=2, longest=5)
    pairs = [line.split("\t") for line in path.read_text().splitlines()]
    assert len(pairs) == 500 and all(len(pair) == 2 for pair in pairs)
    assert {len(side.split()) for pair in pairs for side in pair} == {2, 3, 4, 5}
    counts = Counter(word for source, _ in pairs for word in source.split())
    assert counts.most_common(1)[0][1] > 50 and len(counts) > 300  # few words often, many rarely
    assert write_pairs(tmp_path / "b.tsv", 500, seed=1, shortest=2, longest=5).read_text() == path.read_text()
    assert write_pairs(tmp_path / "c.tsv", 500, seed=2, shortest=2, longest=5).read_text() != path.read_text()


def test_lines(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "rows.jsonl"
    assert preparing.main(["--pairs", "300", "--processes", "1", "--rounds", "1", "--out", str(out)]) == 0
    alone, whole, clock = checked_rows(out)
    assert 0 < alone["ms_p50"] < whole["ms_p50"] and 0 < whole["speedup"] < 1
    assert clock["shape"]["processes"] == 1 and clock["speedup"] == 1.0
    assert "of which tokenizers are" in capsys.readouterr().out


@pytest.mark.slow  # 20 s: both commands of the benchmark run, and the system says what they took
def test_the_memory_of_a_small_corpus(tmp_path: Path) -> None:
    out = tmp_path / "rows.jsonl"
    words = ["--pairs", "20000", "--steps", "2", "--shards", "6", "--folder", str(tmp_path), "--out", str(out)]
    assert large_corpus.main(words) == 0
    assert all(100 < row["peak_mib"] < 1000 for row in checked_rows(out))
    assert [path.name for path in tmp_path.iterdir()] == ["rows.jsonl"]
