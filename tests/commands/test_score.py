"""`fastformer score`: translations against references, and by what a model says of them."""

from __future__ import annotations

import pytest

from fastformer.cli import main
from fastformer.training.evaluate import corpus_scores

REFERENCE = ["ein Mann geht nach Hause", "zwei Hunde", "", "ja", "eine Frau liest ein Buch im Park"]
BETTER = ["ein Mann geht nach Hause", "", "", "ja", "eine Frau liest ein Buch am Park"]
WORSE = ["der Mann läuft heim", "zwei Katzen", "x", "", "eine Frau liest das Buch im Wald"]


def write(path, lines) -> str:
    path.write_bytes("\r\n".join(lines).encode())  # the last line without an end, and it may be empty
    return str(path)


@pytest.fixture
def files(tmp_path) -> dict[str, str]:
    texts = {"better": BETTER, "worse": WORSE, "reference": REFERENCE, "a,b": REFERENCE[::-1]}
    return {name: write(tmp_path / name, lines) for name, lines in texts.items()}


def test_hypotheses_against_references(files, capsys) -> None:
    given = ["score", "--hypotheses", files["better"], "--reference"]
    assert main([*given, files["reference"]]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    due = corpus_scores(BETTER, REFERENCE)
    assert rows == [[name, f"{score:.2f}", signature] for name, (score, signature) in due.items()]
    assert main([*given, f"{files['reference']},{files['worse']}", "--ter", "--bleu_tokenize", "char"]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    due = corpus_scores(BETTER, REFERENCE, WORSE, bleu_tokenize="char", ter=True)
    assert rows == [[name, f"{score:.2f}", signature] for name, (score, signature) in due.items()]
    assert main([*given, files["a,b"]]) == 0  # a comma in a name
    assert capsys.readouterr().out.split()[1] == f"{corpus_scores(BETTER, REFERENCE[::-1])['BLEU'][0]:.2f}"


def test_two_systems_are_compared(files, capsys) -> None:
    given = ["score", "--hypotheses", files["better"], "--reference", files["reference"], "--baseline"]
    found = []
    for other in ("worse", "better"):
        assert main([*given, files[other]]) == 0
        found.append([line.split() for line in capsys.readouterr().out.splitlines()])
    (bleu, chrf), (same, _) = found
    assert [bleu[0], chrf[0]] == ["BLEU", "chrF"] and float(bleu[1]) > float(bleu[3])
    assert bleu[1] == f"{corpus_scores(BETTER, REFERENCE)['BLEU'][0]:.2f}"
    assert bleu[3] == f"{corpus_scores(WORSE, REFERENCE)['BLEU'][0]:.2f}"
    assert 0 < float(chrf[6]) < 0.2 and float(same[6]) == 1 and same[1] == same[3]


def test_what_does_not_fit_is_named(files, tmp_path, capsys) -> None:
    short, odd = write(tmp_path / "short", BETTER[:2]), tmp_path / "odd"
    odd.write_bytes(b"good\n\xffbad\n")
    empty = tmp_path / "empty"
    empty.touch()
    for arguments, expected in (
        (["--hypotheses", short, "--reference", files["reference"]], "as many lines"),
        (["--hypotheses", files["better"], "--reference", files["better"], "--baseline", short], "as many lines"),
        (["--hypotheses", files["better"]], "--reference"),
        (["--reference", files["better"]], "--hypotheses"),
        (["--hypotheses", str(odd), "--reference", files["reference"]], "line 2: expected UTF-8"),
        (["--hypotheses", str(empty), "--reference", files["reference"]], "empty"),
        (["--hypotheses", files["better"], "--reference", str(tmp_path / "nowhere")], "there is no file"),
        (["--hypotheses", files["better"], "--reference", f"{files['better']},"], "commas"),
    ):
        assert main(["score", *arguments]) == 1
        out, err = capsys.readouterr()
        assert expected in err and not out
