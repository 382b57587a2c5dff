"""Reads decoders that CTranslate2 converted. `tests.foreign.ctranslate2_folders` wrote them, and what it computes."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from fastformer.checkpoints import load_model
from fastformer.checkpoints.ctranslate2 import as_tensors
from fastformer.checkpoints.model_bin import MODEL, read_variables
from fastformer.checkpoints.run import architecture_of
from fastformer.cli import main
from fastformer.generation.folder_options import folder_options
from tests.checkpoints.test_ctranslate2 import written
from tests.foreign.ctranslate2_folders import DECODER_FOLDERS, DECODERS

pytest.importorskip("tokenizers", reason="the tokenizers library is not installed")


def load(folder: Path, **options: Any) -> Any:
    return load_model(folder, ("GPT",), **options)


@pytest.fixture
def folder(tmp_path) -> Path:
    return Path(shutil.copytree(DECODER_FOLDERS / "llama", tmp_path / "llama"))


@pytest.mark.parametrize(("name", "quantization"), [(name, kind) for name, _, _, kind in DECODERS])
def test_log_probs_and_tokens_equal_ctranslate2(name, quantization) -> None:
    model, tokenizer = load(DECODER_FOLDERS / name, dtype=torch.float32)
    expected = json.loads((DECODER_FOLDERS / name / "expected.json").read_text())
    names = json.loads((DECODER_FOLDERS / name / "vocabulary.json").read_text())
    assert model.precision == ("int8" if quantization == "int8" else None)
    for prompt, log_probs, continuation in zip(*expected.values(), strict=True):
        ids = tokenizer.encode(" ".join(prompt))
        with torch.inference_mode():
            rows = model(torch.tensor([ids]))[0].log_softmax(-1)
        found = rows[range(len(ids) - 1), ids[1:]]
        torch.testing.assert_close(found, torch.tensor(log_probs, dtype=torch.float32), rtol=1e-4, atol=1e-4)
        new = model.generate([ids], max_new_tokens=20, precision="fp32")[0].tolist()[len(ids) :]
        assert [names[i] for i in new if i != model.config.special_ids.first_eos] == continuation


def test_int8_keeps_the_files_numbers_and_bf16_its_dtype() -> None:
    stored = as_tensors(read_variables(DECODER_FOLDERS / "llama" / MODEL)[1])
    model = load(DECODER_FOLDERS / "llama")[0]
    name = "decoder/layer_1/ffn/linear_1/weight"
    expected = stored[name].float() / stored[f"{name}_scale"].float()[:, None]
    assert torch.equal(model.decoder.layers[1].linear2.weight, expected)
    dtypes = {name: next(load(DECODER_FOLDERS / name)[0].parameters()).dtype for name in ("qwen3", "mistral")}
    assert dtypes == {"qwen3": torch.bfloat16, "mistral": torch.float32}


@pytest.mark.parametrize("name", ["mistral", "gemma2"])  # a Gemma multiplies by 1 + gamma, which has more digits
def test_matrices_decide_the_dtype(name, tmp_path) -> None:
    folder = Path(shutil.copytree(DECODER_FOLDERS / name, tmp_path / name))
    specification, variables = read_variables(folder / MODEL)
    halved = {key: each.bfloat16() if each.dim() else each.clone() for key, each in as_tensors(variables).items()}
    for key, dtype in (("none", torch.bfloat16), ("decoder/layer_1/ffn/linear_1/weight", torch.float32)):
        wide = {other: each.float() + 2**-20 if other == key else each for other, each in halved.items()}
        (folder / MODEL).write_bytes(written(wide, specification))
        assert next(load(folder)[0].parameters()).dtype == dtype


def test_commands_take_a_folder(folder, capsys) -> None:
    assert architecture_of(folder) == "GPT" and folder_options(folder) == {}
    assert main(["generate", str(folder), "t5 t9", "--greedy", "--max_new_tokens", "3", "--device", "cpu"]) == 0
    assert capsys.readouterr().out.startswith("t5 t9")
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, 7], "temperature": 0.5}))
    assert load(folder)[0].config.special_ids.eos == (1, 7)
    assert folder_options(folder) == {"temperature": 0.5}


def test_a_llama_whose_scaling_is_lost_is_computed_as_ctranslate2_does(folder, caplog) -> None:
    data = bytearray((folder / MODEL).read_bytes())
    more = b""
    for layer in range(2):
        for name, kind, value in (("rotary_scaling_type", 1, b"\2"), ("rotary_low_freq_factor", 0, b"\0\0\x80?")):
            key = f"decoder/layer_{layer}/self_attention/{name}".encode() + b"\0"
            more += len(key).to_bytes(2, "little") + key + b"\0" + bytes([kind])
            more += len(value).to_bytes(4, "little") + value
    place = data.index(b"TransformerDecoderSpec\0") + 23 + 4
    count = int.from_bytes(data[place : place + 4], "little") + 4
    data[place : place + 4] = count.to_bytes(4, "little") + more
    (folder / MODEL).write_bytes(data)
    assert load(folder)[0].config.rotary_scaling is None and "not scaled" in caplog.text


def test_errors_name_what_is_wrong(folder) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_type": 1}))
    with pytest.raises(ValueError, match="quantization_type"):
        load(folder)
    (folder / "config.json").write_text(json.dumps(config))
    tokens = json.loads((folder / "vocabulary.json").read_text())
    for other, message in ((tokens[:-1], "39"), ([*tokens[:-1], "t5"], "vocabulary.json")):
        (folder / "vocabulary.json").write_text(json.dumps(other))
        with pytest.raises(ValueError, match=message):
            load(folder)
    (folder / "vocabulary.json").write_text(json.dumps(tokens))
    (folder / "tokenizer.json").unlink()
    with pytest.raises(ValueError, match="tokenizer.json"):
        load(folder)
