"""Tests how a command line becomes a command's arguments, with a sample command and the real ones."""

from __future__ import annotations

import argparse
import importlib
import inspect
from types import ModuleType
from typing import Any, Literal

import pytest

from fastformer.cli import COMMANDS, main
from fastformer.commands import train
from fastformer.commands._parsing import make_parser, parse
from fastformer.commands._words import is_text
from fastformer.training.config import TrainConfig, merged
from tests.covering import each


@pytest.fixture
def module() -> ModuleType:
    sample_module = ModuleType("sample")

    def sample(
        run: str,
        text: str | None = None,
        *,
        count: int = 1,
        share: float = 0.5,
        greedy: bool = False,
        resume: bool | Literal["auto"] = False,
        max_len: int | None = None,
        prefix: str | None = None,
        file: str | None = None,
        part: list[str] | None = None,
    ) -> None:
        """Does nothing.

        Args:
            run: the folder
            text: a text
            count: how many
            share: how much
            greedy: at once
            resume: go on
            max_len: how long
            prefix: what it begins with
            file: of texts
            part: of it
        """

    sample_module.sample = sample  # type: ignore[attr-defined]
    sample_module.FILLED_BY = ("file",)  # type: ignore[attr-defined]
    return sample_module


@each(
    "words, values",
    [
        ("r", {"run": "r"}),
        ("r t", {"run": "r", "text": "t"}),
        ("r --count 1", {"run": "r", "count": 1}),  # what is given is there, be it the default
        ("r xxcount", {"run": "r", "text": "xxcount"}),
        ("--count=3 r --share 2e-1", {"run": "r", "count": 3, "share": 0.2}),
        ("--share 1 r", {"run": "r", "share": 1.0}),
        ("--max-len 5 r", {"run": "r", "max_len": 5}),
        *((f"--max_len {word} r", {"run": "r", "max_len": None}) for word in ("null", "none")),
        ("--greedy r", {"run": "r", "greedy": True}),
        ("r t --greedy --count 2", {"run": "r", "text": "t", "greedy": True, "count": 2}),
        ("r t --greedy false", {"run": "r", "text": "t", "greedy": False}),
        ("--greedy False r t", {"run": "r", "text": "t", "greedy": False}),
        ("r --greedy ON t", {"run": "r", "text": "t", "greedy": True}),
        ("r --greedy 0 -- t", {"run": "r", "text": "t", "greedy": False}),
        ("--greedy 1 --resume no r t", {"run": "r", "text": "t", "greedy": True, "resume": False}),
        ("--greedy true", {"run": "true", "greedy": True}),  # the folder is missing otherwise
        ("--greedy r true", {"run": "r", "text": "true", "greedy": True}),
        ("r --greedy -- no", {"run": "r", "text": "no", "greedy": True}),
        ("r --greedy no way", {"run": "r", "text": "way", "greedy": False}),
        ("r --file f --greedy False", {"run": "r", "file": "f", "greedy": False}),
        ("r --greedy=false", {"run": "r", "greedy": False}),
        ("--resume r", {"run": "r", "resume": True}),
        ("r --resume auto t", {"run": "r", "text": "t", "resume": "auto"}),
        ("r --resume=auto", {"run": "r", "resume": "auto"}),
        ("r --resume true t", {"run": "r", "text": "t", "resume": True}),
        ("--count 2 r --share 1 t", {"run": "r", "text": "t", "count": 2, "share": 1.0}),
        ("r --share -1e-3", {"run": "r", "share": -1e-3}),
        ("r -3", {"run": "r", "text": "-3"}),
        ("r --count 2 -- --share", {"run": "r", "text": "--share", "count": 2}),
        ("r null", {"run": "r", "text": "null"}),
        ("r --count 1e3", {"run": "r", "count": 1000}),
        ("r --count 4_0 --max_len 2.0", {"run": "r", "count": 40, "max_len": 2}),
        ("r --count 010", {"run": "r", "count": 10}),
        ("r --share 1_0 --max_len None", {"run": "r", "share": 10.0, "max_len": None}),
        ("r -red", {"run": "r", "text": "-red"}),
        ("r --max_len 5 -red", {"run": "r", "text": "-red", "max_len": 5}),
        ("r --prefix --note t", {"run": "r", "text": "t", "prefix": "--note"}),
        ("r --prefix=--count t", {"run": "r", "text": "t", "prefix": "--count"}),
        ("r --prefix= t", {"run": "r", "text": "t", "prefix": ""}),
        ("r --part a --part #b", {"run": "r", "part": ["a", "#b"]}),
        ("r \ufeff", {"run": "r", "text": "\ufeff"}),
        ("r - --greedy", {"run": "r", "text": "-", "greedy": True}),
        ("-- r --max-len", {"run": "r", "text": "--max-len"}),
    ],
)
def test_words_become_values(module, words, values) -> None:
    given = words.split()
    behind = [] if "--" in given else [[*given, "--debug"]]  # a flag of the program
    for line in (given, ["--debug", *given], *behind):
        parsed = parse(module, "sample", line)
        assert {name: value for name, value in parsed.items() if name != "text" or value is not None} == values


@each(
    "words, named",
    [
        ("", ["run"]),
        ("r t u", ["u"]),
        ("r --coutn 3", ["--coutn", "'--count'"]),
        ("r -count 3", ["'--count'"]),
        ("r --count:3", ["'--count'"]),
        ("r --cou 3", ["'--count'"]),  # no abbreviations: they would change with each new flag
        ("r --count", ["--count"]),
        ("r --count --greedy t", ["--count", "--greedy"]),
        ("r --count --x t", ["--count"]),
        ("r --prefix --greedy t", ["--prefix=--greedy"]),
        ("r --prefix -- t", ["--prefix=--"]),
        ("r --greedy True", ["--greedy=True", "'True'"]),
        ("r --resume auto", ["--resume=auto", "'auto'"]),
        *((f"r --count {value}", ["--count", f"'{value}'"]) for value in ("0x4", "1:30", "1e999", "true", "1.5")),
        ("r --share 0x4", ["--share", "'0x4'"]),
        ("r --greedy=maybe", ["--greedy", "'maybe'"]),
        ("r --resume=never", ["--resume", "'auto'", "'never'"]),
    ],
)
def test_wrong_words_are_refused(module, words, named) -> None:
    with pytest.raises(argparse.ArgumentError) as refused:
        parse(module, "sample", words.split())
    assert all(name in str(refused.value) for name in named) and "\n" not in str(refused.value)


def settings(*words: str) -> dict[str, Any]:
    values = parse(train, "train", ["run", *words])
    del values["run"]
    return values


def test_the_models_settings_are_nested_flags() -> None:
    values = settings("--model", "gpt", "--preset=small", "--model.dropout", "0.1", "--model.positions", "rotary")
    assert values == {"model": {"name": "gpt", "preset": "small", "dropout": 0.1, "positions": "rotary"}}
    config = TrainConfig.from_dict(values)
    assert (config.model, config.preset, config.settings) == ("gpt", "small", {"dropout": 0.1, "positions": "rotary"})
    gpt = config.model_config(vocab_size=50)
    # What was given, then the preset, then the default.
    assert (gpt.dropout, gpt.attention_dropout, gpt.d_model, gpt.vocab_size) == (0.1, 0.2, 384, 50)
    assert settings("--model.window_size", "null") == {"model": {"window_size": None}}
    assert settings("--skip-bad-lines", "--steps", "3") == {"skip_bad_lines": True, "steps": 3}


@pytest.mark.parametrize("config_first", [True, False])
def test_flags_override_the_file_in_any_order(tmp_path, monkeypatch, config_first) -> None:
    (tmp_path / "a.yaml").write_text(
        "model: {name: gpt, preset: small, d_model: 48, num_heads: 4}\nlr: 2e-3\nsteps: 5\nclip: 1\nprecision: bf16\n"
    )
    configs: list[TrainConfig] = []

    def start(config: TrainConfig, *_: object, **__: object) -> None:
        configs.append(config)
        raise ValueError("far enough")

    monkeypatch.setattr(train, "start", start)
    file, flags = ["--config", str(tmp_path / "a.yaml")], ["--model.d_model", "384", "--steps", "1000", "--seed=7"]
    words = [*file, *flags] if config_first else [*flags, *file]
    assert main(["train", str(tmp_path / "run"), *words]) == 1
    (config,) = configs
    assert (config.model, config.preset, config.settings) == ("gpt", "small", {"d_model": 384, "num_heads": 4})
    assert (config.steps, config.lr, config.clip, config.precision, config.seed) == (1000, 2e-3, 1.0, "bf16", 7)


def test_a_file_may_name_only_the_model(tmp_path) -> None:
    (tmp_path / "a.yaml").write_text("model: lstm\npreset: tiny\nbatching: random\nsmooth_others: yes\nval_tsv: null\n")
    assert train.read_settings(str(tmp_path / "a.yaml")) == {
        "model": {"name": "lstm", "preset": "tiny"},
        "batching": "random",
        "smooth_others": True,
        "val_tsv": None,
    }
    # As in the config.yaml of a run; a number may be a text, as a shell's variables fill it in.
    (tmp_path / "a.yaml").write_text("model: {name: gpt, source_vocab_size: null}\nsteps: '1_000'\nlr: '1e-3'\n")
    assert train.read_settings(str(tmp_path / "a.yaml")) == {"model": {"name": "gpt"}, "steps": 1000, "lr": 1e-3}
    for text in ("model: {name: gpt, vocab_size: 300}", "model: {name: gpt, special_ids: {}}", "steps: 'many'"):
        (tmp_path / "a.yaml").write_text(text + "\n")
        with pytest.raises(ValueError, match="a.yaml"):
            train.read_settings(str(tmp_path / "a.yaml"))
    before = {"model": "gpt", "steps": 3}
    assert merged(before, {"preset": "small"}) == {"model": {"name": "gpt", "preset": "small"}, "steps": 3}
    assert before == {"model": "gpt", "steps": 3}


def test_a_text_may_begin_with_dashes(module) -> None:
    for text in ("--count is a flag", "- a list", "-5 degrees"):
        assert parse(module, "sample", ["r", text, "--count", "2"])["text"] == text
        assert parse(module, "sample", ["r", "--count", "2", text])["text"] == text


@pytest.mark.parametrize("name", ["train", "translate", "generate", "average", "quantize", "demo", "score"])
def test_the_help_explains_every_flag_in_plain_words(name, ran) -> None:
    text = " ".join(ran(name, "--help").out.split())
    function = getattr(importlib.import_module(f"fastformer.commands.{name}"), name)
    assert function.__doc__.partition("\n")[0] in text and f"usage: fastformer {name} " in text
    assert " ".join(getattr(importlib.import_module(function.__module__), "USAGE", "").split()) in text
    for word in ("Annotated", "Union[", "Optional[", "Literal[", "Range(", "NoneType", "type:", "TASKS", "None)"):
        assert word not in text, word
    if name == "train":
        assert "--resume [auto] " in text and "(an integer; default: 4096)" in text and "(a number in [0, 1))" in text


# The arguments and flags of each command that are texts: their bytes are UTF-8, whatever the locale says of them. Those
# of others are names, of files say.
TEXTS = {
    "translate": {"text", "prefix"}, "generate": {"prompt", "stop", "regex", "choices"},
    "chat": {"system", "stop", "regex", "choices"}, "embed": {"text", "prompt", "prompt_name"}, "rank": {"query"},
    "transcribe": {"initial_prompt", "prefix", "hotwords"}, "train": {"user_tokens"}, "prepare": {"user_tokens"},
}  # fmt: skip


@pytest.mark.parametrize("command", sorted({*COMMANDS} - {"doctor"}))
def test_texts_are_decoded_and_names_are_not(command, monkeypatch) -> None:
    monkeypatch.setattr("fastformer.console.typed", lambda text: f"<{text}>")
    module = importlib.import_module(f"fastformer.commands.{command}")
    _, hints = make_parser(module, command)
    parameters = inspect.signature(getattr(module, command)).parameters.values()
    needed = {each.name: "a" for each in parameters if each.default is each.empty and each.kind is not each.VAR_KEYWORD}
    places = [each.name for each in parameters if each.kind is each.POSITIONAL_OR_KEYWORD]
    found = set()
    for name in (name for name, hint in hints.items() if is_text(hint)):
        if name in places:
            words = ["a"] * max(places.index(name) + 1, len(needed.keys() & {*places}))
        else:
            words = ["a" for each in places if each in needed]
        words += [f"--{each}=a" for each in {*needed, name} - {*places}]
        value: Any = parse(module, command, words)
        for part in name.split("."):
            value = value[part]
        assert value in ("a", "<a>", ["a"], ["<a>"]), name
        found |= {name} if value in ("<a>", ["<a>"]) else set()
    assert found == TEXTS.get(command, set())
