"""Decoding flags, or a YAML file instead, reach the search as fields of a `GenerationConfig`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from jsonargparse import ArgumentParser

from fastformer.cli import main
from fastformer.commands._options import add_fields
from fastformer.data import ByteTokenizer
from fastformer.generation import GenerationConfig, Translator
from fastformer.models import GPT, Transformer
from tests.generation.small import tiny

# Between them they name every flag, with another value than its default.
GROUPS: list[dict[str, Any]] = [
    {"do_sample": True, "temperature": 0.5, "top_k": 7, "top_p": 0.9, "seed": 11, "num_return_sequences": 3},
    {"num_beams": 4, "length_penalty": 1.5, "early_stopping": True, "num_return_sequences": 2},
    {"num_beams": 4, "num_beam_groups": 2, "diversity_penalty": 0.5, "max_time": 7.5},
    {"num_beams": 4, "beam_rules": "transformers", "length_penalty": 2.0, "early_stopping": "never"},
    {
        "min_new_tokens": 2,
        "max_new_tokens": 5,
        "repetition_penalty": 1.25,
        "no_repeat_ngram_size": 3,
        "prompt_lookup_num_tokens": 4,
    },
    {"window": "slide", "max_new_tokens": 5},
    {"cache_dtype": "int8", "max_new_tokens": 5},
]


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("options")
    for name, kind in (("translate", Transformer), ("generate", GPT)):
        tiny(kind, max_len=40).save_pretrained(folder / name, ByteTokenizer())
    return {name: str(folder / name) for name in ("translate", "generate")}


@pytest.fixture
def searched(monkeypatch) -> list[GenerationConfig]:
    """Records the configs with which commands search."""
    given: list[GenerationConfig] = []
    answers = Translator.answers

    def answer(self, source, config, *others, **more):
        given.append(config)
        return answers(self, source, config, *others, **more)

    def search(model, input_ids, config, **options):
        given.append(config)
        return torch.tensor([[3]])

    monkeypatch.setattr(Translator, "answers", answer)
    monkeypatch.setattr("fastformer.generation.generate", search)
    return given


def flags_of(command: str, options: dict[str, Any]) -> list[str]:
    names = {"num_return_sequences": "n_best"} if command == "translate" else {}
    return [part for name, value in options.items() for part in (f"--{names.get(name, name)}", str(value).lower())]


@pytest.mark.parametrize("command", ["translate", "generate"])
@pytest.mark.parametrize("options", GROUPS, ids=lambda options: next(iter(options)))
def test_each_flag_reaches_the_search(command, options, folders, searched) -> None:
    flags = dict(options)
    if command == "generate":  # it samples without a flag, unless there are beams
        flags.pop("do_sample", None)
        options = {**options, "do_sample": "num_beams" not in options}
    elif "window" in options:
        pytest.skip("a translator reads a source: it has no flag for the window")
    assert main([command, folders[command], "one", *flags_of(command, flags)]) == 0
    assert searched == [GenerationConfig(**options)]


@pytest.mark.parametrize("command", ["translate", "generate"])
def test_a_file_of_options_is_read_and_flags_override_it(command, folders, searched, tmp_path, ran) -> None:
    file = tmp_path / "decoding.yaml"
    file.write_text("num_beams: 4\nmax_new_tokens: 5\nsuppress_tokens: [7, 8]\nnum_return_sequences: 2\n")
    run = [command, folders[command], "one", "--config", str(file)]
    assert main([*run, "--max_new_tokens", "3"]) == 0
    assert searched == [GenerationConfig(num_beams=4, max_new_tokens=3, suppress_tokens=[7, 8], num_return_sequences=2)]
    for text, words in (("num_beam: 3", ("decoding.yaml", "num_beams")), ("num_beams: many", ("num_beams", "many"))):
        file.write_text(text)
        error = ran(*run, code=1).err
        assert all(word in error for word in words), error
    assert main([*run[:-1], str(tmp_path / "none.yaml")]) == 1


def test_a_file_may_say_whether_to_sample(folders, searched, tmp_path) -> None:
    file = tmp_path / "decoding.yaml"
    run = ["generate", folders["generate"], "a", "--config", str(file)]
    for text, flags, samples in (
        ("do_sample: false", [], False),
        ("do_sample: true", ["--greedy"], False),
        ("seed: 3", [], True),
    ):
        file.write_text(text)
        assert main([*run, *flags]) == 0
        assert searched.pop().do_sample == samples


@pytest.mark.parametrize("command", ["translate", "generate"])
def test_a_file_may_name_the_precision_as_the_flag_does(command, folders, searched, tmp_path) -> None:
    file = tmp_path / "decoding.yaml"
    file.write_text("precision: int8")
    run = [command, folders[command], "one"]
    for flags in (["--config", str(file)], ["--precision", "int8"], ["--config", str(file), "--precision", "bf16"]):
        assert main([*run, *flags]) == 0
    # Weights that are loaded as bf16 say it themselves.
    assert [config.precision for config in searched] == ["int8", "int8", None]


def test_a_flag_of_a_field_has_its_type_its_default_and_its_first_sentence() -> None:
    @dataclass
    class Options:
        """Options.

        Attributes:
            count: how many rows, over
                two lines
            share: how much of a row, 0.5 say. More of it is in the guide.
        """

        count: int = 3
        share: float | None = None

    parser = ArgumentParser()
    assert add_fields(parser, Options, ["share", "count"]) == {"share": float | None, "count": int}
    flags = {action.dest: (action.default, action.help) for action in parser._actions}
    assert flags["count"] == (3, "how many rows, over two lines")
    assert flags["share"] == (None, "how much of a row, 0.5 say")
