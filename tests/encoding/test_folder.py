"""If a folder has something missing, damaged or unknown, the error names it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from fastformer.encoding.folder import read_folder
from tests.encoding.folders import D_MODEL, dense, modules, write

pytest.importorskip("transformers", reason="the folders are written by transformers")

POOLING = ("Pooling", {"embedding_dimension": D_MODEL, "pooling_mode": "mean"})


def refused(folder: Path, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        read_folder(folder)


def test_no_folder_no_model_another_architecture(tmp_path) -> None:
    refused(tmp_path / "none", "none")
    refused(tmp_path, "config.json")
    write(tmp_path / "config.json", {"model_type": "bart"})
    refused(tmp_path, "'bart'")
    write(tmp_path / "config.json", {"model_type": "unheard"})
    refused(tmp_path, "'unheard'")


@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json"])
def test_a_missing_file_is_named(folder, name) -> None:
    (folder / name).unlink()
    refused(folder, name)


def test_weights_that_are_not_finite(folder, plain) -> None:
    from safetensors.torch import load_file

    state = load_file(plain[0] / "model.safetensors")
    state["encoder.layer.1.output.dense.weight"][3, 4] = float("nan")
    (folder / "model.safetensors").unlink()
    save_file(state, folder / "model.safetensors")
    refused(folder, "encoder.layer.1.output.dense.weight")


@pytest.mark.parametrize(
    "listed",
    [
        "{", '"text"', "[]", "[{}]", '[{"type": "sentence_transformers.models.Pooling", "path": "1_Pooling"}]',
        '[{"type": "mine.Transformer", "path": ""}]', '[{"type": "sentence_transformers.models.CNN", "path": ""}]',
        '[{"type": "sentence_transformers.models.Transformer", "path": "../other"}]',
        '[{"type": "sentence_transformers.models.Transformer", "path": "/"}]',
        '[{"type": "sentence_transformers.models.Transformer", "path": ""},'
        ' {"type": "sentence_transformers.models.Normalize", "path": ""}]',
    ],
)  # fmt: skip
def test_missing_and_unknown_modules(folder, listed) -> None:
    (folder / "modules.json").write_text(listed)
    refused(folder, "modules.json")


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"pooling_mode": "median"}, "median"),
        ({"pooling_mode": []}, "pooling_mode"),
        ({"pooling_mode_median_tokens": True}, "median"),
        ({"pooling_mode": "mean", "embedding_dimension": D_MODEL + 1}, str(D_MODEL)),
        ({"pooling_mode": "mean", "include_prompt": "no"}, "include_prompt"),
    ],
)
def test_poolings_that_do_not_fit(folder, settings, named) -> None:
    modules(folder, ("Pooling", settings))
    refused(folder, named)


def test_layers_that_do_not_fit(folder) -> None:
    place = modules(folder, POOLING, ("Dense", {}))[1]
    refused(folder, "2_Dense")
    dense(place, D_MODEL, 8)
    read_folder(folder)
    settings = json.loads((place / "config.json").read_text())
    for changes, named in (
        ({"in_features": 7}, "in_features"),
        ({"out_features": 9}, "linear"),
        ({"activation_function": "mine.Act"}, "mine.Act"),
        ({"use_residual": True}, "residual.weight"),
        ({"module_input_name": "token_embeddings"}, "module_input_name"),
    ):
        write(place / "config.json", {**settings, **changes})
        refused(folder, named)
    write(place / "config.json", settings)
    save_file({"linear.weight": torch.zeros(8, D_MODEL)}, place / "model.safetensors")
    refused(folder, "linear.bias")
    (place / "model.safetensors").unlink()
    refused(folder, "2_Dense")


@pytest.mark.parametrize(
    ("file", "settings", "named"),
    [
        ("config_sentence_transformers.json", {"prompts": ["a"]}, "prompts"),
        ("config_sentence_transformers.json", {"prompts": {"query": ""}, "default_prompt_name": "qery"}, "'query'"),
        ("config_sentence_transformers.json", {"similarity_fn_name": "maxsim"}, "maxsim"),
        ("config_sentence_transformers.json", {"truncate_dim": "8"}, "truncate_dim"),
        ("sentence_bert_config.json", {"max_seq_length": 0}, "max_seq_length"),
        ("sentence_bert_config.json", {"max_seq_length": "9"}, "max_seq_length"),
        ("sentence_bert_config.json", {"do_lower_case": "yes"}, "do_lower_case"),
        ("sentence_bert_config.json", {"query_length": 8}, "query_length"),
        ("sentence_bert_config.json", {"document_length": 8}, "document_length"),
        ("sentence_bert_config.json", {"query_expansion": {"strategy": "fixed", "length": 8}}, "query_expansion"),
    ],
)
def test_invalid_settings(folder, file, settings, named) -> None:
    write(folder / file, settings)
    refused(folder, named)


def test_the_settings_of_a_folder(folder) -> None:
    modules(folder, POOLING, ("Dropout", {}), ("Normalize", {}))
    write(folder / "sentence_bert_config.json", {"max_seq_length": 99, "do_lower_case": True})
    settings = {"prompts": {"query": "q: "}, "default_prompt_name": "query", "similarity_fn_name": "euclidean"}
    write(folder / "config_sentence_transformers.json", {**settings, "truncate_dim": 4})
    loaded = read_folder(folder)
    assert (loaded.prompts, loaded.default_prompt_name, loaded.similarity) == ({"query": "q: "}, "query", "euclidean")
    assert loaded.truncate_dim == 4 and len(loaded.steps) == 1 and loaded.reader.max_len == loaded.model.config.max_len
    assert loaded.reader.texts(["A Bird"]) == loaded.reader.texts(["a bird"])


@pytest.mark.parametrize(
    ("kind", "command"), [("marian", "fastformer translate"), ("t5", "fastformer translate"), ("whisper", "transcribe")]
)
def test_a_folder_of_another_kind_is_refused_with_the_command_that_takes_it(kind, command, tmp_path) -> None:
    write(tmp_path / "config.json", {"model_type": kind})
    refused(tmp_path, f"'{kind}'.*{command}")
