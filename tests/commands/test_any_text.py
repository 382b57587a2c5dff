"""A text is translated unchanged, whatever it contains, from an argument, a prefix, a file or a pipe."""

from __future__ import annotations

import argparse
import importlib
import inspect
import io
import os
import random
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from fastformer.cli import COMMANDS, main
from fastformer.commands import _words
from fastformer.commands._parsing import make_parser, parse
from fastformer.generation import Translator

PIECES = [
    "--", "-", "---", "-red", "-h", "#", "#1 hit", "&x", "*x", "null", "Null", "~", "!!null", "!x", "True",
    "false", "no", "off", "0", "1", "1e5", "0x4", "010", "1:30", ".inf", "nan", "2020-01-01", "@f", "{a: 1}",
    "{", "[", "[]", "]", "'", '"', '"a', "\\", "\\n", "%", "%s", "|", ">", "? ", ": ", "a: b", "- a", "`id`",
    "$HOME", "$(id)", "*", "=", "a=b", "--x", "--file", "--num_beams", "--num-beams=4", "--note=x",
    "--Yes, a well-known man", "-- So-called art", "--a-b c", "--help", "--debug", "-num_beams", "auto",
    "never", "<0x4a>", "</s>", "<unk>", "\t", " ", "  ", "\x01", "\x1b[2J", "\x7f", "\x85", "\x0b", "\x0c",
    "\x1c", "\u2028", "\u2029", "\ufeff", "\u200b", "\u202e", "e\u0301", "é", "½", "ﬁ", "ß", "\u4e2d\u6587",
    "\u05e9\u05dc", "\U0001f469\u200d\U0001f52c", "\U0010ffff", "word", "two words", ".", ",", "well-known",
    "_", "__",
]  # fmt: skip


def odd_texts(count: int, seed: int) -> list[str]:
    """Returns each odd text alone, and then mixtures of them; none is blank."""
    draw = random.Random(seed)
    texts = [piece for piece in PIECES if piece.strip()]
    while len(texts) < count:
        text = draw.choice(["", " "]).join(draw.choices(PIECES, k=draw.randint(1, 5)))
        if draw.random() < 0.3:
            text += "".join(chr(draw.choice((draw.randrange(1, 128), draw.randrange(0xA0, 0xD800)))) for _ in range(3))
        text = text.replace("\n", "").strip("\r")
        texts += [text] if text.strip() else []
    draw.shuffle(texts)
    return texts[:count]


class Echo:
    """A translator that returns the text after its prefix, and records its input."""

    def __init__(self) -> None:
        self.given: list[tuple[str, str | None]] = []

    def settings(self, options, config=None):
        return options

    def answers(self, source, settings, bad, *, log_probs, split=None):
        while True:
            try:
                item = source.get(wait=True)
            except EOFError:
                return
            self.given.append((item.text, item.prefix))
            yield [self.Answer(item)]

    class Answer:
        def __init__(self, item) -> None:
            self._text = f"{item.prefix or ''}{item.text}"

        def texts(self) -> list[str]:
            return [self._text]


@pytest.fixture
def echo(monkeypatch) -> Echo:
    translator = Echo()
    monkeypatch.setattr(Translator, "from_pretrained", lambda *_, **__: translator)
    return translator


LOOKS_LIKE_A_FLAG = re.compile(r"--[A-Za-z][A-Za-z0-9_.-]*(=.*)?|-h|-num[_-]beams(=.*)?", re.DOTALL)


def try_words(echo: Echo, text: str, prefix: str, capsys) -> None:
    for words, given, always in (
        (["--", text], (text, None), True),
        ([f"--prefix={prefix}", "--", text], (text, prefix), True),
        ([text, "--prefix", prefix], (text, prefix), False),
        (["--prefix", prefix, "--skip_long", text], (text, prefix), False),
    ):
        if not always and (text.startswith("--num-beams=4") or text in ("--", "--debug")):  # flags of the command
            continue
        echo.given.clear()
        try:
            code = main(["translate", "run", *words])
        except SystemExit:  # the help
            code = 2
        out, err = capsys.readouterr()
        if code == 2:
            assert not always, words  # behind `--` everything is a text
            odd = [word for word in (text, prefix) if LOOKS_LIKE_A_FLAG.match(word) or word == "--"]
            switched = "--skip_long" in words and text.lower() in ("true", "false", "yes", "no", "on", "off", "1", "0")
            assert (odd or switched) and not echo.given and ("--" in err or "usage" in out), (words, err)
        else:
            assert (code, echo.given) == (0, [given]), words


@pytest.mark.parametrize("count", [10, pytest.param(1000, marks=pytest.mark.slow)])  # slow: with every piece
def test_arguments_and_prefixes(echo, capsys, count) -> None:
    texts = odd_texts(2 * count, seed=0)
    for text, prefix in zip(texts[:count], texts[count:], strict=True):
        try_words(echo, text, prefix, capsys)


def test_a_thousand_lines_of_a_file_and_of_standard_input(echo, tmp_path, monkeypatch, capsys) -> None:
    texts, prefixes = odd_texts(1000, seed=2), odd_texts(1000, seed=3)
    file, others = tmp_path / "#1.txt", tmp_path / "null"
    file.write_bytes("".join(f"{text}\n" for text in texts).encode())
    others.write_bytes("".join(f"{text}\n" for text in prefixes).encode())
    texts[0] = texts[0].removeprefix("\ufeff")  # at the beginning of a file it is a byte order mark
    prefixes[0] = prefixes[0].removeprefix("\ufeff")
    shown = [text.replace("\r", " ") for text in texts]
    monkeypatch.chdir(tmp_path)
    for words, before in ((["--file", "#1.txt"], None), (["--file=#1.txt", "--prefix", "&x"], "&x")):
        assert main(["translate", "run", *words]) == 0
        assert echo.given == [(text, before) for text in texts]
        assert capsys.readouterr().out.removesuffix("\n").split("\n") == [(before or "") + text for text in shown]
        echo.given.clear()
    assert main(["translate", "run", "--file", "#1.txt", "--prefix_file", "null"]) == 0
    assert echo.given == list(zip(texts, prefixes, strict=True))
    echo.given.clear()
    with open(file, "rb") as stream:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(stream))
        assert main(["translate", "run", "--prefix=~"]) == 0
    assert echo.given == [(text, "~") for text in texts]


def test_a_command_that_waits_for_a_terminal_says_so(echo, monkeypatch, ran) -> None:
    class Keyboard(io.TextIOWrapper):
        def isatty(self) -> bool:
            return True

    for words in ([], ["--file", "-"]):
        monkeypatch.setattr(sys, "stdin", Keyboard(io.BytesIO(b"one\n")))
        out, err = ran("translate", "run", *words)
        assert out == "one\n" and "Ctrl-D" in err


def test_names_of_files_are_text_for_training_too(tmp_path, monkeypatch) -> None:
    from fastformer.commands import train

    for name in ("#1.txt", "null", "~", "&x", "@f", "{a: 1}", "1e5", "True", "-data", "!!null"):
        flags = {"train_text": name, "val_source": name, "config": name, "init_from": name, "tokenizer": name}
        words = [word for flag, value in flags.items() for word in (f"--{flag}", value)]
        assert parse(train, "train", [name, *words]) == {"run": name, **flags}


# Flags and arguments that are no texts: files, folders, devices, languages, addresses and lists of numbers, which keep
# the bytes of their words.
NAMES = {
    *("adapter", "attention", "audio", "baseline", "calibration", "config", "data_weights", "device", "draft"),
    *("engine", "ensemble_weights", "file", "folder", "grammar", "host", "hosts", "hypotheses", "init_from"),
    *("keys_file", "language", "model.preset", "origins", "out", "prefix_file", "reference", "run", "schema"),
    *("source_lang", "target", "target_lang", "tokenizer", "train_data", "train_source", "train_target"),
    *("train_text", "train_tsv", "val_source", "val_target", "val_text", "val_tsv"),
}


@pytest.mark.parametrize("command", sorted({*COMMANDS} - {"doctor"}))
def test_every_text_is_utf8_in_any_locale(command, monkeypatch) -> None:
    """In a Latin-1 locale each byte of a word is a character."""
    module = importlib.import_module(f"fastformer.commands.{command}")
    parser, hints = make_parser(module, command)
    parameters = [p for p in inspect.signature(getattr(module, command)).parameters.values() if p.name in hints]
    arguments = [p for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
    needed = {each.dest for each in parser._actions if each.required and each.option_strings}
    text, word = "zwölf", "zwölf".encode().decode("latin-1")
    monkeypatch.setattr(os, "fsencode", lambda each: each.encode("latin-1"))
    for name in [name for name, hint in hints.items() if _words.is_text(hint)]:
        given = [word if p.name == name else "x" for p in arguments if p.name == name or p.default is p.empty]
        flags = {flag: "x" for flag in needed} | ({} if name in [p.name for p in arguments] else {name: word})
        found: Any = parse(module, command, [*(f"--{flag}={value}" for flag, value in flags.items()), *given])
        for part in name.split("."):
            found = found[part]
        assert found in (([word], word) if name in NAMES else ([text], text)), name
    with pytest.raises(argparse.ArgumentError) as wrong:
        parse(module, command, ["--nope"])
    takes_text = any(p.name not in NAMES and _words.is_text(hints[p.name]) for p in arguments)
    assert ("after --" in str(wrong.value)) == takes_text


@pytest.mark.slow
@pytest.mark.parametrize("locale", ["C.UTF-8", "C"])
def test_through_real_words_and_pipes(tmp_path, locale) -> None:
    """Runs a separate process in a UTF-8 and in an ASCII locale, with an argument, a prefix and a pipe of a thousand
    lines.
    """
    texts = odd_texts(1000, seed=4)
    texts[0] = "word"
    code = (
        "import sys; from tests.commands.test_any_text import Echo; from fastformer.generation import Translator\n"
        "Translator.from_pretrained = lambda *_, **__: Echo()\n"
        "from fastformer.cli import main; sys.exit(main())"
    )
    root = str(Path(__file__).parents[2])
    environment = {**os.environ, "PYTHONPATH": root, "OMP_NUM_THREADS": "1", "LC_ALL": locale}
    environment |= {"PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"} if locale == "C" else {}
    before = "~ \u4e2d zwölf "
    command = [sys.executable, "-c", code, "translate", "run", f"--prefix={before}"]
    given = "".join(f"{text}\n" for text in texts).encode()
    done = subprocess.run(command, input=given, env=environment, capture_output=True, timeout=300)
    assert done.returncode == 0, done.stderr
    shown = [(before + text).replace("\r", " ") for text in texts]
    assert done.stdout.decode().removesuffix("\n").split("\n") == shown
    for text in ("--", "#1 hit", "-red", "&x zwölf", "\U0001f600", "null"):
        done = subprocess.run([*command, "--", text], env=environment, capture_output=True, timeout=300)
        assert done.stdout.decode() == before + text + "\n", done.stderr
