"""`fastformer translate` answers each line in order, without delay on a pipe, and refuses contradictory flags."""

from __future__ import annotations

import contextlib
import gzip
import io
import json
import os
import select
import sys
import threading
from functools import partial
from pathlib import Path

import pytest
import torch

from fastformer.cli import main
from fastformer.commands._lines import PipeLines
from fastformer.data import ByteTokenizer
from fastformer.generation import Translator
from tests.generation.small import tiny

FEW = ["--max_new_tokens", "6"]


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp("translate") / "run"
    model = tiny(max_len=40)
    model.embedding.weight.data[:3] = 0  # never EOS for long, so that lines say something
    model.save_pretrained(folder, ByteTokenizer())
    return str(folder)


@pytest.fixture
def expected(run):
    """Returns the library's translation of a text."""
    translator = Translator.from_pretrained(run)
    return lambda text, **options: translator.translate(text, max_new_tokens=6, **options)


def lines_of(text: str) -> list[str]:
    assert text.endswith("\n")
    return text.removesuffix("\n").split("\n")


def shown(text: str) -> str:
    return text.replace("\n", " ").replace("\r", " ")


def test_a_line_for_each_line(run, expected, tmp_path, ran, monkeypatch) -> None:
    texts = ["one", "", "two", "a longer line", "three"]
    file = tmp_path / "in.txt"
    file.write_bytes(b"\xef\xbb\xbf" + "\r\n".join(texts).encode())
    answers = [shown(expected(text)) if text else "" for text in texts]
    assert len(set(answers)) > 2
    assert lines_of(ran("translate", run, "--file", str(file), *FEW).out) == answers
    with open(file, "rb") as stream:
        for source in (io.BytesIO(file.read_bytes()), stream):
            monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(source))
            assert lines_of(ran("translate", run, *FEW).out) == answers
    assert lines_of(ran("translate", run, "two", *FEW).out) == [answers[2]]


def test_each_line_of_an_interactive_user_is_answered_at_once(run, expected, monkeypatch) -> None:
    reading, typing = os.pipe()
    screen, writing = os.pipe()
    with os.fdopen(reading, "rb") as source, os.fdopen(typing, "wb", buffering=0) as user:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(source))
        monkeypatch.setattr(sys, "stdout", os.fdopen(writing, "w"))
        codes: list[int] = []
        thread = threading.Thread(target=lambda: codes.append(main(["translate", run, *FEW])), daemon=True)
        thread.start()
        with os.fdopen(screen, "rb", buffering=0) as answers:
            for text in ("one", "two"):
                user.write(text.encode() + b"\n")
                assert select.select([answers], [], [], 100)[0]
                assert answers.readline().decode() == shown(expected(text)) + "\n"
        # The reader has gone away: the next line finds a closed pipe, and that is no error.
        user.write(b"three\n" * 3)
        thread.join(100)
        assert codes == [0]
        with contextlib.suppress(BrokenPipeError):
            sys.stdout.close()


def test_ctrl_c_prints_one_word_after_the_answers(run, expected, ran, monkeypatch) -> None:
    wait_for, waits = select.select, []

    def interrupted(readers, writers, others, timeout):
        waits.append(timeout)
        if waits.count(None) == 2:  # the first line is answered: the user thinks about the next
            raise KeyboardInterrupt
        return wait_for(readers, writers, others, timeout)

    reading, writing = os.pipe()
    with os.fdopen(reading, "rb") as stream, os.fdopen(writing, "wb", buffering=0) as sink:
        sink.write(b"one\n")
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(stream))
        monkeypatch.setattr(select, "select", interrupted)
        out, err = ran("translate", run, *FEW, code=130)
        assert out == shown(expected("one")) + "\n" and err == "interrupted\n"


def test_lines_are_answered_as_they_come() -> None:
    reading, writing = os.pipe()
    with os.fdopen(reading, "rb") as stream, os.fdopen(writing, "wb", buffering=0) as sink:
        lines = PipeLines(stream.fileno())
        assert lines.get(wait=False) is None
        sink.write(b"a\nb\nhalf")
        assert [lines.get(wait=False) for _ in range(3)] == [b"a", b"b", None]
        sink.write(b" of it\n\n")
        assert [lines.get(wait=True), lines.get(wait=True), lines.get(wait=False)] == [b"half of it", b"", None]

        def end() -> None:
            sink.write(b"the last has no end")
            sink.close()

        threading.Timer(0.05, end).start()
        assert lines.get(wait=True) == b"the last has no end"
        for wait in (True, False):
            with pytest.raises(EOFError):
                lines.get(wait)


def test_n_best_with_scores(run, expected, tmp_path, ran) -> None:
    (tmp_path / "in.txt").write_text("one\n\ntwo\n")
    best = ran("translate", run, "--file", str(tmp_path / "in.txt"), "--n_best", "2", "--num_beams", "3", *FEW).out
    rows = [line.split("\t") for line in lines_of(best)]
    assert [row[0] for row in rows] == ["1", "1", "2", "3", "3"] and rows[2] == ["2", "-inf", ""]
    for text, found in (("one", rows[:2]), ("two", rows[3:])):
        best = expected(text, num_beams=3, num_return_sequences=2, return_scores=True)
        assert [row[2] for row in found] == [shown(answer.text) for answer in best]
        assert [float(row[1]) for row in found] == pytest.approx([answer.score for answer in best], abs=1e-4)


def test_device_precision_and_memory(run, ran, calls_of) -> None:
    calls = calls_of(Translator, "from_pretrained")
    for flags in (["--device", "cpu", "--precision", "bf16"], ["--device", "auto", "--precision", "fp32"]):
        ran("translate", run, "one", *flags, *FEW, "--max_batch_size", "77", "--max_batch_bytes", "1234567")
    loaded = [call.result for call in calls]
    assert [(t.max_batch_size, t.max_batch_bytes) for t in loaded] == 2 * [(77, 1234567)]
    assert [next(t.model.parameters()).dtype for t in loaded] == [torch.bfloat16, torch.float32]
    for device in ("cuda:77", "meta", "toaster"):
        error = ran("translate", run, "one", "--device", device, code=1).err
        assert f"expected a device that this PyTorch can use, got '{device}'" in error


def test_scores_of_a_file_with_empty_and_bad_lines(run, expected, tmp_path, ran, caplog) -> None:
    file, reference = tmp_path / "in.txt", tmp_path / "ref.txt"
    file.write_bytes(b"one\n\n" + b"x" * 60 + b"\ntwo\n")
    reference.write_bytes(f"{shown(expected('one'))}\n\n{'y' * 30_000}\n{shown(expected('two'))}\n".encode())
    arguments = ["translate", run, "--file", str(file), "--reference", str(reference), *FEW]
    error = ran(*arguments, code=1).err  # the third line is too long for the model
    assert "text 3" in error and "--skip_bad_lines" not in error
    out, err = ran(*arguments, "--on_error", "skip")
    assert lines_of(out) == [shown(expected("one")), "", "", shown(expected("two"))] and "BLEU" in err
    reference.write_bytes(reference.read_bytes().replace(b"y" * 30_000, b"no\xff"))
    err = ran(*arguments, "--skip_long", code=1).err
    assert "ref.txt, line 3: expected UTF-8" in err and "--on_error skip" in err
    assert "chrF 100.00" in ran(*arguments, "--on_error", "skip").err
    assert "omitted 1 of 4 lines from the scores" in caplog.text
    reference.write_bytes(b"\xff\n" * 4)
    assert "ref.txt, line 1: expected UTF-8" in ran(*arguments, "--on_error", "skip", code=1).err
    reference.write_text("one line\n")
    assert "expected as many lines in" in ran(*arguments, code=1).err


def test_scores_are_told_even_if_the_answers_are_lost(run, tmp_path, monkeypatch, capsys) -> None:
    class Full(io.StringIO):
        def write(self, text: str) -> int:
            raise OSError(28, "No space left on device")

    (file := tmp_path / "in.txt").write_text("one\ntwo\n")
    for more, has_scores in (([], False), (["--reference", str(file)], True)):
        monkeypatch.setattr(sys, "stdout", Full())
        assert main(["translate", run, "--file", str(file), *more, *FEW]) == 1
        error = capsys.readouterr().err
        assert "No space left" in error and ("BLEU" in error) == has_scores


def test_a_column_of_a_table_and_a_compressed_file(run, expected, tmp_path, ran, monkeypatch) -> None:
    rows, file = [{"en": "one", "de": "x"}, {"en": "two\nlines", "de": "y"}, {"de": "z"}], tmp_path / "in.jsonl.gz"
    file.write_bytes(gzip.compress("\n".join(map(json.dumps, rows)).encode()))
    arguments = ["translate", run, "--file", f"{file}:en", *FEW]
    assert "line 3: expected a column en" in ran(*arguments, code=1).err
    out, err = ran(*arguments, "--on_error", "skip", "--reference", f"{file}:de")
    assert lines_of(out) == [shown(expected("one")), shown(expected("two\nlines")), ""] and "chrF" in err
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(gzip.compress(b"one\n"))))
    assert lines_of(ran("translate", run, "--file", "-", *FEW).out) == [shown(expected("one"))]


def test_a_bad_line_is_named_or_skipped(run, expected, tmp_path, ran, caplog) -> None:
    file = tmp_path / "in.txt"
    file.write_bytes(b"one\n" + b"x" * 60 + b"\nno\xff\n\ntwo\n")
    arguments = ["translate", run, "--file", str(file), *FEW]
    out, err = ran(*arguments, code=1)  # what came before the first bad line is answered
    assert lines_of(out) == [shown(expected("one"))] and "text 2: expected at most 40 tokens, got 61" in err
    out, err = ran(*arguments, "--skip_long", code=1)
    assert lines_of(out) == [shown(expected("one")), ""]
    assert "in.txt, line 3: expected UTF-8, got byte 0xff at position 2" in err
    caplog.clear()
    out = ran(*arguments, "--on_error", "skip").out
    assert lines_of(out) == [shown(expected("one")), "", "", "", shown(expected("two"))]
    said = [record.getMessage() for record in caplog.records]
    assert any("line 3: expected UTF-8" in line for line in said)
    assert any("skipped text 2: expected at most 40 tokens, got 61" in line for line in said)
    assert said[-1] == "skipped 2 of 5 texts; their translations are empty"
    (tmp_path / "in.csv").write_text("en,de\none,eins\n")  # a table without a column
    assert "in.csv:en" in ran("translate", run, "--file", str(tmp_path / "in.csv"), code=1).err
    file.write_bytes(b"one\n" + b"x" * 60 + b"\n")
    assert "text 2: expected at most 40 tokens, got 61: split it into sentences" in ran(*arguments, code=1).err
    assert lines_of(ran(*arguments, "--skip_long").out) == [shown(expected("one")), ""]


def test_prefixes_of_translations(run, expected, tmp_path, ran) -> None:
    out = ran("translate", run, "one", "--prefix", "Ein", *FEW).out
    assert out == shown(expected("one", target_prefix="Ein")) + "\n"
    texts, prefixes = tmp_path / "in.txt", tmp_path / "prefixes.txt"
    texts.write_text("one\n\ntwo\n")
    prefixes.write_bytes(b"\xef\xbb\xbfE\r\nnone\n\n")
    flags = ["--file", str(texts), *FEW]
    answers = [shown(expected("one", target_prefix="E")), "", shown(expected("two"))]
    assert lines_of(ran("translate", run, *flags, "--prefix_file", str(prefixes)).out) == answers
    out = ran("translate", run, *flags, "--prefix", "E").out
    assert lines_of(out) == [answers[0], "", shown(expected("two", target_prefix="E"))]
    prefixes.write_text("E\n\n")
    error = ran("translate", run, *flags, "--prefix_file", str(prefixes), code=1).err
    assert "expected a target_prefix for each text, got 2 of target_prefix and more of texts" in error


def test_a_progress_bar_on_a_terminal(run, tmp_path, ran, monkeypatch) -> None:
    pytest.importorskip("tqdm", reason="the bar is tqdm's")

    (tmp_path / "in.txt").write_text("one\n\ntwo\n")
    arguments = ["translate", run, "--file", str(tmp_path / "in.txt"), *FEW]
    screen = io.StringIO()
    monkeypatch.setattr(screen, "isatty", lambda: True)
    monkeypatch.setattr(sys, "stderr", screen)
    assert len(lines_of(ran(*arguments).out)) == 3 and "3/3" in screen.getvalue()
    monkeypatch.setattr(sys, "stderr", quiet := io.StringIO())
    assert main(arguments) == 0
    assert quiet.getvalue() == ""


def test_paragraphs_are_translated_sentence_by_sentence(run, expected, tmp_path, ran) -> None:
    lines = ["One is. Two are!\tThree", "", "alone", "A much longer one that is no sentence. " * 2]
    (tmp_path / "in.txt").write_text("\n".join(lines) + "\n")
    answers = [shown(expected(line.rstrip(), split=True)) for line in lines]
    assert answers[0].count("\t") == 1 and answers[0].startswith(shown(expected("One is.")) + " ")
    found = lines_of(ran("translate", run, "--file", str(tmp_path / "in.txt"), "--split", *FEW).out)
    assert [line.rstrip(" ") for line in found] == [text.rstrip(" ") for text in answers]
    text = "One is. Two are!\n\n\tThree"
    assert ran("translate", run, text, "--split", *FEW).out == expected(text, split=True) + "\n"
    for flags, other in (
        (["--n_best", "2", "--num_beams", "2"], "--n_best 2"),
        (["--prefix", "a"], "--prefix"),
        (["--attention", "a.png"], "--attention"),
        (["--align"], "--align"),
    ):
        assert f"expected --split or {other}, got both" in ran("translate", run, "a", *flags, "--split", code=1).err


def test_attention_is_drawn(run, tmp_path, ran, expected) -> None:
    pytest.importorskip("matplotlib", reason="drawing needs matplotlib")
    assert ran("translate", run, "one", "--attention", str(tmp_path / "a.png"), *FEW).out == expected("one") + "\n"
    assert (tmp_path / "a.png").stat().st_size > 1000


def test_a_terminal_gets_no_control_characters(run, monkeypatch) -> None:
    said = "\x1b[31mred\x07\tend"
    monkeypatch.setattr("fastformer.generation.text_io.Answer.texts", lambda self: [said])
    for is_terminal in (True, False):
        screen = io.StringIO()
        monkeypatch.setattr(screen, "isatty", partial(bool, is_terminal))
        monkeypatch.setattr(sys, "stdout", screen)
        assert main(["translate", run, "a", *FEW]) == 0
        assert screen.getvalue() == ("\\x1b[31mred\\x07\tend\n" if is_terminal else said + "\n")
    monkeypatch.setattr(sys, "stdout", screen := io.StringIO())
    assert main(["translate", run, "a", "--align", *FEW]) == 0
    assert screen.getvalue().count("\t") == 1  # the one in front of the alignment


def test_contradictions(run, tmp_path, capsys) -> None:
    (tmp_path / "in.txt").write_text("one\n")
    (tmp_path / "empty").write_text("")
    file = ["--file", str(tmp_path / "in.txt")]
    for flags, words in (
        (["x", *file], ("text", "--file", "'x'")),
        (["x", "--reference", "y"], ("--file", "--reference")),
        ([*file, "--attention", "a.png"], ("text", "--attention")),
        ([*file, "--prefix", "y", "--prefix_file", "z"], ("--prefix", "--prefix_file", "'y'", "z")),
        (["x", "--prefix_file", "z"], ("--file", "--prefix_file")),
        ([*file, "--prefix_file", str(tmp_path / "none")], ("none",)),
        (["x", "--prefix", "y", "--attention", "a.png"], ("--prefix", "--attention")),
        (["x", "--prefix", "y" * 40], ("prefix", "max_len 40")),
        (["x", "--max_batch_bytes", "0"], ("max_batch_bytes",)),
        (["x", "--n_best", "3"], ("--n_best 3", "--num_beams 1", "--do_sample")),
        (["x", "--n_best", "0"], ("--n_best", "0")),
        ([*file, "--reference", "y", "--n_best", "2", "--num_beams", "2"], ("--n_best", "--reference")),
        (["x", "--temperature", "2"], ("do_sample", "temperature")),
        (["x", "--max_new_tokens", "41"], ("max_new_tokens", "40")),
        (["x", "--on_error", "ignore"], ("--on_error", "'skip'")),
        (["x", "--precision", "int2"], ("--precision", "'int4'")),
        ([" "], ("empty",)),
        (["--file", str(tmp_path)], (str(tmp_path),)),
        (["--file", str(tmp_path / "empty")], ("empty",)),
    ):
        assert main(["translate", run, *flags]) in (1, 2), flags
        error = capsys.readouterr().err
        assert error.startswith("fastformer: ") and all(word in error for word in words), error


def test_bleu_of_words_that_are_chosen(run, tmp_path, ran, caplog) -> None:
    (tmp_path / "in").write_text("one\ntwo\nthree\n")
    (tmp_path / "right").write_text("我喜欢吃苹果\n他去北京了\n谢谢\n")
    line = ["translate", run, "--file", str(tmp_path / "in"), "--reference", str(tmp_path / "right"), *FEW]
    for flags, signature, hint in (([], "tok:13a", True), (["--bleu_tokenize", "zh"], "tok:zh", False)):
        caplog.clear()
        error = ran(*line, *flags).err
        assert signature in error and error.count("3 lines") == 2
        assert ("--bleu_tokenize zh" in caplog.text) == hint
    for flags in (["--bleu_tokenize", "ja-mecab"], ["--bleu_tokenize", "flores200"]):
        captured = ran(*line, *flags, code=1)
        assert captured.out == "" and flags[1] in captured.err  # before anything is translated
    assert "--reference" in ran("translate", run, "one", "--bleu_tokenize", "zh", code=1).err


def test_several_runs_translate_and_score_together(run, tmp_path, capsys, ran) -> None:
    other = str(tmp_path / "a,b")  # a comma in a name
    tiny(seed=5, max_len=40).save_pretrained(other, ByteTokenizer())
    assert lines_of(ran("translate", other, "one", *FEW).out) == [
        shown(Translator.from_pretrained(other).translate("one", max_new_tokens=6))
    ]
    plain = str(tmp_path / "other")
    Path(other).rename(plain)
    both = Translator.from_pretrained([run, plain], ensemble_weights=[1, 3], ensemble_mean="log_probabilities")
    flags = ["--ensemble_weights", "1,3", "--ensemble_mean", "log_probabilities"]
    assert main(["translate", f"{run},{plain}", "one", "--num_beams", "2", *flags, *FEW]) == 0
    due = both.translate("one", num_beams=2, max_new_tokens=6)
    assert lines_of(capsys.readouterr().out) == [shown(due)]
    file = tmp_path / "t"
    file.write_text("one\n")
    found = float(ran("score", f"{run},{plain}", "--file", str(file), "--target", str(file)).out.split("\t")[0])
    assert found == pytest.approx(Translator.from_pretrained([run, plain]).score("one", "one").score, abs=1e-5)
    for arguments, expected in (
        ([run, "one", "--ensemble_weights", "1"], "with several runs"),
        ([f"{run},{plain}", "one", "--ensemble_weights", "1,x"], "expected --ensemble_weights as numbers"),
        ([f"{run},{plain}", "one", "--ensemble_weights", "1"], "a weight for each of 2 models"),
        ([f"{run},", "one"], "separated by commas"),
        ([f"{run},{plain}", "one", "--align"], "expected one run with --align"),
    ):
        assert expected in ran("translate", *arguments, code=1).err


def test_alignments_follow_the_translations(run, tmp_path, capsys, ran) -> None:
    texts = ["one two", "", "a longer  line", "three"]
    file = tmp_path / "in.txt"
    file.write_text("\n".join(texts) + "\n")

    def rows(*flags: str) -> list[list[str]]:
        return [line.split("\t") for line in lines_of(ran("translate", run, "--file", str(file), *FEW, *flags).out)]

    plain = [row[0] for row in rows()]
    aligned = rows("--align")
    assert [row[0] for row in aligned] == [text.replace("\t", " ") for text in plain]
    assert all(len(row) == 2 for row in aligned) and aligned[1] == ["", ""]
    for text, (said, pairs) in zip(texts, aligned, strict=True):
        places = [tuple(map(int, pair.split("-"))) for pair in pairs.split()]
        assert [target for _, target in places] == list(range(len(said.split()) if text else 0))
        assert all(source < len(text.split()) for source, _ in places)
    tokens = rows("--align", "tokens", "--align_layer", "2", "--align_head", "3")
    assert [len(row[1].split()) for row in tokens] == [6, 0, 6, 6]
    assert tokens != rows("--align", "tokens", "--align_layer", "1")
    best = rows("--align", "--n_best", "2", "--num_beams", "2", "--prefix", "x y")
    assert [row[0] for row in best] == ["1", "1", "2", "3", "3", "4", "4"] and {len(row) for row in best} == {4}
    assert best[2] == ["2", "-inf", "", ""] and best[0][2].startswith("x y") and "-0" in best[0][3].split()[0]
    for flags, expected in (
        (["--align_layer", "2"], "expected --align"),
        (["--align_head", "1"], "expected --align"),
        (["--align", "--align_layer", "3"], "a layer from 1 to 2"),
        (["--align", "--align_head", "0"], "head"),
        (["--align=letters"], "--align"),
    ):
        assert main(["translate", run, "--file", str(file), *FEW, *flags]) in (1, 2)
        out, err = capsys.readouterr()
        assert expected in err and not out
