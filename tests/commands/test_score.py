"""Tests `fastformer score`, against references and by a model's log-probabilities."""

from __future__ import annotations

import itertools
import json
import math
import re

import pytest
import torch

from fastformer.checkpoints import load_model
from fastformer.cli import main
from fastformer.data import ByteTokenizer
from fastformer.data.examples import windows
from fastformer.generation import Ensemble, Translator, score
from fastformer.models import GPT
from fastformer.training.evaluate import corpus_scores
from tests.generation.small import tiny
from tests.training.tiny import nll_of

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


def test_hypotheses_against_references(files, capsys, ran) -> None:
    given = ["score", "--hypotheses", files["better"], "--reference"]
    rows = [line.split() for line in ran(*given, files["reference"]).out.splitlines()]
    due = corpus_scores(BETTER, REFERENCE)
    assert rows == [[name, f"{score:.2f}", signature] for name, (score, signature) in due.items()]
    assert main([*given, f"{files['reference']},{files['worse']}", "--ter", "--bleu_tokenize", "char"]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    due = corpus_scores(BETTER, REFERENCE, WORSE, bleu_tokenize="char", ter=True)
    assert rows == [[name, f"{score:.2f}", signature] for name, (score, signature) in due.items()]
    assert main([*given, files["a,b"]]) == 0  # a comma in a name
    assert capsys.readouterr().out.split()[1] == f"{corpus_scores(BETTER, REFERENCE[::-1])['BLEU'][0]:.2f}"


def test_a_second_flag_of_references_does_not_replace_the_first(files, ran) -> None:
    given = ["score", "--hypotheses", files["better"], "--reference", files["reference"]]
    told = ran(*given, "--reference", files["worse"], code=2).err
    assert files["reference"] in told and files["worse"] in told and "comma" in told
    assert main([*given, "--reference", files["reference"]]) == 0  # of a script that says the same again


def test_two_systems_are_compared(files, ran) -> None:
    given = ["score", "--hypotheses", files["better"], "--reference", files["reference"], "--baseline"]
    found = []
    for other in ("worse", "better"):
        found.append([line.split() for line in ran(*given, files[other]).out.splitlines()])
    (bleu, chrf), (same, _) = found
    assert [bleu[0], chrf[0]] == ["BLEU", "chrF"] and float(bleu[1]) > float(bleu[3])
    assert bleu[1] == f"{corpus_scores(BETTER, REFERENCE)['BLEU'][0]:.2f}"
    assert bleu[3] == f"{corpus_scores(WORSE, REFERENCE)['BLEU'][0]:.2f}"
    assert "bs:1000|" in chrf[-1] and 0 < float(chrf[6]) < 0.2 and float(same[6]) == 1 and same[1] == same[3]
    rows = [line.split() for line in ran(*given, files["worse"], "--ter", "--bleu_tokenize", "char").out.splitlines()]
    for hypotheses, column in ((BETTER, 1), (WORSE, 3)):
        due = corpus_scores(hypotheses, REFERENCE, bleu_tokenize="char", ter=True)
        assert [(row[0], row[column]) for row in rows] == [(name, f"{value:.2f}") for name, (value, _) in due.items()]


def test_tensors_of_wrong_sizes_are_named(files, tmp_path, ran) -> None:
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
        out, err = ran("score", *arguments, code=1)
        assert expected in err and not out


@pytest.fixture(scope="module")
def translator(tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp("score") / "run"
    tiny(max_len=40).save_pretrained(folder, ByteTokenizer())
    return str(folder)


@pytest.fixture(scope="module")
def language_model(tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp("score") / "gpt"
    tiny(GPT, max_len=16).save_pretrained(folder, ByteTokenizer())
    return str(folder)


def rows_of(out: str) -> list[list[float]]:
    return [[float(value) for value in line.split("\t")] for line in out.removesuffix("\n").split("\n")]


def test_the_log_probabilities_of_translations(translator, tmp_path, ran) -> None:
    sources, targets = ["one", "", "two words", "three"], ["eins", "", "", "drei" * 3]
    given = ["score", translator, "--file", write(tmp_path / "s", sources), "--target", write(tmp_path / "t", targets)]
    out, err = ran(*given)
    due = Translator.from_pretrained(translator).score(sources, targets)
    for row, one in zip(rows_of(out), due, strict=True):
        assert row == pytest.approx([one.score, one.per_token, one.perplexity], abs=1e-5, nan_ok=True)
    count = sum(len(one.tokens) for one in due)
    total = sum(one.score for one in due)
    assert count == 5 + 1 + 13
    assert f"3 texts of {count} tokens: log-probability {total:.2f}, {total / count:.4f} a token" in err
    assert f"perplexity {math.exp(-total / count):.4f}" in err
    lines = ran(*given, "--token_scores", "--precision", "bf16").out.splitlines()
    pairs = json.loads(lines[0].split("\t")[3])
    assert [token for token, _ in pairs] == ["e", "i", "n", "s", "</s>"]
    assert sum(value for _, value in pairs) == pytest.approx(float(lines[0].split("\t")[0]), abs=1e-4)
    assert sum(value for _, value in pairs) == pytest.approx(due[0].score, abs=0.5)
    assert sum(value for _, value in pairs) != pytest.approx(due[0].score, abs=1e-5)


def test_bad_pairs_stop_or_are_skipped_in_place(translator, tmp_path, ran, caplog) -> None:
    source, target = tmp_path / "s", tmp_path / "t"
    source.write_bytes(b"one\n\xff\nthree\n" + b"x" * 50 + b"\nfive\n\n")
    target.write_bytes(b"1\n2\n\xff\n4\n5\n6\n")
    given = ["score", translator, "--file", str(source), "--target", str(target)]
    assert f"{source}, line 2: expected UTF-8" in ran(*given, code=1).err
    found = rows_of(ran(*given, "--on_error", "skip").out)
    assert [row[0] == -math.inf for row in found] == [False, True, True, True, False, True]
    assert [record.message for record in caplog.records][-1].startswith("skipped 4 of 6 texts")
    write(target, ["1"])
    assert f"as many lines in {target} as in {source}, 6, got 1" in ran(*given, code=1).err


def test_the_perplexity_of_a_text_is_that_of_a_validation(language_model, tmp_path, capsys, ran) -> None:
    text = "a text of several windows,\nand a second line\n"
    file = tmp_path / "text"
    file.write_bytes(text.replace("\n", "\r\n").encode())
    model, tokenizer = load_model(language_model, ("GPT",))
    examples = windows([*tokenizer.encode(text), 1], 16)
    nll = nll_of(model, examples, packed=True)
    out, err = ran("score", language_model, "--file", str(file), "--context", "1")
    ((total, mean, perplexity),) = rows_of(out)
    assert total == pytest.approx(-nll * len(text), rel=1e-5)  # a token a byte, EOS, and nothing for the first
    assert (mean, perplexity) == pytest.approx((-nll, math.exp(nll)), rel=1e-5)
    assert f"{total / len(text):.4f} a character" in err and "scored 1 text of" in err
    other = rows_of(ran("score", language_model, "--file", str(file)).out)[0]
    assert other != pytest.approx([total, mean, perplexity], rel=1e-6)
    tiny(GPT, max_len=16, seed=1).save_pretrained(tmp_path / "second", ByteTokenizer())
    second, _ = load_model(tmp_path / "second", ("GPT",))
    file.write_bytes(b"a text\n\xff\n")
    assert "UTF-8" in ran("score", language_model, "--file", str(file), code=1).err
    both = ["score", f"{language_model},{tmp_path / 'second'}", "--file", str(file), "--on_error", "skip"]
    row = [*tokenizer.encode("a text\n"), 1]
    due = math.fsum(score(Ensemble([model, second]), [row])[0])
    assert rows_of(ran(*both).out)[0][0] == pytest.approx(due, rel=1e-5)


def test_each_line_of_a_text_is_read_by_itself(language_model, tmp_path, ran, caplog) -> None:
    file = tmp_path / "text"
    file.write_bytes(b"\xff\n")
    assert "no text" in ran("score", language_model, "--file", str(file), "--by_line", "--on_error", "skip").err
    caplog.clear()
    file.write_bytes(b"one\n\nx\nmore than sixteen bytes\n\xff\none\n")
    given = ["score", language_model, "--file", str(file), "--by_line"]
    assert "line 5: expected UTF-8" in ran(*given, code=1).err
    out, err = ran(*given, "--on_error", "skip")
    found = rows_of(out)
    scored = [(row[0], length) for row, length in zip(found, (3, 0, 1, 23, 0, 3), strict=True) if length > 1]
    total, characters = (sum(column) for column in zip(*scored, strict=True))
    assert f"{total / characters:.4f} a character" in err
    model, tokenizer = load_model(language_model, ("GPT",))
    due = score(model, [tokenizer.encode("one"), tokenizer.encode("more than sixteen bytes")])
    assert [found[0][0], found[3][0]] == pytest.approx([sum(row) for row in due], abs=1e-5)
    assert found[5] == found[0] and found[1][0] == found[2][0] == 0 and math.isnan(found[1][2])
    assert found[4] == [-math.inf, -math.inf, math.inf] and "skipped 1 of 6" in caplog.text


def test_more_lines_than_are_scored_at_a_time(language_model, tmp_path, ran) -> None:
    """Every line keeps its own score, tokens and characters, however many lines are scored together."""
    file, given = tmp_path / "text", ["score", language_model, "--by_line", "--on_error", "skip", "--token_scores"]
    lines = [b"to", *[b""] * 4095, b"be\xff", b"", b"or not", b"to"]
    file.write_bytes(b"\n".join(lines))
    out, err = ran(*given, "--file", str(file))
    rows = [line.split("\t") for line in out.splitlines()]
    assert len(rows) == len(lines) and float(rows[-1][0]) == pytest.approx(float(rows[0][0]), rel=1e-5)
    assert rows[4096][:3] == ["-inf", "-inf", "inf"] and "-inf" not in (rows[0][0], rows[4097][0])
    file.write_bytes(b"or not\nto\nto\n")
    few, said = ran(*given, "--file", str(file))
    assert [token for token, _ in json.loads(few.splitlines()[0].split("\t")[3])] == [*"r not"]  # the first is given
    for line, row in zip(few.splitlines()[:2], rows[-2:], strict=True):
        (score, *_, tokens), (other, *_, others) = line.split("\t"), row
        assert float(score) == pytest.approx(float(other), rel=1e-5)
        assert [token for token, _ in json.loads(tokens)] == [token for token, _ in json.loads(others)]
    numbers = [[float(word) for word in re.findall(r"-?\d+\.\d+|\d+", said)] for said in (err, said)]
    assert numbers[0] == pytest.approx(numbers[1], rel=1e-3)  # texts, tokens, and the scores of a token and a character


def test_a_folder_of_transformers_is_scored_as_transformers_does(tmp_path, ran) -> None:
    transformers = pytest.importorskip("transformers", reason="the folder is written by transformers")
    from tests.checkpoints.decoders import TEXTS, llama3

    llama3(tmp_path / "run")
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "run", dtype=torch.float64)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "run")
    given = ["score", str(tmp_path / "run"), "--file", write(tmp_path / "texts", TEXTS), "--by_line"]
    found = rows_of(ran(*given).out)
    for text, (total, *_) in zip(TEXTS, found, strict=True):
        ids = tokenizer(text, return_tensors="pt").input_ids
        with torch.inference_mode():
            logits = model(ids).logits[:, :-1].log_softmax(2)
        assert total == pytest.approx(float(logits.gather(2, ids[:, 1:, None]).sum()), rel=1e-4)
    file = write(tmp_path / "more", ["zwölf Vögel"])
    assert "\\" not in (out := ran("score", given[1], "--file", file, "--token_scores").out) and not out.isascii()
    assert "language model" in ran(*given, "--target", str(tmp_path / "texts"), code=1).err
    (tmp_path / "bert").mkdir()
    (tmp_path / "bert" / "config.json").write_text('{"model_type": "bert"}')
    assert "encoder" in ran("score", str(tmp_path / "bert"), *given[2:4], code=1).err


def test_flags_that_belong_to_another_purpose_are_named(translator, language_model, tmp_path, ran) -> None:
    file = write(tmp_path / "f", ["a"])
    for arguments, expected in (
        ([translator, "--file", file], "expected --target"),
        ([language_model, "--file", file, "--target", file], "expected no --target"),
        ([translator, "--file", file, "--target", file, "--by_line"], "only for a language model"),
        ([translator, "--file", file, "--target", file, "--context", "3"], "only for a language model"),
        ([translator, "--file", file, "--target", file, "--context", "0"], "only for a language model"),
        ([translator], "--file"),
        (["--file", file, "--target", file], "RUN"),
        ([translator, "--hypotheses", file, "--reference", file], "expected RUN and --file, or --hypotheses"),
        ([str(tmp_path), "--file", file, "--target", file], "which isn't there"),
        (
            [translator, "--file", file, "--target", file, "--baseline", file],
            "expected RUN and --file, or --hypotheses",
        ),
        (["--hypotheses", file], "expected --hypotheses together with --reference"),
        (["--reference", file, "--baseline", file], "expected --hypotheses together with --reference"),
        ([language_model, "--file", file, "--source_lang", "en"], "expected no --source_lang"),
        ([language_model, "--file", file, "--target_lang", "en"], "expected no --source_lang"),
        ([language_model, "--file", file, "--context", "17"], "context from 1 to the model's max_len 16"),
        ([translator, "--file", file, "--target", file, "--max_tokens", "0"], "max_tokens"),
    ):
        assert expected in ran("score", *arguments, code=1).err
    scored = {"RUN": [translator], "--file": ["--file", file], "--target": ["--target", file]}
    compared = [["--hypotheses", file], ["--reference", file], ["--baseline", file]]
    for name, words in scored.items():
        for others in compared:
            assert "expected RUN and --file, or" in ran("score", *words, *others, code=1).err, name
        everything = [*words, *itertools.chain.from_iterable(compared)]
        assert "expected RUN and --file, or" in ran("score", *everything, code=1).err, name
