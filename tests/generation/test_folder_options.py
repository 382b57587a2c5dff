"""A folder's generation_config.json decides defaults, and never what an option of a request means."""

from __future__ import annotations

import asyncio
import json
import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from fastformer.checkpoints import load_model
from fastformer.cli import main
from fastformer.generation import AsyncGenerator, generate
from fastformer.generation.folder_options import folder_options, with_folder_options
from tests.checkpoints import decoders
from tests.foreign import gguf_files

FILES: dict[str, dict[str, Any] | None] = {
    "missing": None,
    "empty": {},
    "with an option that changes nothing": {"repetition_penalty": 1.0},
    "with the options of a chat model": {"temperature": 0.7},
}
PROMPT = "two birds two birds the dog"
# By rule that differs between toolkits: a request that tells its meanings apart.
REQUESTS: dict[str, dict[str, Any]] = {
    "the prompt is penalised": {"repetition_penalty": 3.0},
    "the prompt's n-grams count": {"no_repeat_ngram_size": 1},
    "both": {"repetition_penalty": 1.5, "no_repeat_ngram_size": 2},
    "bad words": {"bad_words_ids": [[5], [9, 6]]},
    "beams": {"num_beams": 3, "length_penalty": 3.0, "min_new_tokens": 2},
    "beams and processors": {"num_beams": 3, "repetition_penalty": 2.0, "no_repeat_ngram_size": 2},
    "a forced first token": {"forced_bos_token_id": 7},
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> Callable[[str], Path]:
    """Returns the folder with one of FILES."""
    first = tmp_path_factory.mktemp("folders") / "first"
    decoders.llama3(first)
    found = {}
    for name, values in FILES.items():
        found[name] = shutil.copytree(first, first.with_name(name.replace(" ", "-")))
        file = found[name] / "generation_config.json"
        file.unlink()
        if values is not None:
            file.write_text(json.dumps(values))
    return found.__getitem__


@pytest.mark.parametrize("asked", REQUESTS.values(), ids=REQUESTS)
def test_a_request_means_what_it_means_in_transformers_whatever_the_file_has(asked, folders) -> None:
    for name in FILES:
        folder = folders(name)
        model, tokenizer = load_model(folder, ("GPT",))
        ids = torch.tensor([tokenizer.encode(PROMPT)])
        theirs = AutoModelForCausalLM.from_pretrained(folder).eval()
        options = {"max_new_tokens": 12, "eos_token_id": 3, "pad_token_id": 3, **asked}
        expected = theirs.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, **options)
        config = with_folder_options(folder_options(folder), options, model.config.max_len)
        assert generate(model, ids, config).tolist() == expected.tolist(), name
        if "num_beams" not in asked:  # a request without a folder's options, too
            assert generate(model, ids, **options).tolist() == expected.tolist()


def test_the_server_and_the_command_sample_alike_whatever_the_file_has(folders, capsys) -> None:
    """With a temperature of the request's own, so that no default of the files is left."""

    async def said(folder: Path, **options: Any) -> list[int]:
        async with AsyncGenerator.from_pretrained(folder) as front:
            [found] = await front.complete(PROMPT, max_new_tokens=9, **options)
            return [one.token for one in found.tokens]

    for options in (
        {"repetition_penalty": 3.0, "do_sample": False, "temperature": 1.0},
        {"do_sample": True, "temperature": 3.0, "seed": 4},
    ):
        flags = [f"--{name}={str(value).lower()}" for name, value in options.items() if name != "do_sample"]
        flags = ["--greedy", *flags[:1]] if not options["do_sample"] else flags
        texts, tokens = set(), set()
        for name in FILES:
            tokens.add(tuple(asyncio.run(said(folders(name), **options))))
            assert (
                main(["generate", str(folders(name)), PROMPT, "--max_new_tokens", "9", "--device", "cpu", *flags]) == 0
            )
            texts.add(capsys.readouterr().out)
        assert len(texts) == len(tokens) == 1


def test_the_log_says_what_is_applied_and_what_is_not(folders, tmp_path, caplog) -> None:
    folder = shutil.copytree(folders("empty"), tmp_path / "model")
    values = {"do_sample": True, "top_p": 0.9, "repetition_penalty": 1.1, "min_p": 0.2, "num_beams": 4}
    (folder / "generation_config.json").write_text(json.dumps(values))
    with caplog.at_level(logging.INFO, "fastformer"):
        theirs = folder_options(folder, unused=("num_beams",))
        load_model(folder, ("GPT",))
        with_folder_options(theirs, {"repetition_penalty": 1.3}, 64)
    told = {record.levelname: record.getMessage() for record in caplog.records}
    assert set(told) == {"WARNING", "INFO"} and len(caplog.records) == 2
    for part in ("min_p=0.2", "num_beams=4"):
        assert part in told["WARNING"] and part not in told["INFO"]
    for part in ("do_sample=True", "top_p=0.9"):
        assert part in told["INFO"] and part not in told["WARNING"]
    assert "repetition_penalty" not in told["INFO"]  # the request's
    caplog.clear()
    with caplog.at_level(logging.INFO, "fastformer"):
        with_folder_options(folder_options(folders("with the options of a chat model")), {}, 64)
    assert not caplog.records  # without sampling, a temperature has no effect


@pytest.fixture
def older(folders, tmp_path) -> Path:
    """Returns a folder whose options are among the settings of the model."""
    folder = shutil.copytree(folders("missing"), tmp_path / "older")
    settings = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(settings | OLDER))
    return folder


OLDER = {"do_sample": True, "temperature": 0.5, "top_k": 7, "repetition_penalty": 1.25, "max_length": 40, "min_p": 0.25}


def test_options_of_an_older_folder_are_among_its_settings(older, folders, caplog) -> None:
    theirs = AutoModelForCausalLM.from_pretrained(older).generation_config
    config = with_folder_options(folder_options(older), {}, 64)
    applied = {name: value for name, value in OLDER.items() if name != "min_p"}
    for name, value in applied.items():
        assert getattr(config, name) == value == getattr(theirs, name), name
    assert "min_p=0.25" in caplog.text and folder_options(folders("missing")) == {}


@pytest.mark.parametrize("option, value", [("temperature", 0.5), ("top_k", 5), ("top_p", 0.9)])
def test_an_option_of_sampling_implies_sampling(option, value, folders, capsys) -> None:
    for name in FILES:
        assert with_folder_options(folder_options(folders(name)), {option: value}, 64).do_sample
        with pytest.raises(ValueError, match="do_sample"):
            with_folder_options(folder_options(folders(name)), {option: value, "do_sample": False}, 64)
    words = ["generate", str(folders("missing")), PROMPT, f"--{option}={value}", "--max_new_tokens=3", "--device=cpu"]
    assert main(words) == 0 and capsys.readouterr().out.startswith(PROMPT)


def test_a_quantised_folder_keeps_the_defaults_of_its_kind(folders, older, tmp_path, capsys) -> None:
    gguf = gguf_files.FOLDER / "llama.gguf"
    for number, model in enumerate((folders("missing"), folders("with the options of a chat model"), older, gguf)):
        out = tmp_path / str(number)
        assert main(["quantize", str(model), str(out)]) == 0
        assert folder_options(out) == folder_options(model) is not None
    load_model(folders("empty"), ("GPT",))[0].save_pretrained(tmp_path / "run")
    assert folder_options(tmp_path / "run") is None  # the folder of a model of fastformer
