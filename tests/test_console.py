"""Tests standard streams that fail, that support only ASCII, or that are closed."""

from __future__ import annotations

import io
import logging
import os
import sys
from pathlib import Path

import pytest

from fastformer import cli, console
from fastformer.console import Output, OutputLostError, printable, shown, standard_streams

posix = pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full, which Linux has")


def widowed() -> io.TextIOWrapper:
    """Returns a pipe without a reader."""
    reading, writing = os.pipe()
    os.close(reading)
    return os.fdopen(writing, "w")


def dropped(stream: io.TextIOWrapper) -> None:
    with pytest.raises(OSError):
        stream.close()


def test_work_continues_without_its_output_with_one_warning(caplog) -> None:
    stream = widowed()
    output = Output(stream, "standard output", outlived=True)
    for _ in range(3):
        print("a line", file=output, flush=True)
    assert output.lost == "Broken pipe"
    assert [record.levelno for record in caplog.records] == [logging.WARNING] and "Broken pipe" in caplog.text
    dropped(stream)


def test_other_commands_end_with_their_output() -> None:
    stream = widowed()
    output = Output(stream, "standard output", outlived=False)
    for _ in range(2):
        with pytest.raises(OutputLostError) as lost:
            print("a line", file=output, flush=True)
        assert lost.value.has_left
    dropped(stream)
    closed = Output(None, "standard output", outlived=False)
    with pytest.raises(OutputLostError, match="closed") as lost:
        closed.write("a line")
    assert not lost.value.has_left


@posix
def test_a_full_disk_is_an_error_of_a_command_that_prints(monkeypatch, capsys) -> None:
    from fastformer.commands import doctor

    monkeypatch.setattr(doctor, "doctor", lambda: print("all is well"))
    with open("/dev/full", "w") as full:
        monkeypatch.setattr(sys, "stdout", full)
        assert cli.main(["doctor"]) == 1
        assert "No space left" in capsys.readouterr().err
        dropped(full)
    stream = widowed()
    monkeypatch.setattr(sys, "stdout", stream)
    assert cli.main(["doctor"]) == 0
    assert capsys.readouterr().err == ""
    dropped(stream)
    monkeypatch.setattr(sys, "stdout", None)
    assert cli.main(["doctor"]) == 1
    assert "standard output" in capsys.readouterr().err


def test_an_error_without_standard_error_is_only_an_exit_code(monkeypatch, capsys) -> None:
    monkeypatch.setattr(sys, "stderr", None)
    assert cli.main(["doctr"]) == 2
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "cp1252"])
def test_output_is_utf8_in_any_locale(encoding, monkeypatch) -> None:
    raw = io.BytesIO(), io.BytesIO()
    streams = [io.TextIOWrapper(buffer, encoding=encoding) for buffer in raw]
    monkeypatch.setattr(sys, "stdout", streams[0])
    monkeypatch.setattr(sys, "stderr", streams[1])
    with standard_streams():
        print("zwölf \u4e2d \U0001f600 \udcff")
        print("zwölf \u4e2d \udcff", file=sys.stderr)
    assert raw[0].getvalue() == "zwölf \u4e2d \U0001f600 ".encode() + b"\xff\n"
    assert raw[1].getvalue() == "zwölf \u4e2d \\udcff\n".encode()
    assert [stream.encoding for stream in streams] == [encoding] * 2  # as they were


def test_tabs_and_line_ends_reach_a_terminal() -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    assert shown("a\tb\nc\x1b", Terminal()) == "a\tb\nc\\x1b" and shown("\x1b", io.StringIO()) == "\x1b"
    assert console.typed("zw\udcc3\udcb6lf") == "zwölf" and console.typed("a\udcff") == "a\udcff"


def test_unencodable_characters_are_escaped() -> None:
    raw = io.BytesIO()
    output = Output(io.TextIOWrapper(raw, encoding="ascii"), "standard output", outlived=False)
    print("zwölf", file=output, flush=True)
    assert raw.getvalue() == b"zw\\xf6lf\n"


def test_text_for_a_terminal() -> None:
    assert printable("a\x1b[2Jb\x00\r\n\x9b\u2028\u202ec") == "a\\x1b[2Jb\\x00\\r\\n\\x9b\\u2028\\u202ec"
    fine = "Straße \u4e2d\u6587 \u05e9\u05dc\u05d5\u05dd \u0645\u06cc\u200c\u062e \U0001f469\u200d\U0001f52c\u00a0x"
    assert printable(fine) == fine
    assert printable("x" * 10, 10) == "x" * 10 and printable("x" * 11, 10) == "x" * 9 + "…"


def test_a_closed_stream_is_not_a_terminal() -> None:
    stream = io.StringIO()
    assert not console.is_terminal(stream) and not console.is_terminal(None)
    stream.close()
    assert not console.is_terminal(stream)


@pytest.mark.slow
@pytest.mark.skipif(os.name != "posix", reason="needs a POSIX shell")
def test_every_command_works_without_a_standard_stream(tmp_path) -> None:
    """Runs each command as a process with one stream closed; commands that print must fail without their output."""
    import subprocess

    from fastformer.data import ByteTokenizer
    from fastformer.models import GPT

    (tmp_path / "t.tsv").write_text("".join(f"word {i}\twort {i}\n" for i in range(30)))
    (tmp_path / "f.txt").write_text("word 1\n\nword 2\n")
    sizes = ["--model.d_model", "16", "--model.num_heads", "2", "--model.d_ff", "32", "--model.num_encoder_layers", "1"]
    sizes += ["--model.num_decoder_layers", "1", "--tokenizer", "bytes", "--max_len", "40", "--val_examples", "0"]
    run = str(tmp_path / "run")
    assert (
        cli.main(["train", run, "--train_tsv", str(tmp_path / "t.tsv"), "--steps", "2", "--save_every", "1", *sizes])
        == 0
    )
    gpt = GPT.from_preset("tiny", vocab_size=259, d_model=16, d_ff=32, num_heads=2, num_layers=1, max_len=40)
    gpt.save_pretrained(tmp_path / "gpt", ByteTokenizer())
    few = "--max_new_tokens 3"
    for number, (line, saves) in enumerate((
        (f"translate run 'word 1' {few}", False),
        (f"translate run --file f.txt {few}", False),
        (f"generate gpt 'word' {few}", False),
        ("score --hypotheses f.txt --reference f.txt", False),
        ("average run --last 2", True),
        ("quantize run OUT", True),
        ("doctor", False),
    )):  # fmt: skip
        for closed in ("<&-", ">&-", "2>&-", "<&- >&- 2>&-"):
            words = line.replace("OUT", "-".join(["out", str(number), *map(str, closed.encode())]))
            shell = f"'{sys.executable}' -m fastformer.cli {words} {closed}"
            environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[1])}
            proc = subprocess.run(
                ["bash", "-c", shell], cwd=tmp_path, env=environment, capture_output=True, timeout=200
            )
            assert b"bug" not in proc.stderr + proc.stdout and b"Traceback" not in proc.stderr, (shell, proc)
            lost = ">&-" in closed.replace("2>&-", "") and not saves
            assert proc.returncode == (1 if lost else 0), (shell, proc)
            assert bool(proc.stdout) == (" >&-" not in f" {closed}"), (shell, proc)
