"""Tests `fastformer chat`, and `fastformer generate` with folders of language models that transformers saved."""

from __future__ import annotations

import io
import json
import os
import re
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import fastformer.generation
from fastformer import Chat
from fastformer.cli import main
from fastformer.console import printable
from fastformer.generation.answers import Part
from tests.checkpoints import decoders
from tests.generation.chat_templates import CHATML
from tests.generation.test_chat import with_template
from tests.serving import models

pytest.importorskip("jinja2", reason="the jinja2 library is not installed")

FEW = ["--max_new_tokens", "8", "--device", "cpu"]
TEXTS = ["the dog reads a book", "two birds"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    found = tmp_path_factory.mktemp("chat") / "model"
    decoders.llama3(found)
    with_template(found, CHATML)
    return found


@pytest.fixture(scope="module")
def answers(folder) -> list[str]:
    chat = Chat.from_pretrained(folder, do_sample=False, max_new_tokens=8, system="be brief")
    return [chat.ask(text) for text in TEXTS]


@pytest.fixture
def typed(monkeypatch) -> Callable[..., None]:
    """Puts lines into standard input."""

    def put(*lines: str) -> None:
        data = "".join(f"{line}\n" for line in lines).encode()
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))

    return put


def test_lines_are_the_turns_of_one_conversation(folder, answers, typed, capsys, ran) -> None:
    typed(*TEXTS, "", " ", "/reset ", "/help", TEXTS[0], " /quit ", "never")
    flags = ["--greedy", "--system", "be brief", *FEW]
    found = ran("chat", str(folder), *flags)
    assert found.out == f"{answers[0]}\n{answers[1]}\n{answers[0]}\n" and "/reset" in found.err
    typed(TEXTS[0] + "\r", "/exit\r", "never")  # a file of Windows
    assert ran("chat", str(folder), *flags) == (f"{answers[0]}\n", "")
    typed(TEXTS[0])
    assert main(["chat", str(folder), *flags, "--stop", "never", "--stop", answers[0][2:4]]) == 0
    assert capsys.readouterr().out == answers[0][: answers[0].index(answers[0][2:4])] + "\n"


class Pipe(io.RawIOBase):
    """Notes each write that reaches the reader."""

    def __init__(self) -> None:
        super().__init__()
        self.writes: list[bytes] = []

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        self.writes.append(bytes(data))
        return len(data)


def test_an_answer_reaches_a_pipe_while_it_is_made(folder, answers, typed, monkeypatch) -> None:
    pipe = Pipe()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BufferedWriter(pipe), encoding="utf-8"))
    typed(TEXTS[0])
    assert main(["chat", str(folder), "--greedy", "--system", "be brief", *FEW]) == 0
    assert b"".join(pipe.writes).decode() == f"{answers[0]}\n" and len(pipe.writes) > 3


def test_a_second_slash_begins_a_line_that_begins_with_one(folder, typed, capsys) -> None:
    chat = Chat.from_pretrained(folder, do_sample=False, max_new_tokens=8)
    expected = {}
    for text in ("/reset", "//reset"):
        expected[text] = chat.ask(text)
        chat.reset()
    typed("//reset")
    assert main(["chat", str(folder), "--greedy", *FEW]) == 0
    assert capsys.readouterr().out == expected["/reset"] + "\n" and expected["/reset"] != expected["//reset"]


def test_a_flag_overrides_the_precision_of_a_file(folder, typed, tmp_path, ran, calls_of) -> None:
    (file := tmp_path / "chat.yaml").write_text("precision: int8\nmax_new_tokens: 2\n")
    calls = calls_of(Chat, "from_pretrained")
    for flags, expected in (([], "int8"), (["--precision", "fp32"], "fp32")):
        typed(TEXTS[0])
        ran("chat", str(folder), "--config", str(file), *flags)
        assert calls.pop().options["precision"] == expected


def test_a_quantised_copy_chats_too(folder, typed, tmp_path, capsys, ran) -> None:
    ran("quantize", str(folder), str(tmp_path / "int8"))
    typed(*TEXTS)
    assert main(["chat", str(tmp_path / "int8"), "--seed", "1", *FEW]) == 0
    chat = Chat.from_pretrained(tmp_path / "int8", max_new_tokens=8, seed=1)
    assert chat.config.temperature == 0.6
    assert capsys.readouterr().out == "".join(f"{chat.ask(text)}\n" for text in TEXTS)


class Terminal(io.StringIO):
    """A terminal on which Ctrl-C is pressed after a number of pieces."""

    def __init__(self, presses: int | None = None) -> None:
        super().__init__()
        self.presses, self.count = presses, 0

    def isatty(self) -> bool:
        return True

    def write(self, text: str) -> int:
        self.count += 1
        if self.presses is not None and self.count == self.presses:
            os.kill(os.getpid(), signal.SIGINT)
        return super().write(text)


@pytest.mark.skipif(os.name != "posix", reason="signals are POSIX")
def test_ctrl_c_ends_the_answer_and_ctrl_d_the_conversation(folder, answers, monkeypatch, capsys) -> None:
    said: list[Any] = [TEXTS[0], KeyboardInterrupt, TEXTS[1], "the dog " * 1000, TEXTS[0], EOFError]
    lines: Iterator[Any] = iter(said)

    def ask(prompt: str) -> str:
        line = next(lines)
        if not isinstance(line, str):
            raise line
        return line

    screen, before = Terminal(presses=2), signal.getsignal(signal.SIGINT)
    monkeypatch.setattr(sys, "stdin", Terminal())
    monkeypatch.setattr(sys, "stdout", screen)
    monkeypatch.setattr("builtins.input", ask)
    flags = ["--greedy", "--system", "be brief", *FEW]
    assert main(["chat", str(folder), *flags]) == 0
    assert next(lines, None) is None and signal.getsignal(signal.SIGINT) is before
    first, second, third, rest = screen.getvalue().split("\n", 3)
    assert first and answers[0].startswith(first) and first != answers[0]  # the answer that Ctrl-C ended
    chat = Chat.from_pretrained(folder, do_sample=False, max_new_tokens=8, system="be brief")
    chat.messages += [{"role": "user", "content": TEXTS[0]}, {"role": "assistant", "content": first}]
    assert [second, third] == [printable(chat.ask(TEXTS[1])), printable(chat.ask(TEXTS[0]))]
    assert rest == "\n"  # Ctrl-D leaves the cursor behind the prompt
    error = capsys.readouterr().err
    assert "512 positions" in error and "/reset" in error


def test_only_a_terminal_shows_reasoning(tmp_path, typed, monkeypatch, ran) -> None:
    template = "{% for m in messages %}{{ m.content }}<|im_end|>{% endfor %}<think>\n{# </think> #}"
    own = models.tokenizer(template, ("<think>", "</think>"))
    folder = models.generator(tmp_path / "tiny", own=own)

    def parts(chat: Chat, text: str) -> Iterator[Part]:
        yield from (
            Part("reasoning", "so\x1b"),
            Part("reasoning", " it is"),
            Part("content", "Ye"),
            Part("content", "s."),
        )

    monkeypatch.setattr(Chat, "parts", parts)
    typed("two")
    assert ran("chat", str(folder), *FEW).out == "Yes.\n"
    lines, screen = iter(["two"]), Terminal()
    monkeypatch.setattr(sys, "stdin", Terminal())
    monkeypatch.setattr(sys, "stdout", screen)
    monkeypatch.setattr("builtins.input", lambda prompt: next(lines, "/quit"))
    assert main(["chat", str(folder), *FEW]) == 0
    dim, rest = screen.getvalue().split(" it is")
    assert dim.startswith("\x1b[2mso") and dim.count("\x1b") == 1 and rest == "\x1b[0m\n\nYes.\n"


def test_ctrl_c_on_a_pipe_ends_the_command(folder, typed, monkeypatch) -> None:
    asked = []

    def parts(chat: Chat, text: str) -> Iterator[str]:
        asked.append(text)
        raise KeyboardInterrupt

    monkeypatch.setattr(Chat, "parts", parts)
    typed(*TEXTS)
    assert main(["chat", str(folder), *FEW]) == 130 and asked == TEXTS[:1]


@pytest.mark.parametrize(
    "template, flags, named",
    [
        (None, [], "chat_template"),
        ("{% for i in range(100000) %}{% for j in range(100000) %}{% endfor %}{% endfor %}", [], "stopped"),
        ("{% import 'os' as os %}", [], "loader"),
        ("{{ messages.__class__ }}", [], "__class__"),
        ("{% if %}", [], "template"),
        ("{{ raise_exception('no users here') }}", [], "no users here"),
        (CHATML, ["--greedy", "--top_k", "3"], "top_k"),
        (CHATML, ["--greedy", "--top_p", "0.5"], "top_p"),
        (CHATML, ["--greedy", "--temperature", "0.5"], "greedy"),
        (CHATML, ["--temperature", "0"], "temperature"),
        (CHATML, ["--precision", "int3"], "precision"),
        (CHATML, ["--num_beams", "2"], "num_beams"),
    ],
)
def test_errors_are_one_line(template, flags, named, folder, typed, tmp_path, capsys, monkeypatch) -> None:
    monkeypatch.setattr("fastformer.generation.chat_sandbox.MAX_ROUNDS", 5000)
    model = shutil.copytree(folder, tmp_path / "model")
    values = json.loads((folder / "tokenizer_config.json").read_text())
    values["chat_template"] = template
    (model / "tokenizer_config.json").write_text(json.dumps({k: v for k, v in values.items() if v is not None}))
    typed("two birds")
    assert main(["chat", str(model), *flags]) in (1, 2)
    said = capsys.readouterr().err
    assert named in said and said.count("\n") == 1 and "a bug" not in said


# fastformer generate FOLDER


def by_transformers(folder: Path, text: str, count: int) -> str:
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    ids = tokenizer(text, return_tensors="pt")["input_ids"]
    with torch.inference_mode():
        out = model.generate(ids, do_sample=False, max_new_tokens=count, max_length=None)
    found: str = tokenizer.decode(out[0], skip_special_tokens=True, clean_up_tokenization_spaces=False)
    return found


def test_it_continues_as_transformers_does(folder, capsys, ran, tmp_path, caplog) -> None:
    expected = [by_transformers(folder, text, 8) for text in TEXTS]
    for text, line in zip(TEXTS, expected, strict=True):
        assert ran("generate", str(folder), text, "--greedy", *FEW).out == line + "\n"
    assert "doesn't know" not in caplog.text  # there is no unknown token
    text = "<|im_start|>two birds"  # a special token, which is shown as it was typed
    parsed = by_transformers(folder, text, 8).removeprefix("two birds")
    assert ran("generate", str(folder), text, "--greedy", *FEW).out == text + parsed + "\n"
    (tmp_path / "in").write_text("\n".join(TEXTS) + "\n")
    assert main(["generate", str(folder), "--file", str(tmp_path / "in"), "--greedy", *FEW]) == 0
    assert capsys.readouterr().out.split("\n")[:-1] == [re.sub("\n", r"\\n", line) for line in expected]


def test_sampling_follows_the_folders_settings(folder, tmp_path, ran) -> None:
    def said(where: Path, *flags: str) -> set[str]:
        found = set()
        for seed in range(3):
            found.add(ran("generate", str(where), "two birds", "--seed", str(seed), *flags).out)
        return found

    assert len(said(folder, *FEW)) > 1  # its do_sample is true
    assert all(len(text) < 400 for text in said(folder))  # its max_length is 40
    assert len(said(folder, "--greedy", *FEW)) == 1
    greedy = shutil.copytree(folder, tmp_path / "greedy")
    (greedy / "generation_config.json").write_text(json.dumps({"eos_token_id": [3, 1]}))
    assert said(greedy, *FEW) == {by_transformers(folder, "two birds", 8) + "\n"}
    assert len(said(greedy, "--temperature", "1.5", *FEW)) > 1
    assert len(said(greedy, "--num_beams", "2", *FEW)) == 1


def test_without_a_limit_a_chat_ends(folder, tmp_path, capsys, ran, monkeypatch, caplog) -> None:
    monkeypatch.setattr("fastformer.commands.generate._MANY", 5)
    endless = shutil.copytree(folder, tmp_path / "endless")
    (endless / "generation_config.json").write_text(json.dumps({"eos_token_id": None}))
    config = json.loads((folder / "config.json").read_text())
    (endless / "config.json").write_text(json.dumps(config | {"eos_token_id": None}))
    expected = by_transformers(endless, "two birds", 5)
    assert main(["generate", str(endless), "two birds", "--device", "cpu"]) == 0
    assert capsys.readouterr().out == expected + "\n" and "max_new_tokens" in caplog.text
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"two birds\n")))
    assert ran("generate", str(endless), "--device", "cpu").out == expected.replace("\n", "\\n") + "\n"


def test_a_prompt_beyond_the_context(folder, tmp_path, ran, caplog, calls_of) -> None:
    long, flags = "the dog reads a book in the park " * 200, ["--greedy", *FEW]
    assert re.search(r"\b512\b", ran("generate", str(folder), long, *flags, code=1).err)
    calls = calls_of(fastformer.generation, "generate")
    out = ran("generate", str(folder), long, "--cut", *flags).out
    assert out.startswith(long) and len(out) > len(long) + 1 and "512" in caplog.text
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    ids = tokenizer(long)["input_ids"]
    kept = torch.tensor([[ids[0], *ids[-(512 - 8 - 1) :]]])  # BOS stays
    assert [*calls[0].args[1]] == kept.tolist()
    with torch.inference_mode():
        expected = model.generate(kept, do_sample=False, max_new_tokens=8, max_length=None)[0, kept.shape[1] :]
    assert out.removeprefix(long).removesuffix("\n") == tokenizer.decode(expected, skip_special_tokens=True)
    (tmp_path / "in").write_text(f"two birds\n{long}\n")
    lines = ran("generate", str(folder), "--file", str(tmp_path / "in"), "--cut", *flags).out.split("\n")
    assert lines[1] == out.removesuffix("\n").replace("\n", "\\n") and lines[0].startswith("two birds")
