"""A column of a table is read like a file of lines; a table without a column is refused."""

from __future__ import annotations

import gzip
import json
import logging

import pytest

from fastformer.data.tables import column_of
from fastformer.data.text import read_documents, read_lines, read_pairs, read_text, read_tsv

ROWS = [
    {"id": 1, "en": "one", "de": "eins", "translation": {"en": "one!", "de": "eins!"}, "a.b": "x"},
    {
        "id": 2,
        "en": 'a "quoted", two;\tthree',
        "de": "zwei\nZeilen",
        "translation": {"en": "2", "de": "zwei!"},
        "a.b": "y",
    },
]
EN, DE = [row["en"] for row in ROWS], [row["de"] for row in ROWS]


@pytest.fixture
def jsonl(tmp_path):
    file = tmp_path / "p.jsonl"
    file.write_text("\ufeff" + "\n".join(json.dumps(row) for row in ROWS) + "\n\n", encoding="utf-8")
    return file


def test_json_lines(jsonl, tmp_path) -> None:
    assert read_pairs(f"{jsonl}:en", f"{jsonl}:de") == list(zip(EN, DE, strict=True))
    assert read_lines(f"{jsonl}:translation.de") == ["eins!", "zwei!"] and read_lines(f"{jsonl}:a.b") == ["x", "y"]
    packed = tmp_path / "p.jsonl.gz"
    packed.write_bytes(gzip.compress(jsonl.read_bytes()))
    assert read_lines(f"{packed}:de") == DE
    whole = tmp_path / "p.json"
    whole.write_text(json.dumps(ROWS, indent=1))
    assert read_lines(f"{whole}:en") == EN
    assert read_documents(f"{jsonl}:de") == DE
    (tmp_path / "p.jsonl:en").write_text("a file of this name\n")
    assert read_lines(f"{jsonl}:en") == ["a file of this name"]


def test_rows_without_text_are_named_or_skipped(tmp_path, caplog) -> None:
    file = tmp_path / "p.jsonl"
    rows = ['{"en": "one", "de": "eins"}', '{"en": "two"}', '{"en": null, "de": "x"}', '{"en": 4, "de": "x"}']
    rows += ["{oops", '{"en": "\\ud800", "de": "x"}', '{"en": " ", "de": "x"}', "[1]"]
    rows += ['{"en": "last", "de": "letzte"}']
    file.write_text("\n".join(rows))
    with pytest.raises(ValueError, match=r"\bline 2\b.*\bcolumn de\b.*\b7 of 9\b"):
        read_pairs(f"{file}:en", f"{file}:de")
    with caplog.at_level(logging.WARNING):
        assert read_pairs(f"{file}:en", f"{file}:de", skip_bad=True) == [("one", "eins"), ("last", "letzte")]
    assert "skipped 7 of 9 lines" in caplog.text and "1 not JSON (line 5)" in caplog.text
    with pytest.raises(ValueError, match=r"\bcolumn fr\b.*p\.jsonl.*\ben, de\b"):
        read_lines(f"{file}:fr")
    with pytest.raises(ValueError, match=r"q\.jsonl"):
        read_lines(tmp_path / "q.jsonl:fr")


def test_csv_and_tsv(tmp_path) -> None:
    file = tmp_path / "p.csv"
    for delimiter in (",", ";"):
        quoted = [f'"{text}"' for text in ("a, b; c", 'say ""no""', "two\nlines")]
        text = delimiter.join(["en", "de"]) + "\r\n" + "".join(f"{value}{delimiter}x\r\n" for value in quoted)
        file.write_bytes(text.encode("utf-8-sig"))
        assert read_lines(f"{file}:en") == ["a, b; c", 'say "no"', "two\nlines"]
        assert read_lines(f"{file}:2") == ["de", "x", "x", "x"]
    file.write_bytes(b'en,de\n"open,x\n')
    with pytest.raises(ValueError, match=r"\bCSV\b"):
        read_lines(f"{file}:en")
    tatoeba = tmp_path / "deu.tsv"
    tatoeba.write_bytes(b'Go.\tGeh."\tCC-BY 2.0\nHi.\t"Hallo!\tCC\n')
    assert read_pairs(f"{tatoeba}:1", f"{tatoeba}:2") == [("Go.", 'Geh."'), ("Hi.", '"Hallo!')]
    with pytest.raises(ValueError, match=r"\b3 fields\b.*\.tsv:1"):
        read_tsv(tatoeba)
    with pytest.raises(ValueError, match=r"\bcolumn 4\b"):
        read_lines(f"{tatoeba}:4")
    tatoeba.write_bytes(b"a\tb\nc\n\xff\td\n")
    with pytest.raises(ValueError, match=r"deu.tsv:2, line 2: .*column 2"):
        read_lines(f"{tatoeba}:2")
    with pytest.raises(ValueError, match=r"deu.tsv:1, line 3\b.*\bUTF-8\b"):
        read_lines(f"{tatoeba}:1")


def test_a_table_without_a_column_is_refused(jsonl, tmp_path, caplog) -> None:
    csv = tmp_path / "p.CSV"
    csv.write_text("en,de\none,eins\n")
    for read in (read_lines, read_text, read_documents, read_tsv):
        with pytest.raises(ValueError, match=r"p\.jsonl:id.*p\.jsonl:en"):
            read(jsonl)
        with pytest.raises(ValueError, match=r"p\.CSV:en"):
            read(csv)
    other = tmp_path / "p.txt"
    other.write_bytes(jsonl.read_bytes())
    with caplog.at_level(logging.WARNING):
        read_text(other)
    assert "JSON object" in caplog.text


def test_parquet(tmp_path) -> None:
    pyarrow = pytest.importorskip("pyarrow", reason="Parquet is read by pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    file = tmp_path / "p.parquet"
    parquet.write_table(pyarrow.Table.from_pylist([*ROWS, ROWS[0] | {"en": None}]), file)
    assert read_lines(f"{file}:de") == [*DE, DE[0]]
    assert read_lines(f"{file}:translation.en") == ["one!", "2", "one!"]
    assert read_lines(f"{file}:a.b") == ["x", "y", "x"]
    with pytest.raises(ValueError, match=r"\bline 3\b.*\bcolumn en\b"):
        read_lines(f"{file}:en")
    with pytest.raises(ValueError, match=r"\bid, en, de, translation\b"):
        read_lines(f"{file}:fr")
    with pytest.raises(ValueError, match=r"a column of|one of its columns"):
        read_lines(file)
    file.write_bytes(file.read_bytes()[:-30])
    with pytest.raises(ValueError, match="damaged"):
        read_lines(f"{file}:en")


def test_parquet_without_its_library(tmp_path, monkeypatch) -> None:
    (tmp_path / "p.parquet").write_bytes(b"PAR1")
    monkeypatch.setitem(__import__("sys").modules, "pyarrow.parquet", None)
    with pytest.raises(ImportError, match=r"fastformer\[parquet\]"):
        read_lines(tmp_path / "p.parquet:en")


@pytest.mark.parametrize(
    ("path", "found"),
    [
        ("a.jsonl:en", ("a.jsonl", "en")),
        ("x:y/a.csv.zst:2", ("x:y/a.csv.zst", "2")),
        ("a.txt:en", None),
        ("a.jsonl", None),
        ("a.jsonl:", None),
        ("C:\\a.txt", None),
        ("/dev/fd/63", None),
    ],
)
def test_paths_that_name_a_column(path, found) -> None:
    assert column_of(path) == found
