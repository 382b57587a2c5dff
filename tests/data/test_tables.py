"""A column of a table is read like a file of lines; a table without a column is refused."""

from __future__ import annotations

import csv
import gzip
import io
import json
import logging
import random

import pytest

from fastformer.commands._lines import all_lines, file_lines
from fastformer.data.streams import stream_pairs
from fastformer.data.tables import column_of, paths_of
from fastformer.data.text import read_documents, read_lines, read_pairs, read_rows, read_text, read_tsv

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
    twice = pyarrow.Table.from_arrays([pyarrow.array(["a"]), pyarrow.array(["b"])], names=["en", "en"])
    parquet.write_table(twice, tmp_path / "twice.parquet")
    with pytest.raises(ValueError, match=r"\bcolumn en\b.*twice"):
        read_lines(tmp_path / "twice.parquet:en")
    file.write_bytes(file.read_bytes()[:-30])
    with pytest.raises(ValueError, match="damaged"):
        read_lines(f"{file}:en")


def test_parquet_without_its_library(tmp_path, monkeypatch) -> None:
    (tmp_path / "p.parquet").write_bytes(b"PAR1")
    monkeypatch.setitem(__import__("sys").modules, "pyarrow.parquet", None)
    with pytest.raises(ImportError, match=r"fastformer\[parquet\]"):
        read_lines(tmp_path / "p.parquet:en")


PIECES = ["one", "a b", "", "x, y", "k;l", "a\tb", 'say "no"', "1", "zwei\nZeilen", " ", "ü"]


@pytest.mark.parametrize("seed", range(40))
def test_a_csv_has_the_fields_of_the_csv_module(tmp_path, seed) -> None:
    draw = random.Random(seed)
    delimiter, end, width = draw.choice(",;\t"), draw.choice(["\n", "\r\n"]), draw.randint(1, 4)
    names = ["a", "b;c" if width > 2 else "b", "c,d" if delimiter != ";" else "c", "e f"][:width]
    text = io.StringIO(newline="")
    writer = csv.writer(text, delimiter=delimiter, lineterminator=end)
    rows = [[draw.choice(PIECES) for _ in names] for _ in range(draw.randint(1, 6))]
    writer.writerows([names, *rows])
    begin = f"sep={delimiter}{end}" if draw.random() < 0.3 else ""
    file = tmp_path / "t.csv"
    file.write_bytes((begin + text.getvalue()).encode(draw.choice(["utf-8", "utf-8-sig"])))
    for place, name in enumerate(names):
        expected = [row[place] for row in csv.reader(io.StringIO(text.getvalue(), newline=""), delimiter=delimiter)]
        assert expected[1:] == [row[place] for row in rows]
        if width == 1 and delimiter != "," and not begin:
            continue  # a single name shows no delimiter
        assert read_rows(f"{file}:{name}", allow_empty=True) == expected[1:]
        assert read_rows(f"{file}:{place + 1}", allow_empty=True) == expected


@pytest.mark.parametrize("kind", ["csv", "tsv"])
@pytest.mark.parametrize("names", [("en", "de"), ("2", "3")])
def test_rows_with_more_fields_than_the_first_are_bad(tmp_path, caplog, kind, names) -> None:
    file = tmp_path / f"p.{kind}"
    lines = ["id,en,de", "1,Hello, my friend,Hallo mein Freund", "2,good,gut", "3,a,b,,", "4,red,rot,colour"]
    file.write_text("\n".join(lines).replace(",", "," if kind == "csv" else "\t"))
    sides = [f"{file}:{name}" for name in names]
    with pytest.raises(ValueError, match=r"\bline 2\b.*\b3 fields\b.*\bgot 4\b.*\b2 of \d\b.*\b5 \("):
        read_pairs(*sides)
    good = [*([("en", "de")] if names[0] == "2" else []), ("good", "gut"), ("a", "b")]
    assert read_pairs(*sides, skip_bad=True) == good
    streamed = [pair for block in stream_pairs(*sides) for pair in block.pairs(skip_bad=True)[0]]
    assert streamed == good
    with pytest.raises(ValueError, match=r"\bline 2\b"):
        read_documents(sides[0])


def test_blank_rows_keep_their_places(tmp_path, caplog) -> None:
    """A file with a cell a line is refused as the plain file with the same lines is."""
    sides = {"e": "one\n\nthree\nfour\n", "d": "eins\nzwei\n\nvier\n"}
    for kind, head in (("txt", None), ("csv", "text"), ("csv", "1"), ("tsv", "text"), ("tsv", "1")):
        files = [tmp_path / f"{name}.{kind}" for name in sides]
        for file, text in zip(files, sides.values(), strict=True):
            file.write_text(text if head in (None, "1") else f"{head}\n{text}")
        paths = [f"{file}:{head}" if head else file for file in files]
        first = 1 + (head == "text")
        with pytest.raises(ValueError, match=rf"\be\.{kind}.*\bline {1 + first}\b.*\b2 of 4\b.*\b{2 + first} \(empty"):
            read_pairs(*paths)
        assert read_pairs(*paths, skip_bad=True) == [("one", "eins"), ("four", "vier")]
        assert list(file_lines(str(paths[0])))[1] in ("", b"") and len(all_lines(str(paths[1]))) == 4
    lines = [json.dumps({"en": text, "de": text}) for text in ("one", "two")]
    (tmp_path / "p.jsonl").write_text(f"{lines[0]}\n\n{lines[1]}\n\n")
    with pytest.raises(ValueError, match=r"\bline 2\b"):
        read_lines(tmp_path / "p.jsonl:en")
    assert all_lines(f"{tmp_path}/p.jsonl:en") == ["one", "", "two"]
    for kind in ("csv", "tsv"):  # a blank line behind several columns is no row
        rows = "en,de\n1 a,b\n\n2 a,b\n\n\n".replace(",", "," if kind == "csv" else "\t")
        (tmp_path / f"p.{kind}").write_text(rows)
        for column, texts in (("en", ["1 a", "", "2 a"]), ("de", ["b", "", "b"])):
            assert all_lines(f"{tmp_path}/p.{kind}:{column}") == texts


def test_a_column_that_may_be_two_is_refused(tmp_path) -> None:
    file = tmp_path / "p.csv"
    for head, column, expected in (
        ("id,text,text", "text", None),
        ("id,text,text", "id", ["1"]),
        ("2,Go.,Geh.", "2", None),  # the number of the second column, or a name
        ("id,1,2", "2", None),
        ("0,1,2", "1", ["x"]),  # names of columns that had none
        ("0,1,2", "3", ["2", "y"]),
        ('"a;b;c",de', "de", ["x"]),
    ):
        file.write_text(f"{head}\n1,x,y\n" if head.count(",") == 2 else f"{head}\n1,x\n")
        if expected is None:
            with pytest.raises(ValueError, match=rf"\bcolumn\b.*\b{column}\b"):
                read_lines(f"{file}:{column}")
        else:
            assert read_lines(f"{file}:{column}") == expected


def test_the_text_of_a_column_keeps_its_ends(tmp_path) -> None:
    rows = ["\ufeffa\r", "b\r\n", "\n", "c "]
    (tmp_path / "p.jsonl").write_text("\n".join(json.dumps({"a": row}) for row in rows))
    assert all_lines(f"{tmp_path}/p.jsonl:a") == rows == read_rows(f"{tmp_path}/p.jsonl:a", allow_empty=True)


@pytest.mark.parametrize("indent", [None, 1, 4])
def test_whole_json_values(tmp_path, indent) -> None:
    file = tmp_path / "p.json"
    for rows in (ROWS[:1], ROWS):
        shown = [json.dumps(row, indent=indent) for row in rows]
        for text in (json.dumps(rows, indent=indent), "\n".join(shown), "\n\n".join(shown) + "\n"):
            file.write_text("\ufeff" + text)
            if indent is None and "\n\n" in text:
                continue  # JSON lines with a blank one
            assert read_lines(f"{file}:translation.de") == [row["translation"]["de"] for row in rows]
            with pytest.raises(ValueError, match=r"\bcolumn fr\b.*\bde\b"):
                read_lines(f"{file}:fr")
    for text in ('{"en": ["one", "two"]}', '{\n"en": "one"', "[" * 9999, '{"data": [{"en": "one"}]}'):
        file.write_text(text)
        with pytest.raises(ValueError, match=r"p\.json"):
            read_lines(f"{file}:en")
    file.write_text('{"en": "one}\n{"en": "two"}\n')  # JSON lines, the first of which is bad
    assert read_documents(f"{file}:en", skip_bad=True) == ["two"]


def test_a_lone_surrogate_in_a_json_value_is_named(tmp_path) -> None:
    path = tmp_path / "one.json"
    path.write_bytes(b'{"en": "\xed\xa0\x80",\n"de": "eins"}\n')
    with pytest.raises(ValueError, match=r"one\.json is not valid JSON"):
        read_lines(f"{path}:de")


def test_commas_in_the_names_of_folders(tmp_path) -> None:
    folder = tmp_path / "a,b"
    folder.mkdir()
    (folder / "p.csv").write_text("en,de\none,eins\n")
    (folder / "x.txt").write_text("one\n")
    (tmp_path / "y.txt").write_text("one\n")
    table, text, other = f"{folder}/p.csv:en", f"{folder}/x.txt", f"{tmp_path}/y.txt"
    for paths in ([table], [text], [other], [table, f"{folder}/p.csv:de"], [other, table, text, other]):
        assert paths_of(",".join(paths)) == paths
    assert paths_of(f"{folder}/none.txt, {other}") == [f"{tmp_path}/a", "b/none.txt", other]
    assert paths_of(f"{folder}/p.csv:en,de") == [table, "de"]


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
