"""Tests the command line as users type it: results, and messages instead of tracebacks."""

from __future__ import annotations

import gc
import importlib
import io
import logging
import sys
import warnings

import pytest

from fastformer import cli
from fastformer.cli import main

SMALL = "{d_model: 32, d_ff: 64, num_heads: 4, num_encoder_layers: 1, num_decoder_layers: 1}"


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp("cli")
    (folder / "train.tsv").write_text("".join(f"word {i}\twort {i}\n" for i in range(60)))
    (folder / "settings.yaml").write_text(
        f"train_tsv: {folder / 'train.tsv'}\ntokenizer: bytes\nmodel: {SMALL}\nsteps: 3\nmax_len: 40\nval_examples: 2\n"
    )
    assert main(["train", str(folder / "run"), "--config", str(folder / "settings.yaml"), "--max_tokens", "256"]) == 0
    return str(folder / "run")


def test_summaries_are_the_first_lines_of_the_docstrings() -> None:
    for name, summary in cli.COMMANDS.items():
        function = getattr(importlib.import_module(f"fastformer.commands.{name}"), name)
        assert function.__doc__.partition("\n")[0] == summary


def test_a_command_collects_little_garbage_and_restores_the_threshold(monkeypatch) -> None:
    before, seen = gc.get_threshold(), []

    def command() -> None:
        seen.append(gc.get_threshold())
        if len(seen) == 1:
            raise ValueError("an error at first")

    monkeypatch.setattr("fastformer.commands.doctor.doctor", command)
    for code in (1, 0):
        assert main(["doctor"]) == code and gc.get_threshold() == before
    assert len(seen) == 2 and min(threshold[0] for threshold in seen) > 10 * before[0]


def test_translate_text_file_and_stdin(run, tmp_path, capsys, monkeypatch) -> None:
    assert main(["translate", run, "word 7", "--max_new_tokens", "5"]) == 0
    one = capsys.readouterr().out
    (tmp_path / "in.txt").write_text("word 7\nword 8\n")
    assert main(["translate", run, "--file", str(tmp_path / "in.txt"), "--max_new_tokens", "5"]) == 0
    two = capsys.readouterr().out
    assert two.startswith(one) and two.count("\n") >= 2
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"word 7\n")))
    assert main(["translate", run, "--max_new_tokens", "5", "--num_beams", "2"]) == 0


def test_empty_lines_stay_and_are_counted_in_errors(run, tmp_path, capsys) -> None:
    (tmp_path / "in.txt").write_text("word 7\n\nword 8\n")
    assert main(["translate", run, "--file", str(tmp_path / "in.txt"), "--max-new-tokens", "1"]) == 0
    assert capsys.readouterr().out.split("\n")[1] == ""
    (tmp_path / "long.txt").write_text("word 7\n\n" + "x" * 3000 + "\n")
    assert main(["translate", run, "--file", str(tmp_path / "long.txt")]) == 1
    assert "text 3" in capsys.readouterr().err


def test_reference_prints_scores_with_signatures(run, tmp_path, capsys) -> None:
    (tmp_path / "in.txt").write_text("word 7\nword 8\n")
    arguments = ["translate", run, "--file", str(tmp_path / "in.txt"), "--max_new_tokens", "4"]
    assert main([*arguments, "--reference", str(tmp_path / "in.txt")]) == 0
    captured = capsys.readouterr()
    assert captured.out.count("\n") == 2 and "tok:13a" in captured.err and "chrF" in captured.err
    assert main(["translate", run, "x", "--reference", "y"]) == 1
    assert "--file" in capsys.readouterr().err


def test_a_flag_overrides_the_file_even_with_the_default(run, tmp_path) -> None:
    from fastformer.training.settings import load_config

    (tmp_path / "settings.yaml").write_text("steps: 3\nbatching: random\nmodel: {d_model: 64, d_ff: 32}\nlr: 1e-3\n")
    (tmp_path / "data.tsv").write_text("a\tb\nc\td\ne\tf\n")
    flags = ["--train-tsv", str(tmp_path / "data.tsv"), "--tokenizer=bytes", "--max-steps", "1"]
    arguments = ["train", str(tmp_path / "run"), "--config", str(tmp_path / "settings.yaml"), *flags]
    assert main(arguments) == 2  # there is no --max-steps
    flags[-2:] = ["--steps", "1", "--batching", "packed", "--model.d_model", "32"]
    arguments[4:] = flags
    assert main(arguments) == 0
    config = load_config(tmp_path / "run")
    assert (config.steps, config.batching, config.lr) == (1, "packed", 1e-3)
    assert config.settings == {"d_model": 32, "d_ff": 32}


def test_attention_picture(run, tmp_path) -> None:
    pytest.importorskip("matplotlib", reason="drawing needs matplotlib")
    assert main(["translate", run, "word 7", "--attention", str(tmp_path / "a.png"), "--max_new_tokens", "4"]) == 0
    assert (tmp_path / "a.png").stat().st_size > 1000


def raising(error: BaseException):
    def command() -> None:
        raise error

    return command


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (ValueError("expected this, got\nthat"), 1, "fastformer: expected this, got that"),
        (FileNotFoundError(2, "No such file", "x.txt"), 1, "fastformer: x.txt: No such file"),
        (ImportError("drawing needs matplotlib"), 1, "fastformer: drawing needs matplotlib"),
        (ModuleNotFoundError("No module named 'yaml'", name="yaml"), 1, "pip install 'fastformer[train]'"),
        (ModuleNotFoundError("No module named 'matplotlib'", name="matplotlib.figure"), 1, "fastformer[plot]'"),
        (RuntimeError("DefaultCPUAllocator: not enough memory: you tried to allocate 9 bytes"), 1, "smaller batches"),
        (MemoryError(), 1, "fastformer: out of memory"),
        (KeyboardInterrupt(), 130, "interrupted"),
        (TypeError("'NoneType' is not iterable"), 1, "TypeError: 'NoneType' is not iterable"),
        (KeyError("step"), 1, "KeyError"),
        (AssertionError(), 1, "AssertionError"),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), 1, "RuntimeError"),
        (ModuleNotFoundError("No module named 'fastformer.x'", name="fastformer.x"), 1, "No module named"),
    ],
)
def test_each_error_is_one_line(error, code, message, monkeypatch, capsys) -> None:
    from fastformer.commands import doctor

    monkeypatch.setattr(doctor, "doctor", raising(error))
    assert main(["doctor"]) == code
    said = capsys.readouterr().err
    assert message in said and said.count("\n") == 1, said
    assert ("--debug" in said) == ("a bug" in said)
    for words in (["--debug", "doctor"], ["doctor", "--debug"]):
        assert main(words) == code
        said = capsys.readouterr().err
        assert message in said and "Traceback" in said and "in raising" not in said and "in command" in said


def test_libraries_are_quiet_and_fastformers_messages_are_not(monkeypatch, capsys) -> None:
    from fastformer.commands import doctor

    def noisy() -> None:
        warnings.warn("a glyph is missing", UserWarning, stacklevel=1)
        logging.getLogger("torch._subclasses.fake_tensor").info("FakeTensor cache stats:")
        logging.getLogger("some.library").info("opened a file")
        logging.getLogger("fastformer").info("left out 3 examples")

    monkeypatch.setattr(doctor, "doctor", noisy)
    # pytest has handlers of its own, with which basicConfig does nothing.
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    monkeypatch.setattr(logging.getLogger(), "level", logging.WARNING)
    assert main(["doctor"]) == 0
    assert capsys.readouterr().err == "left out 3 examples\n"
